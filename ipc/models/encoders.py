"""The supported text encoders: how each reads its config.json, and the names and shapes of its
checkpoint's tensors.

Must not know: tensors' values, layers, how any of it is computed. executor/models/encoder.py builds
the models from these tables. FALLBACK_ENCODERS run in transformers' modelling code, without a head
of their own; tests/executor/models/fallback/test_encoder.py compares a model of each type with
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from ..errors import ModelLoadError
from .config_values import malformed
from .encoder_config import EncoderConfig, Keys
from .forms import CLASSIFY, CLASSIFY_TOKENS, EMBED, Head, HeadLayer, form_of, label_names
from .rope_config import FULL, SLIDING, parse_rope_parameters

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class EncoderNames(msgspec.Struct, frozen=True):
    """Names of tensors without `base` and without ".weight". "": the model has no such tensor."""

    base: str  # in front of all names but the head's
    words: str
    positions: str
    types: str
    embedding_norm: str
    layer: str  # with {} for the layer's index; in front of the names that follow
    qkv: tuple[str, ...]  # q, k and v, or all in one
    out: str
    attention_norm: str
    up: tuple[str, ...]  # of the MLP, in the order of rows; a gated one first has the activated
    down: str
    mlp_norm: str
    final_norm: str = ""
    relative_bias: str = ""


Parse = Callable[[dict[str, Any]], EncoderConfig]


class EncoderArchitecture(msgspec.Struct, frozen=True):
    """A text encoder's row. `is_gated`: the MLP is down(activation(first half) * second half).
    `is_pre_norm`: norms come before the blocks, and the first layer has none before attention
    (ModernBERT). Otherwise norms come after the blocks (BERT).
    """

    model_type: str
    parse: Parse
    names: EncoderNames
    is_gated: bool = False
    is_pre_norm: bool = False

    def weight_shapes(self, config: EncoderConfig) -> dict[str, list[int]]:
        """The shape of every tensor that a checkpoint must hold, by name."""
        base = self.names.base
        shapes = {base + name: shape for name, shape in self._base_shapes(config)}
        return shapes | dict(item for layer in config.head for item in layer.shapes())

    def tied_weights(self, config: EncoderConfig) -> dict[str, str]:
        return {}

    def _base_shapes(self, config: EncoderConfig) -> Iterator[tuple[str, list[int]]]:
        names, hidden, inner = self.names, config.hidden_size, config.intermediate_size
        tables = (
            (names.words, config.vocab_size),
            (names.positions, config.max_position_embeddings + config.position_offset),
            (names.types, config.type_vocab_size),
        )
        yield from ((f"{name}.weight", [rows, hidden]) for name, rows in tables if name and rows)
        if names.relative_bias:
            rows = config.relative_buckets
            yield f"{names.relative_bias}.weight", [rows, config.num_attention_heads]
        yield from _norm(names.embedding_norm, config)
        for index in range(config.num_hidden_layers):
            layer = names.layer.format(index)
            qkv_rows = 3 * hidden // len(names.qkv)
            up_rows = (1 + self.is_gated) * inner // len(names.up)
            for name, rows, columns, bias in (
                *((name, qkv_rows, hidden, config.attention_bias) for name in names.qkv),
                (names.out, hidden, hidden, config.attention_bias),
                *((name, up_rows, hidden, config.mlp_bias) for name in names.up),
                (names.down, hidden, inner, config.mlp_bias),
            ):
                yield f"{layer}{name}.weight", [rows, columns]
                if bias:
                    yield f"{layer}{name}.bias", [rows]
            if index or not self.is_pre_norm:
                yield from _norm(layer + names.attention_norm, config)
            yield from _norm(layer + names.mlp_norm, config)
        if names.final_norm:
            yield from _norm(names.final_norm, config)


def _norm(name: str, config: EncoderConfig) -> Iterator[tuple[str, list[int]]]:
    yield f"{name}.weight", [config.hidden_size]
    if config.norm_bias:
        yield f"{name}.bias", [config.hidden_size]


def _head(hf_config: dict[str, Any], hidden: int, *before: HeadLayer, last: str) -> Head:
    """The layers of a classifier: `before`, and then `last`, which makes the classes. A classifier
    of tokens has only `last`.
    """
    form = form_of(hf_config)
    if form not in (CLASSIFY, CLASSIFY_TOKENS):
        return ()
    num_labels = len(label_names(hf_config))
    if form == CLASSIFY_TOKENS:
        return (HeadLayer("classifier", hidden, num_labels),)
    return (*before, HeadLayer(last, hidden, num_labels))


class _WithPositions(msgspec.Struct, frozen=True):
    """How a family with a table of positions reads its config.json.

    `dense` and `last` are names of a classifier's layers. `renamed` maps our keys to the family's.
    `types` is the least type_vocab_size; None: tokens have no types. `offset` is the row of the
    first position in the table; None: positions are counted after the padding token's, as in
    RoBERTa.
    """

    base: str
    dense: str
    last: str = "classifier"
    dense_activation: str = "tanh"
    renamed: Mapping[str, str] = {}
    types: int | None = None
    offset: int | None = 0
    has_bias_table: bool = False

    def __call__(self, hf_config: dict[str, Any]) -> EncoderConfig:
        keys = Keys(hf_config, self.renamed)
        basic = keys.basic(1e-12)
        hidden = basic["hidden_size"]
        buckets = keys.size("relative_attention_num_buckets", 32) if self.has_bias_table else 0
        if buckets not in (0, 32):  # transformers distinguishes 32 whatever the key says
            raise ModelLoadError(
                f"config.json: relative_attention_num_buckets={buckets} is not supported; "
                f"supported: 32"
            )
        num_types = 0
        if self.types is not None:
            num_types = keys.size("type_vocab_size", 2, least=self.types)
        dense = HeadLayer(self.dense, hidden, hidden, activation=self.dense_activation)
        return EncoderConfig(
            **basic,
            **_positions(keys, self.offset),
            activation=keys.activation("hidden_act", "gelu"),
            type_vocab_size=num_types,
            has_pair_types=self.offset == 0 and num_types > 1,
            relative_buckets=buckets,
            head=_head(hf_config, hidden, dense, last=self.last),
            base_prefix=self.base,
        )


def _positions(keys: Keys, offset: int | None) -> dict[str, Any]:
    """The longest text and the row of its first token. For `offset` see _WithPositions."""
    if offset is None:
        offset = keys.size("pad_token_id", 1, least=0) + 1
    rows = keys.size("max_position_embeddings", 512)
    if rows <= offset:
        raise ModelLoadError(
            f"config.json: max_position_embeddings must be more than {offset}, got {rows}"
        )
    return {"max_position_embeddings": rows - offset, "position_offset": offset}


def _parse_modernbert(hf_config: dict[str, Any]) -> EncoderConfig:
    keys = Keys(hf_config, {"hidden_act": "hidden_activation", "layer_norm_eps": "norm_eps"})
    basic = keys.basic(1e-5)
    hidden, num_layers = basic["hidden_size"], basic["num_hidden_layers"]
    every = keys.size("global_attn_every_n_layers", 3)
    kinds = keys.get("layer_types") or [SLIDING if i % every else "" for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) < num_layers:
        raise malformed("layer_types", f"a list of {num_layers} names", kinds)
    is_local = [kind == SLIDING for kind in kinds[:num_layers]]
    window = keys.size("local_attention", 128) // 2
    context, given = keys.size("max_position_embeddings", 8192), keys.get("rope_parameters") or {}
    if keys.get("rope_scaling") or not isinstance(given, dict):
        raise ModelLoadError(
            "config.json: rope_scaling is not supported for ModernBERT, rope_parameters is, with "
            "an object for each kind of layers"
        )
    ropes = [
        _rope(given.get(kind), keys.number(key, default, 1, 1e12), context)
        for kind, key, default in (
            (FULL, "global_rope_theta", 160_000.0),
            (SLIDING, "local_rope_theta", 10_000.0),
        )
    ]
    norm_bias = keys.switch("norm_bias", False)
    act = keys.activation("classifier_activation", "gelu")
    has_bias = keys.switch("classifier_bias", False)
    before = (
        HeadLayer("head.dense", hidden, hidden, has_bias=has_bias, activation=act),
        HeadLayer("head.norm", hidden, hidden, norm_bias, norm_eps=basic["layer_norm_eps"]),
    )
    head = _head(hf_config, hidden, *before, last="classifier")
    if form_of(hf_config) == CLASSIFY_TOKENS:
        head = (*before, *head)
    return EncoderConfig(
        **basic,
        max_position_embeddings=context,
        activation=_gated(keys.activation("hidden_act", "gelu")),
        ropes=tuple(ropes[i] for i in is_local),
        windows=tuple(window if local else 0 for local in is_local),
        norm_bias=norm_bias,
        attention_bias=keys.switch("attention_bias", False),
        mlp_bias=keys.switch("mlp_bias", False),
        head=head,
        base_prefix=MODERNBERT_NAMES.base,
    )


def _parse_nomic_bert(hf_config: dict[str, Any]) -> EncoderConfig:
    """Reads both transformers' keys and those of nomic-ai's own code, which are GPT-2's."""
    renamed = {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "layer_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
        "max_position_embeddings": "n_positions",
    }
    keys = Keys(hf_config, renamed)
    basic = keys.basic(1e-12)
    hidden, num_layers = basic["hidden_size"], basic["num_hidden_layers"]
    for key in ("mlp_fc1_bias", "mlp_fc2_bias", "qkv_proj_bias", "rotary_emb_interleaved"):
        if keys.switch(key, False):
            raise ModelLoadError(f"config.json: {key}=true is not supported for nomic_bert")
    if keys.number("rotary_emb_fraction", 1.0, 0, 1) != 1.0:
        raise ModelLoadError("config.json: rotary_emb_fraction other than 1 is not supported")
    context = keys.size("max_position_embeddings", 2048)
    if keys.get("rotary_scaling_factor"):  # angles would depend on the length of the text
        context = min(context, keys.size("max_trained_positions", 2048))
    theta = keys.number("rotary_emb_base", 1000.0, 1, 1e12)
    rope = _rope(keys.get("rope_parameters"), theta, context)
    dense = HeadLayer(f"{NOMIC_NAMES.base}pooler.dense", hidden, hidden, activation="tanh")
    return EncoderConfig(
        **basic,
        max_position_embeddings=context,
        activation=_gated(keys.activation("hidden_act", "silu")),
        type_vocab_size=(num_types := keys.size("type_vocab_size", 2, least=0)),
        has_pair_types=num_types > 1,
        ropes=(rope,) * num_layers,
        attention_bias=False,
        mlp_bias=False,
        head=_head(hf_config, hidden, dense, last="classifier"),
        base_prefix=NOMIC_NAMES.base,
    )


