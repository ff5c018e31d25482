"""The supported decoder architectures: how each reads its config.json, and the names and shapes of
its checkpoint's tensors. NATIVE holds them and the text encoders of encoders.py.

Must not know: tensors' values, layers, how any of it is computed. executor/models/decoder.py builds
the models; tests/ipc/models/test_architectures.py compares their tensors with this table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec.structs import replace

from ..errors import ModelLoadError
from .decoder_config import (
    GATE_OF_ELEMENTS,
    GATE_OF_HEADS,
    UNROTATED_FULL_LAYERS,
    DecoderConfig,
    LayerConfig,
    parse_decoder_config,
)
from .encoders import ENCODERS, EncoderArchitecture
from .experts_config import ExpertsFormat, first_layers, sparse_steps
from .forms import GENERATE, family_and_form
from .rope_config import FULL, SLIDING

if TYPE_CHECKING:
    from .mixers import Shapes

TEXT_PREFIX = "language_model."  # of the tensors in a multimodal model's text part
# The names of a layer's norms: before and after attention, before and after the MLP. None: the
# layer lacks this norm.
LayerNorms = tuple[str | None, str | None, str | None, str | None]
PRE_NORMS: LayerNorms = ("input_layernorm", None, "post_attention_layernorm", None)
POST_NORMS: LayerNorms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
SANDWICH_NORMS: LayerNorms = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)

# the further norms of a layer with experts beside a gated MLP: after that, before and after them
BESIDE_NORMS = (
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)


class TensorNames(NamedTuple):
    """The names of a layer's parts, of tensors in them, and of the base model's own."""

    attention: str = "self_attn"
    mixer: str = ""  # of a recurrent layer
    mlp: str = "mlp"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    o_proj: str = "o_proj"
    attention_gate: str = "gate_proj"  # of heads
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str = ""  # of the tensor that has the rows of both
    # of the norms before o_proj and before down; "": there are none
    o_norm: str = ""
    down_norm: str = ""
    embedding: str = "embed_tokens"
    final_norm: str = "norm"


PLAIN_NAMES = TensorNames()


class Later(msgspec.Struct, frozen=True):
    """A function of a module beside this one, which is imported by the first call: a process runs
    one model, and does not need what other families have of their own.
    """

    module: str
    function: str
    options: dict[str, Any] = {}

    def __call__(self, hf_config: dict[str, Any]) -> Any:
        function = getattr(import_module(f".{self.module}", __package__), self.function)
        return function(hf_config, **self.options)


class Architecture(msgspec.Struct, frozen=True):
    """An architecture's row. `honours`, `default_head_dim` and `activation` are arguments of
    parse_decoder_config.

    A bias of None follows config.json (attention_bias), and a qk_norm of None does (use_qk_norm).
    `defaults` are transformers', for keys that config.json lacks. `constants` are fields of
    DecoderConfig that no key determines.
    `qk_norm_whole`: q and k are normed before they are split into heads. `is_merged`: the
    checkpoint has q, k and v in one tensor, and gate and up in another.

    `read_keys` returns config.json with the keys that other decoders have, and `read_fields` fields
    of DecoderConfig, where keys of the family's own determine them. `head_keys` returns the keys of
    config.json that describe the layers of a head that drafts as if they were the model's
    (draft_heads.py); None: it has one layer with attention and what follows it in other layers.
    """

    model_type: str
    honours: tuple[str, ...]
    default_head_dim: int | None = None
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool | None = False
    qk_norm_whole: bool = False
    value_norm: bool = False  # of each head, without a weight
    has_sinks: bool = False  # of attention, one for each head
    is_merged: bool = False
    is_interleaved: bool = False  # rotary pairs are neighbours
    norms_rotated: bool = False  # q and k are normed once they have rotated
    norms: LayerNorms = PRE_NORMS
    names: TensorNames = PLAIN_NAMES
    activation: str = "silu"
    defaults: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    scaled_embedding: bool = False  # whether it is multiplied by the root of hidden_size
    has_layer_scalars: bool = False  # by which layers multiply the residual stream
    prefix: str = ""  # of all tensors' names
    experts: ExpertsFormat | None = None
    read_keys: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    read_fields: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    head_keys: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def parse(self, hf_config: dict[str, Any]) -> DecoderConfig:
        missing = {key: self.defaults[key] for key in self.defaults if hf_config.get(key) is None}
        own = keys = hf_config | missing
        if self.read_keys is not None:
            keys = self.read_keys(own)
        config = parse_decoder_config(
            keys,
            default_head_dim=self.default_head_dim,
            honours=self.honours,
            activation=self.activation,
        )
        scale = config.hidden_size**0.5 if self.scaled_embedding else config.embedding_scale
        constants = {"embedding_scale": scale, "name_prefix": self.prefix, **self.constants}
        if self.experts is not None:
            constants["experts"] = self.experts.parse(keys)
        if self.read_fields is not None:
            constants |= self.read_fields(own)
        return replace(config, **constants)

    def weight_shapes(self, config: DecoderConfig) -> dict[str, list[int]]:
        """The shape of every tensor that a checkpoint must hold, by name. A tied head is not among
        them (tied_weights).
        """
        hidden, embedding = config.hidden_size, [config.vocab_size, config.hidden_size]
        base, names = config.base_name, self.names
        shapes = {f"{base}{names.embedding}.weight": embedding}
        for layer in range(config.num_hidden_layers):
            for name, shape in self.layer_shapes(config, layer):
                shapes[f"{base}layers.{layer}.{name}"] = shape
        shapes[f"{base}{names.final_norm}.weight"] = [hidden]
        if (inputs := config.per_layer_inputs) is not None:
            width = config.num_hidden_layers * inputs.size
            shapes[f"{base}embed_tokens_per_layer.weight"] = [inputs.vocab_size, width]
            shapes[f"{base}per_layer_model_projection.weight"] = [width, hidden]
            shapes[f"{base}per_layer_projection_norm.weight"] = [inputs.size]
        for name, shape in _whole_altup(config):
            shapes[f"{base}{name}"] = shape
        if (config.has_lm_head or config.score_tokens) and not config.tie_word_embeddings:
            shapes["lm_head.weight"] = embedding
        shapes |= dict(item for layer in config.head for item in layer.shapes())
        return {self.prefix + name: shape for name, shape in shapes.items()}

    def tied_weights(self, config: DecoderConfig) -> dict[str, str]:
        """Tensors that a checkpoint may also hold, with the tensors that they copy."""
        head, table = (
            f"{self.prefix}lm_head.weight",
            f"{config.base_prefix}{self.names.embedding}.weight",
        )
        return {head: table} if config.has_lm_head and config.tie_word_embeddings else {}

    def attention_biases(self, config: DecoderConfig) -> tuple[bool, bool]:
        """Whether q, k and v have biases, and whether the output projection has one."""
        own = config.attention_bias
        return (
            own if self.qkv_bias is None else self.qkv_bias,
            (own if self.o_bias is None else self.o_bias) or config.attention_out_bias,
        )

    def has_qk_norm(self, config: DecoderConfig) -> bool:
        return config.use_qk_norm if self.qk_norm is None else self.qk_norm

    def layer_shapes(self, config: DecoderConfig, index: int) -> Shapes:
        """Name and shape of every tensor of a layer, without the layer's own prefix."""
        layer, hidden = config.layer(index), config.hidden_size
        if layer.has_attention:
            for name, shape in self._attention(config, layer):
                yield f"{self.names.attention}.{name}", shape
        if layer.mixer is not None:
            for name, shape in layer.mixer.weight_shapes(hidden):
                yield f"{self.names.mixer}.{name}", shape
        if layer.has_mlp:
            yield from self._mlp(config, index)
        norms = self.norms[:2] if layer.has_attention or layer.mixer is not None else ()
        norms += self.norms[2:] if layer.has_mlp else ()
        yield from ((f"{name}.weight", [hidden]) for name in norms if name is not None)
        if self.has_layer_scalars:
            yield "layer_scalar", [1]
        if (inputs := config.per_layer_inputs) is not None:
            yield "per_layer_input_gate.weight", [inputs.size, hidden]
            yield "per_layer_projection.weight", [hidden, inputs.size]
            yield "post_per_layer_input_norm.weight", [hidden]
        yield from _altup_of_layer(config)

    def _attention(self, config: DecoderConfig, layer: LayerConfig) -> Shapes:
        hidden, head_dim, names = config.hidden_size, layer.head_dim, self.names
        if config.latent is not None:
            heads, has_biases = config.num_attention_heads, config.attention_bias
            yield from config.latent.weight_shapes(hidden, heads, has_biases)
            return
        q_rows = config.num_attention_heads * head_dim
        kv_rows = layer.num_kv_heads * head_dim
        qkv_bias, o_bias = self.attention_biases(config)
        qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        if config.attention_gate == GATE_OF_ELEMENTS:
            qkv["q_proj"] *= 2
        if not layer.has_values:
            del qkv["v_proj"]
        if layer.kv_from is not None:
            qkv = {"q_proj": qkv["q_proj"]}
        if self.is_merged:
            qkv = {"qkv_proj": sum(qkv.values())}
        for name, rows in qkv.items():
            yield from _linear(name, rows, hidden, qkv_bias)
        yield from _linear(names.o_proj, hidden, q_rows, o_bias)
        if names.o_norm:
            yield f"{names.o_norm}.weight", [q_rows]
        if config.attention_gate == GATE_OF_HEADS:
            yield from _linear(names.attention_gate, config.num_attention_heads, hidden, False)
        if self.has_qk_norm(config):
            yield f"{names.q_norm}.weight", [q_rows if self.qk_norm_whole else head_dim]
        if self.has_qk_norm(config) and layer.kv_from is None:
            yield f"{names.k_norm}.weight", [kv_rows if self.qk_norm_whole else head_dim]
        if self.has_sinks:
            yield "sinks", [config.num_attention_heads]

    def _mlp(self, config: DecoderConfig, index: int) -> Shapes:
        experts, own = self.experts, config.experts
        dense = config.layer(index).intermediate_size, config.mlp_bias
        if experts is None or own is None or index in own.dense_layers:
            yield from self._dense_mlp(config, self.names.mlp, *dense)
            return
        yield from experts.weight_shapes(own, config.hidden_size)
        if own.shared_size:
            shared = experts.name_of(experts.shared)
            yield from self._dense_mlp(config, shared, own.shared_size, False)
        if experts.is_beside_mlp:
            yield from self._dense_mlp(config, self.names.mlp, *dense)
            yield "router.scale", [config.hidden_size]
            yield "router.per_expert_scale", [own.count]
            yield from ((f"{name}.weight", [config.hidden_size]) for name in BESIDE_NORMS)

    def _dense_mlp(self, config: DecoderConfig, block: str, size: int, has_bias: bool) -> Shapes:
        hidden, names = config.hidden_size, self.names
        inputs = {names.gate: size, names.up: size}
        if merged := "gate_up_proj" if self.is_merged else names.gate_up:
            inputs = {merged: 2 * size}
        if not config.has_gated_mlp:
            inputs = {names.up: size}
        for name, rows in inputs.items():
            yield from _linear(f"{block}.{name}", rows, hidden, has_bias)
        yield from _linear(f"{block}.{names.down}", hidden, size, has_bias)
        if names.down_norm:
            yield f"{block}.{names.down_norm}.weight", [size]