def _rope(given: Any, theta: float, context: int) -> dict[str, Any]:
    """The rotary embedding of some layers. `given` is what config.json has, if anything, `theta`
    serves where it has none, and `context` is the model's longest text.
    """
    if given is not None and not isinstance(given, dict):
        raise malformed("rope_parameters", "objects", given)
    found = {key: value for key, value in (given or {}).items() if value is not None}
    rope = parse_rope_parameters(
        {"rope_parameters": {"rope_theta": theta, **found}, "max_position_embeddings": context}
    )
    if rope["rope_type"] not in ROPE_TYPES:  # the others' angles depend on the text's length
        raise ModelLoadError(
            f"config.json: rope type {rope['rope_type']} is not supported for text encoders; "
            f"supported: {', '.join(ROPE_TYPES)}"
        )
    return rope | {"rope_theta": float(rope["rope_theta"])}


def _gated(activation: str) -> str:
    if activation == "relu":
        raise ModelLoadError("config.json: relu is not supported in a gated MLP")
    return activation


BERT_NAMES = EncoderNames(
    base="bert.",
    words="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layer="encoder.layer.{}.",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up=("intermediate.dense",),
    down="output.dense",
    mlp_norm="output.LayerNorm",
)
MPNET_NAMES = replace(
    BERT_NAMES,
    base="mpnet.",
    types="",
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    out="attention.attn.o",
    attention_norm="attention.LayerNorm",
    relative_bias="encoder.relative_attention_bias",
)
DISTILBERT_NAMES = replace(
    BERT_NAMES,
    base="distilbert.",
    types="",
    layer="transformer.layer.{}.",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up=("ffn.lin1",),
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
)
MODERNBERT_NAMES = EncoderNames(
    base="model.",
    words="embeddings.tok_embeddings",
    positions="",
    types="",
    embedding_norm="embeddings.norm",
    layer="layers.{}.",
    qkv=("attn.Wqkv",),
    out="attn.Wo",
    attention_norm="attn_norm",
    up=("mlp.Wi",),
    down="mlp.Wo",
    mlp_norm="mlp_norm",
    final_norm="final_norm",
)
NOMIC_NAMES = EncoderNames(  # nomic-ai's own names, in which transformers saves too
    base="nomic_bert.",
    words="embeddings.word_embeddings",
    positions="",
    types="embeddings.token_type_embeddings",
    embedding_norm="emb_ln",
    layer="encoder.layers.{}.",
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    attention_norm="norm1",
    up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
    mlp_norm="norm2",
)