def _whole_altup(config: DecoderConfig) -> Shapes:
    """Of what makes several streams of one, and one of several."""
    if config.altup is not None:
        square = [config.hidden_size, config.hidden_size]
        for part in ("altup_projections", "altup_unembed_projections"):
            for index in range(config.altup.num_streams - 1):
                yield f"{part}.{index}.weight", square


def _altup_of_layer(config: DecoderConfig) -> Shapes:
    if (altup := config.altup) is not None:
        hidden, count, rank = config.hidden_size, altup.num_streams, altup.laurel_rank
        yield "altup.correct_output_scale", [hidden]
        yield "altup.correction_coefs.weight", [count, count]
        yield "altup.prediction_coefs.weight", [count * count, count]
        yield "altup.modality_router.weight", [count, hidden]
        yield "altup.router_norm.weight", [hidden]
        yield "laurel.linear_left.weight", [rank, hidden]
        yield "laurel.linear_right.weight", [hidden, rank]
        yield "laurel.post_laurel_norm.weight", [hidden]


def _linear(name: str, rows: int, columns: int, has_bias: bool) -> Shapes:
    yield f"{name}.weight", [rows, columns]
    if has_bias:
        yield f"{name}.bias", [rows]


_LFM_NAMES = TensorNames(
    mixer="conv",
    mlp="feed_forward",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    o_proj="out_proj",
    gate="w1",
    up="w3",
    down="w2",
    final_norm="embedding_norm",
)
_DEFAULTS_OF_LFM: dict[str, Any] = {
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "conv_L_cache": 3,
}
# of the MLPs of LFM2 alone
_WIDTHS_OF_LFM: dict[str, Any] = {
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
}
_DEFAULTS_OF_LFM3: dict[str, Any] = _DEFAULTS_OF_LFM | {
    "num_key_value_heads": 4,
    "conv_L_cache": 7,
    "sliding_window": 256,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
}
_DEFAULTS_OF_QWEN: dict[str, Any] = {
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "tie_word_embeddings": False,
}
_DEFAULTS_OF_HUNYUAN: dict[str, Any] = {"rms_norm_eps": 1e-5, "use_qk_norm": True}
_DEFAULTS_OF_ERNIE: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
_HUNYUAN_NAMES = TensorNames(q_norm="query_layernorm", k_norm="key_layernorm")
_OF_QWEN: dict[str, Any] = {
    "default_head_dim": 256,
    "qk_norm": True,
    "names": TensorNames(mixer="linear_attn"),
    "constants": {
        "norm_offset": 1.0,
        "fp32_norms": True,
        "attention_gate": GATE_OF_ELEMENTS,
    },
    "read_keys": Later("qwen_families", "qwen_keys"),
    "read_fields": Later("qwen_families", "qwen_fields"),
}
_OF_QWEN_NEXT: dict[str, Any] = _OF_QWEN | {
    "read_fields": Later("qwen_families", "qwen_fields", {"is_by_key_head": True})
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", honours=("attention_bias", "mlp_bias", "is_causal")),
    "MistralForCausalLM": Architecture("mistral", honours=("sliding_window", "is_causal")),
    "Qwen2ForCausalLM": Architecture(
        "qwen2",
        honours=("attention_bias", "use_sliding_window", "is_causal"),
        qkv_bias=True,
        o_bias=False,
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        honours=("attention_bias", "use_sliding_window", "is_causal"),
        default_head_dim=128,
        qk_norm=True,
    ),
    "Gemma3ForCausalLM": Architecture(
        "gemma3_text",
        honours=(
            *("attention_bias", "layer_types", "query_pre_attn_scalar"),
            "use_bidirectional_attention",
        ),
        qk_norm=True,
        norms=SANDWICH_NORMS,
        activation="gelu_tanh",
        defaults={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
        },
        constants={"norm_offset": 1.0, "fp32_norms": True},
        scaled_embedding=True,
    ),
    "Gemma4ForCausalLM": Architecture(
        "gemma4_text",
        honours=(
            *("attention_bias", "layer_types", "partial_rotary_factor"),
            *("final_logit_softcapping", "use_bidirectional_attention", "num_experts"),
        ),
        qk_norm=True,
        value_norm=True,
        norms=SANDWICH_NORMS,
        activation="gelu_tanh",
        defaults={
            "vocab_size": 262_144,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "sliding_window": 512,
            "tie_word_embeddings": True,
            "hidden_size_per_layer_input": 256,
        },
        constants={"fp32_norms": True, "attention_scale": 1.0},
        scaled_embedding=True,
        has_layer_scalars=True,
        experts=ExpertsFormat(
            "moe_intermediate_size",
            renormalizes=True,
            is_optional=True,
            is_beside_mlp=True,
            block="",
            router="router.proj",
        ),
        read_keys=Later("gemma_config", "gemma_keys"),
        read_fields=Later("gemma_config", "gemma_fields"),
    ),
    "Gemma3nForCausalLM": Architecture(
        "gemma3n_text",
        honours=("attention_bias", "layer_types", "final_logit_softcapping"),
        qk_norm=True,
        value_norm=True,
        norms=SANDWICH_NORMS,
        activation="gelu_tanh",
        defaults={
            "vocab_size": 262_400,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "max_position_embeddings": 32_768,
            "sliding_window": 512,
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262_144,
            "num_kv_shared_layers": 15,
            "altup_num_inputs": 4,
            "altup_active_idx": 0,
            "altup_correct_scale": True,
            "laurel_rank": 64,
        },
        constants={"fp32_norms": True, "attention_scale": 1.0},
        scaled_embedding=True,
        read_keys=Later("gemma3n_config", "gemma3n_keys"),
        read_fields=Later("gemma3n_config", "gemma3n_fields"),
    ),
    "Phi3ForCausalLM": Architecture(
        "phi3",
        honours=("sliding_window", "partial_rotary_factor"),
        is_merged=True,
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3",
        honours=("attention_bias", "mlp_bias", "use_sliding_window", "no_rope_layers"),
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
    ),
    "Olmo2ForCausalLM": Architecture(
        "olmo2",
        honours=("attention_bias",),
        qk_norm=True,
        qk_norm_whole=True,
        norms=POST_NORMS,
        defaults={"rms_norm_eps": 1e-5},
        constants={"fp32_norms": True},
    ),
    "Olmo3ForCausalLM": Architecture(
        "olmo3",
        honours=("attention_bias", "layer_types"),
        qk_norm=True,
        qk_norm_whole=True,
        norms=POST_NORMS,
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "rope_local_base_freq": 5e5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        constants={"fp32_norms": True},
    ),
    "GraniteForCausalLM": Architecture(
        "granite",
        honours=(
            *("attention_bias", "mlp_bias", "embedding_multiplier", "residual_multiplier"),
            *("attention_multiplier", "logits_scaling"),
        ),
        defaults={"attention_multiplier": 1.0},
    ),
    "Ministral3ForCausalLM": Architecture(
        "ministral3",
        honours=("sliding_window", "llama_4_scaling_beta"),
        default_head_dim=128,
        defaults={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "MixtralForCausalLM": Architecture(
        "mixtral",
        honours=("sliding_window", *_EXPERTS),
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts_per_tok": 2,
        },
        experts=ExpertsFormat(
            renormalizes=True, block="block_sparse_moe", gate="w1", up="w3", down="w2"
        ),
    ),
    "Qwen2MoeForCausalLM": Architecture(
        "qwen2_moe",
        honours=_EXPERTS,
        qkv_bias=True,
        o_bias=False,
        defaults={
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
        },
        experts=ExpertsFormat(
            "moe_intermediate_size",
            shared_size="shared_expert_intermediate_size",
            dense_layers=sparse_steps,
        ),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        honours=("attention_bias", *_EXPERTS),
        qk_norm=True,
        defaults={
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
        },
        experts=ExpertsFormat("moe_intermediate_size", dense_layers=sparse_steps),
    ),
    "OlmoeForCausalLM": Architecture(
        "olmoe",
        honours=("attention_bias", *_EXPERTS),
        qk_norm=True,
        qk_norm_whole=True,
        defaults={"rms_norm_eps": 1e-5, "num_experts_per_tok": 8},
        experts=ExpertsFormat(),
    ),
    "GptOssForCausalLM": Architecture(
        "gpt_oss",
        honours=("attention_bias", "layer_types", *_EXPERTS),
        default_head_dim=64,
        has_sinks=True,
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "rope_theta": 150_000.0,
        },
        constants={"fp32_norms": True},
        experts=ExpertsFormat(renormalizes=True, has_biases=True, is_clamped=True, router="router"),
    ),
    "GraniteMoeHybridForCausalLM": Architecture(
        "granitemoehybrid",
        honours=(
            *("attention_bias", "embedding_multiplier", "residual_multiplier"),
            *("attention_multiplier", "logits_scaling", *_EXPERTS),
        ),
        names=TensorNames(
            mixer="mamba", mlp="shared_mlp", gate_up="input_linear", down="output_linear"
        ),
        defaults={
            "attention_multiplier": 1.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
        },
        experts=ExpertsFormat(
            is_optional=True,
            renormalizes=True,  # the softmax of the largest logits
            block="",
            router="block_sparse_moe.router.layer",
            experts="block_sparse_moe.experts",
            gate="gate_linear",
            up="up_linear",
            down="output_linear",
            shared_size="shared_intermediate_size",
            shared="shared_mlp",
            shared_gate=None,
        ),
        read_keys=Later("mamba_families", "granite_keys"),
        read_fields=Later("mamba_families", "granite_fields"),
    ),
    "FalconH1ForCausalLM": Architecture(
        "falcon_h1",
        honours=(
            *("attention_bias", "mlp_bias", "embedding_multiplier", "attention_in_multiplier"),
            *("attention_out_multiplier", "key_multiplier", "lm_head_multiplier"),
            *("mlp_multipliers", "ssm_in_multiplier", "ssm_multipliers", "ssm_out_multiplier"),
        ),
        norms=("input_layernorm", None, "pre_ff_layernorm", None),
        names=TensorNames(mixer="mamba", mlp="feed_forward", final_norm="final_layernorm"),
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "mamba_conv_bias": True,
            "mamba_norm_before_gate": True,
        },
        read_fields=Later("mamba_families", "falcon_fields"),
    ),
    "BambaForCausalLM": Architecture(
        "bamba",
        honours=("attention_bias", "mlp_bias", "partial_rotary_factor"),
        norms=("input_layernorm", None, "pre_ff_layernorm", None),
        names=TensorNames(mixer="mamba", mlp="feed_forward", final_norm="final_layernorm"),
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "mamba_conv_bias": True,
            "partial_rotary_factor": 0.5,
        },
        read_fields=Later("mamba_families", "bamba_fields"),
    ),
    "NemotronHForCausalLM": Architecture(
        "nemotron_h",
        honours=_EXPERTS,
        default_head_dim=128,
        qkv_bias=False,
        o_bias=False,
        norms=("norm", None, "norm", None),
        names=TensorNames(
            *("mixer", "mixer", "mixer"), embedding="embeddings", final_norm="norm_f"
        ),
        activation="relu_squared",
        defaults={
            "num_key_value_heads": 8,
            "layer_norm_epsilon": 1e-5,
            "use_conv_bias": True,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        constants={"base_name": "backbone.", "fp32_norms": True, "has_gated_mlp": False},
        experts=ExpertsFormat(
            "moe_intermediate_size",
            is_optional=True,
            scoring="sigmoid",
            correction="gate.e_score_correction_bias",
            scale="routed_scaling_factor",
            num_groups="n_group",
            top_groups="topk_group",
            latent_size="moe_latent_size",
            dense_layers=Later("mamba_families", "nemotron_dense_layers"),
            block="mixer",
            gate=None,
            shared_size="moe_shared_expert_intermediate_size",
            shared="shared_experts",
            shared_gate=None,
        ),
        read_keys=Later("mamba_families", "nemotron_keys"),
        read_fields=Later("mamba_families", "nemotron_fields"),
        head_keys=Later("mamba_families", "nemotron_head_keys"),
    ),
    "Mamba2ForCausalLM": Architecture(
        "mamba2",
        honours=(),
        norms=("norm", None, None, None),
        names=TensorNames(mixer="mixer", embedding="embeddings", final_norm="norm_f"),
        defaults={
            "layer_norm_epsilon": 1e-5,
            "use_conv_bias": True,
            "max_position_embeddings": 2**20,  # it has no limit
        },
        constants={"base_name": "backbone."},
        read_keys=Later("mamba_families", "mamba2_keys"),
        read_fields=Later("mamba_families", "mamba2_fields"),
    ),
}
ARCHITECTURES |= {
    "Qwen3NextForCausalLM": Architecture(
        "qwen3_next",
        honours=("attention_bias", "partial_rotary_factor", *_EXPERTS),
        defaults=_DEFAULTS_OF_QWEN
        | {
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        },
        experts=ExpertsFormat(
            "moe_intermediate_size",
            shared_size="shared_expert_intermediate_size",
            dense_layers=sparse_steps,
        ),
        **_OF_QWEN_NEXT,
    ),
    "Qwen3_5ForCausalLM": Architecture(
        "qwen3_5_text",
        honours=("attention_bias", "partial_rotary_factor"),
        defaults=_DEFAULTS_OF_QWEN | {"vocab_size": 248_320, "num_key_value_heads": 4},
        **_OF_QWEN,
    ),
    "Qwen3_5MoeForCausalLM": Architecture(
        "qwen3_5_moe_text",
        honours=("attention_bias", "partial_rotary_factor", *_EXPERTS),
        defaults=_DEFAULTS_OF_QWEN
        | {
            "vocab_size": 248_320,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
        },
        experts=ExpertsFormat(
            "moe_intermediate_size",
            renormalizes=True,
            shared_size="shared_expert_intermediate_size",
        ),
        **_OF_QWEN,
    ),
    "Lfm2ForCausalLM": Architecture(
        "lfm2",
        honours=(),
        qk_norm=True,
        norms=("operator_norm", None, "ffn_norm", None),
        names=_LFM_NAMES,
        defaults=_DEFAULTS_OF_LFM | _WIDTHS_OF_LFM,
        read_keys=Later("lfm_families", "lfm2_keys"),
        read_fields=Later("lfm_families", "lfm2_fields"),
    ),
    "Lfm2MoeForCausalLM": Architecture(
        "lfm2_moe",
        honours=_EXPERTS,
        qk_norm=True,
        norms=("operator_norm", None, "ffn_norm", None),
        names=_LFM_NAMES,
        defaults=_DEFAULTS_OF_LFM
        | {
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        },
        experts=ExpertsFormat(
            "moe_intermediate_size",
            dense_layers=first_layers("num_dense_layers"),
            scoring="sigmoid",
            correction="expert_bias",
            scale="routed_scaling_factor",
            added=1e-6,
            block="feed_forward",
            gate="w1",
            up="w3",
            down="w2",
        ),
        read_keys=Later("lfm_families", "lfm_keys"),
        read_fields=Later("lfm_families", "lfm2_fields"),
    ),
    "Lfm3ForCausalLM": Architecture(
        "lfm3",
        honours=("attention_bias", "layer_types", "partial_rotary_factor"),
        default_head_dim=128,
        qk_norm=True,
        norms=("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
        names=_LFM_NAMES._replace(q_norm="q_norm", k_norm="k_norm", o_proj="o_proj"),
        defaults=_DEFAULTS_OF_LFM3,
        constants={"attention_gate": GATE_OF_HEADS},
        read_keys=Later("lfm_families", "lfm3_keys"),
        read_fields=Later("lfm_families", "lfm3_fields"),
    ),
}

_DEEPSEEK_V3 = Architecture(
    "deepseek_v3",
    honours=("attention_bias", "scoring_func", *_EXPERTS),
    read_keys=Later("latent_config", "latent_keys"),
    read_fields=Later("latent_config", "latent_fields"),
    defaults={
        "n_group": 8,
        "topk_group": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_experts_per_tok": 8,
    },
    experts=ExpertsFormat(
        "moe_intermediate_size",
        shared_size="moe_intermediate_size",
        num_shared="n_shared_experts",
        dense_layers=Later("latent_config", "latent_dense_layers"),
        scoring="sigmoid",
        correction="gate.e_score_correction_bias",
        scale="routed_scaling_factor",
        num_groups="n_group",
        top_groups="topk_group",
        shared="shared_experts",
        shared_gate=None,
    ),
)
assert _DEEPSEEK_V3.experts is not None
ARCHITECTURES |= {
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "Glm4MoeLiteForCausalLM": replace(
        _DEEPSEEK_V3,
        model_type="glm4_moe_lite",
        defaults=_DEEPSEEK_V3.defaults
        | {
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.8,
            "num_experts_per_tok": 4,
        },
    ),
    "DeepseekV2ForCausalLM": replace(
        _DEEPSEEK_V3,
        model_type="deepseek_v2",
        honours=("attention_bias", *_EXPERTS),
        defaults={
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
        },
        experts=replace(
            _DEEPSEEK_V3.experts,
            renormalizes=False,
            scoring="softmax",
            correction=None,
            group_best=1,
            grouped=("topk_method", "group_limited_greedy"),
        ),
    ),
}
_DEEPSEEK_V32 = replace(
    _DEEPSEEK_V3,
    model_type="deepseek_v32",
    read_keys=Later("latent_config", "indexed_keys"),
)
ARCHITECTURES |= {
    "DeepseekV32ForCausalLM": _DEEPSEEK_V32,
    "GlmMoeDsaForCausalLM": replace(
        _DEEPSEEK_V32,
        model_type="glm_moe_dsa",
        defaults=_DEEPSEEK_V32.defaults | {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5},
    ),
}
ARCHITECTURES["KimiLinearForCausalLM"] = Architecture(
    "kimi_linear",
    honours=("attention_bias", *_EXPERTS),
    read_keys=Later("kimi_families", "kimi_keys"),
    read_fields=Later("kimi_families", "kimi_fields"),
    names=TensorNames(mixer="self_attn"),
    defaults={
        "rms_norm_eps": 1e-5,
        "linear_conv_kernel_dim": 4,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "num_experts_per_tok": 8,
    },
    constants={"tie_word_embeddings": False},  # it has a head of its own, whatever the key says
    experts=replace(_DEEPSEEK_V3.experts, block="block_sparse_moe", gate="w1", up="w3", down="w2"),
)
_GEMMA4 = ARCHITECTURES["Gemma4ForCausalLM"]
ARCHITECTURES["Gemma4UnifiedForCausalLM"] = replace(
    _GEMMA4,
    model_type="gemma4_unified_text",
    defaults=_GEMMA4.defaults
    | {
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
)

ARCHITECTURES |= {
    "Glm4MoeForCausalLM": Architecture(
        "glm4_moe",
        honours=(
            *("attention_bias", "partial_rotary_factor", "use_qk_norm", "scoring_func"),
            *_EXPERTS,
        ),
        o_bias=False,
        qk_norm=None,
        defaults={
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "num_experts_per_tok": 8,
        },
        experts=_DEEPSEEK_V3.experts,
    ),
    "SeedOssForCausalLM": Architecture(
        "seed_oss",
        honours=("attention_bias", "attention_out_bias", "mlp_bias"),
        default_head_dim=128,
        o_bias=False,
        defaults={"attention_bias": True, "num_key_value_heads": 8},
    ),
    "Ernie4_5ForCausalLM": Architecture(
        "ernie4_5",
        honours=("attention_bias", "mlp_bias"),
        default_head_dim=128,
        is_interleaved=True,
        defaults=_DEFAULTS_OF_ERNIE | {"num_key_value_heads": 2},
        read_keys=Later("ernie_families", "ernie_keys"),
    ),
    "Ernie4_5_MoeForCausalLM": Architecture(
        "ernie4_5_moe",
        honours=_EXPERTS,
        is_interleaved=True,
        defaults=_DEFAULTS_OF_ERNIE
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
        experts=ExpertsFormat(
            "moe_intermediate_size",
            renormalizes=True,
            shared_size="moe_intermediate_size",
            num_shared="moe_num_shared_experts",
            dense_layers=Later("ernie_families", "ernie_dense_layers"),
            correction="moe_statics.e_score_correction_bias",
            has_correction_row=True,
            shared="shared_experts",
            shared_gate=None,
        ),
        read_keys=Later("ernie_families", "ernie_moe_keys"),
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(
        "hunyuan_v1_dense",
        honours=("attention_bias", "use_qk_norm"),
        qk_norm=None,
        norms_rotated=True,
        names=_HUNYUAN_NAMES,
        defaults=_DEFAULTS_OF_HUNYUAN,
        read_keys=Later("hunyuan_families", "hunyuan_keys"),
    ),
    "HunYuanMoEV1ForCausalLM": Architecture(
        "hunyuan_v1_moe",
        honours=("attention_bias", "use_qk_norm", *_EXPERTS),
        qk_norm=None,
        norms_rotated=True,
        names=_HUNYUAN_NAMES,
        defaults=_DEFAULTS_OF_HUNYUAN | {"num_experts": 1, "moe_topk": 1},
        experts=ExpertsFormat(
            renormalizes=True,
            router="gate.wg",
            shared_size="intermediate_size",
            shared="shared_mlp",
            shared_gate=None,
        ),
        read_keys=Later("hunyuan_families", "hunyuan_keys"),
    ),
    "Gemma2ForCausalLM": Architecture(
        "gemma2",
        honours=(
            *("attention_bias", "layer_types", "query_pre_attn_scalar"),
            *("attn_logit_softcapping", "final_logit_softcapping"),
        ),
        norms=SANDWICH_NORMS,
        activation="gelu_tanh",
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
        },
        constants={"norm_offset": 1.0, "fp32_norms": True},
        scaled_embedding=True,
        read_keys=Later("gemma_config", "gemma2_keys"),
    ),
    "Glm4ForCausalLM": Architecture(
        "glm4",
        honours=("attention_bias", "partial_rotary_factor"),
        default_head_dim=128,
        o_bias=False,
        is_interleaved=True,
        norms=(
            *("input_layernorm", "post_self_attn_layernorm"),
            *("post_attention_layernorm", "post_mlp_layernorm"),
        ),
        names=TensorNames(gate_up="gate_up_proj"),
        defaults={
            "num_key_value_heads": 2,
            "rms_norm_eps": 1.5625e-07,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
    ),
    "Exaone4ForCausalLM": Architecture(
        "exaone4",
        honours=("layer_types", UNROTATED_FULL_LAYERS),
        qk_norm=True,
        norms=POST_NORMS,
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window_pattern": 4,
        },
    ),
    "BitNetForCausalLM": Architecture(
        "bitnet",
        honours=("attention_bias",),
        names=TensorNames(o_norm="attn_sub_norm", down_norm="ffn_sub_norm"),
        activation="relu_squared",
        defaults={"num_key_value_heads": 5, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    ),
}

_OF_QWEN_VL: dict[str, Any] = {"read_keys": Later("qwen_families", "qwen_vl_keys")}
_TEXT_ROWS = {
    "Gemma3ForConditionalGeneration": ARCHITECTURES["Gemma3ForCausalLM"],
    "Gemma3nForConditionalGeneration": ARCHITECTURES["Gemma3nForCausalLM"],
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": ARCHITECTURES["Gemma4UnifiedForCausalLM"],
    "Idefics3ForConditionalGeneration": ARCHITECTURES["LlamaForCausalLM"],
    "InternVLForConditionalGeneration": ARCHITECTURES["Qwen2ForCausalLM"],
    "Lfm2VlForConditionalGeneration": ARCHITECTURES["Lfm2ForCausalLM"],
    "LlavaForConditionalGeneration": ARCHITECTURES["MistralForCausalLM"],
    "Mistral3ForConditionalGeneration": ARCHITECTURES["Ministral3ForCausalLM"],
    "Qwen2_5_VLForConditionalGeneration": replace(
        ARCHITECTURES["Qwen2ForCausalLM"], model_type="qwen2_5_vl_text", **_OF_QWEN_VL
    ),
    "Qwen3VLForConditionalGeneration": replace(
        ARCHITECTURES["Qwen3ForCausalLM"], model_type="qwen3_vl_text", **_OF_QWEN_VL
    ),
    "Qwen3VLMoeForConditionalGeneration": replace(
        ARCHITECTURES["Qwen3MoeForCausalLM"], model_type="qwen3_vl_moe_text", **_OF_QWEN_VL
    ),
    "Qwen3_5ForConditionalGeneration": ARCHITECTURES["Qwen3_5ForCausalLM"],
    "Qwen3_5MoeForConditionalGeneration": ARCHITECTURES["Qwen3_5MoeForCausalLM"],
    "SmolVLMForConditionalGeneration": ARCHITECTURES["LlamaForCausalLM"],
}
ARCHITECTURES |= {name: replace(row, prefix=TEXT_PREFIX) for name, row in _TEXT_ROWS.items()}
# The multimodal architectures whose text part runs, with the row of each type of that part.
TEXT_PARTS = {name: {row.model_type: name} for name, row in _TEXT_ROWS.items()}
TEXT_PARTS["Mistral3ForConditionalGeneration"]["mistral"] = "MistralForCausalLM"
TEXT_PARTS["InternVLForConditionalGeneration"] |= {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
NATIVE: dict[str, Architecture | EncoderArchitecture] = {**ARCHITECTURES, **ENCODERS}
# These are keys of the whole model's config.json that its text part may lack.
_OF_THE_WHOLE = frozenset(
    {"dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id"}
)


def text_part(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the text part of a multimodal model (TEXT_PARTS), with the
    architecture of the whole. It returns that of any other model unchanged.

    Raises ModelLoadError for a text part of another type than the model's.
    """
    names, text = hf_config.get("architectures"), hf_config.get("text_config")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in TEXT_PARTS or not isinstance(text, dict):
        return hf_config
    model_type, rows = text.get("model_type"), TEXT_PARTS[name]
    if not isinstance(model_type, str) or model_type not in rows:
        raise ModelLoadError(
            f"config.json: {name} is supported with a text_config of model_type "
            f"{' or '.join(rows)}, not {model_type!r:.100}"
        )
    whole = {key: hf_config[key] for key in _OF_THE_WHOLE & hf_config.keys()}
    given = {key: value for key, value in text.items() if value is not None}
    name = rows[model_type]
    defaults = ARCHITECTURES[name].defaults
    is_tied = text.get("tie_word_embeddings", defaults.get("tie_word_embeddings", True))
    is_tied = hf_config.get("tie_word_embeddings", is_tied)
    own = {"architectures": [name], "tie_word_embeddings": is_tied}
    return defaults | whole | given | own


def find_architecture(hf_config: dict[str, Any], supported: Iterable[str] = NATIVE) -> str:
    """Finds the first supported name in `architectures`, in any form (ipc/models/forms.py), or else
    the architecture of `model_type`.

    Raises ModelLoadError, which lists what is supported.
    """
    names = hf_config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelLoadError(f"config.json: architectures must be a list of names, got {names!r}")
    model_type = hf_config.get("model_type")
    of_type = [name for name, known in NATIVE.items() if known.model_type == model_type]
    supported = sorted(supported)
    for name in names or of_type:
        for known in (name, *_other_forms(name)):
            if known in supported:
                return known
    if names:
        problem = f"architecture {', '.join(names)} is not supported"
    else:
        problem = "config.json names no architecture"
        problem += f", and model_type {model_type!r} is not supported" if model_type else ""
    raise ModelLoadError(f"{problem}; supported: {', '.join(supported)}")


def _other_forms(name: str) -> tuple[str, ...]:
    """The names under which the tables may have an architecture's family: that of a decoder or, if
    the architecture does not generate text, that of an encoder.
    """
    family, form = family_and_form(name)
    if form == GENERATE:
        return ()
    # Gemma3TextModel belongs to Gemma3ForCausalLM
    return f"{family.removesuffix('Text')}ForCausalLM", f"{family}Model"