def _roberta(model_type: str) -> EncoderArchitecture:
    base = "roberta."
    parse = _WithPositions(base, "classifier.dense", "classifier.out_proj", types=1, offset=None)
    return EncoderArchitecture(model_type, parse, replace(BERT_NAMES, base=base))


ENCODERS = {
    "BertModel": EncoderArchitecture(
        "bert",
        _WithPositions(BERT_NAMES.base, f"{BERT_NAMES.base}pooler.dense", types=0),
        BERT_NAMES,
    ),
    "RobertaModel": _roberta("roberta"),
    "XLMRobertaModel": _roberta("xlm-roberta"),
    "CamembertModel": _roberta("camembert"),
    "MPNetModel": EncoderArchitecture(
        "mpnet",
        _WithPositions(  # its offset is a constant of transformers
            MPNET_NAMES.base,
            "classifier.dense",
            "classifier.out_proj",
            offset=2,
            has_bias_table=True,
        ),
        MPNET_NAMES,
    ),
    "DistilBertModel": EncoderArchitecture(
        "distilbert",
        _WithPositions(
            DISTILBERT_NAMES.base,
            "pre_classifier",
            dense_activation="relu",
            renamed={
                "hidden_size": "dim",
                "intermediate_size": "hidden_dim",
                "num_hidden_layers": "n_layers",
                "num_attention_heads": "n_heads",
                "hidden_act": "activation",
            },
        ),
        DISTILBERT_NAMES,
    ),
    "ModernBertModel": EncoderArchitecture(
        "modernbert", _parse_modernbert, MODERNBERT_NAMES, is_gated=True, is_pre_norm=True
    ),
    "NomicBertModel": EncoderArchitecture(
        "nomic_bert", _parse_nomic_bert, NOMIC_NAMES, is_gated=True
    ),
}


class FallbackEncoder(msgspec.Struct, frozen=True):
    """A type of encoder in transformers' code. `has_types`: tokens have types, and those of the
    second text of a pair have type 1. `counts_behind_padding`: positions are counted after the
    padding token's, as in RoBERTa.
    """

    architecture: str
    has_types: bool = False
    counts_behind_padding: bool = False


FALLBACK_ENCODERS = {
    "albert": FallbackEncoder("AlbertModel", has_types=True),
    "data2vec-text": FallbackEncoder("Data2VecTextModel", counts_behind_padding=True),
    "electra": FallbackEncoder("ElectraModel", has_types=True),
    "ernie": FallbackEncoder("ErnieModel", has_types=True),
    "eurobert": FallbackEncoder("EuroBertModel"),
    "gte": FallbackEncoder("GteModel", has_types=True),
    "jina_embeddings_v3": FallbackEncoder("JinaEmbeddingsV3Model"),
    "roberta-prelayernorm": FallbackEncoder("RobertaPreLayerNormModel", counts_behind_padding=True),
    "xlm-roberta-xl": FallbackEncoder("XLMRobertaXLModel", counts_behind_padding=True),
}


class FallbackEncoderConfig(EncoderConfig, frozen=True):
    hf_config: Mapping[str, Any] = {}  # what transformers reads


def is_fallback_encoder(hf_config: Mapping[str, Any]) -> bool:
    """Whether the model is of one of these types: a base model, or one whose head is left out."""
    model_type, names = hf_config.get("model_type"), hf_config.get("architectures") or []
    if not isinstance(model_type, str) or model_type not in FALLBACK_ENCODERS:
        return False
    return not names or form_of(hf_config) == EMBED


def parse_fallback_encoder(hf_config: dict[str, Any]) -> FallbackEncoderConfig:
    """Reads what plan and runner need; transformers reads the rest.

    Raises ModelLoadError, naming the key, for a key that is missing or out of range.
    """
    known = FALLBACK_ENCODERS[hf_config["model_type"]]
    keys = Keys({k: v for k, v in hf_config.items() if k != "embedding_size"}, {})
    num_types = keys.size("type_vocab_size", 2, least=0) if known.has_types else 0
    return FallbackEncoderConfig(
        **keys.basic(1e-12),
        **_positions(keys, None if known.counts_behind_padding else 0),
        activation="",
        type_vocab_size=num_types,
        has_pair_types=num_types > 1,
        hf_config=hf_config,
    )
