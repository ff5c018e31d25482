"""Parses the config.json of a decoder-only model into one checked form.

Must not know: tensors, layers, how any of it is computed, which architectures there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from ..errors import ModelLoadError
from .config_values import MOST_OF_A_SIZE, integer, malformed
from .experts_config import ExpertsConfig
from .forms import GENERATE, Head, decoder_head, form_of, score_tokens
from .pooling import STORED_POOLING
from .quantization_config import parse_quantization
from .rope_config import CONTEXT_KEYS, FULL, SLIDING, parse_ropes
from .state_layout import StatePart, state_bytes

if TYPE_CHECKING:
    from .latent_config import LatentConfig
    from .mixers import MixerConfig

# Keys that do not change results: names, training, how transformers runs a model, its sampling
# defaults (they come from generation_config.json), or settings of the engine's own configuration.
_HARMLESS = frozenset(
    [
        "altup_coef_clip",  # of training
        "architectures",
        "attn_implementation",
        "auto_map",
        "dtype",
        "experts_implementation",
        "finetuning_task",
        "id2label",
        "keys_to_ignore_at_inference",
        "label2id",
        "mamba_ssm_dtype",  # states are fp32
        "model_type",
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
        "name_or_path",
        "num_labels",
        "problem_type",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "cache_implementation",
        "add_cross_attention",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "gradient_checkpointing",
        "initializer_range",
        "is_composition",
        "is_decoder",
        "is_encoder_decoder",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "output_scores",
        "pretraining_tp",
        "aux_loss_alpha",  # of training, as seq_aux; ep_size is a setting of DeepSeek's own code
        "ep_size",
        "seq_aux",
        "qk_head_dim",  # the sum of two others
        "pruned_heads",
        "return_dict",
        "return_dict_in_generate",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "torchscript",
        "use_cache",
        "use_return_dict",
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "prefix",
        "remove_invalid_values",
        "repetition_penalty",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    ]
)
_HARMLESS_ENDINGS = ("_token_id", "_token_ids", "_token", "_dropout", "_pdrop", "_dropout_prob")
# Keys that are read, in addition to those of DecoderConfig.
_READ = frozenset(
    {
        "activation_sparsity_pattern",
        "altup_active_idx",
        "altup_correct_scale",
        "altup_num_inputs",
        "attention_k_eq_v",
        "decoder_sparse_step",
        "enable_moe_block",
        "global_head_dim",
        "hidden_size_per_layer_input",
        "laurel_rank",
        "num_global_key_value_heads",
        "num_kv_shared_layers",
        "per_layer_config",
        "top_k_experts",
        "use_double_wide_mlp",
        "vocab_size_per_layer_input",
        STORED_POOLING,
        "experts_per_token",  # OpenAI's name of num_experts_per_tok
        "initial_context_length",  # of original_max_position_embeddings
        "layer_types",
        "max_window_layers",
        "mlp_only_layers",
        "moe_intermediate_size",
        "first_k_dense_replace",
        "index_head_dim",  # of an indexer (latent_config.py)
        "index_n_heads",
        "index_skip_topk_offset",
        "index_topk",
        "index_topk_freq",
        "index_topk_pattern",
        "indexer_rope_interleave",
        "indexer_types",
        "kv_lora_rank",
        "mlp_layer_types",
        "moe_layer_freq",
        "n_group",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "rope_interleave",
        "topk_method",
        "v_head_dim",
        "n_shared_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "routed_scaling_factor",
        "shared_expert_intermediate_size",
        "topk_group",
        "no_rope_layer_interval",
        "sliding_window_pattern",
        # of pooling
        "classifier_from_token",
        "is_matryoshka",
        "is_original_qwen3_reranker",
        "matryoshka_dimensions",
        "method",
        "sbert_ce_default_activation_function",
        "score_token_ids",
        "sentence_transformers",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "quantization_config",
        "rope_local_base_freq",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "moe_k",
        "moe_layer_end_index",
        "moe_layer_interval",
        "moe_layer_start_index",
        "moe_num_experts",
        "moe_num_shared_experts",
        "moe_topk",
        "num_shared_expert",
        "swiglu_alpha",
        "swiglu_limit",
        "attn_layer_indices",
        "hybrid_override_pattern",
        "layers_block_type",
        "moe_latent_size",
        "moe_shared_expert_intermediate_size",
        "position_embedding_type",
        "shared_intermediate_size",
        # of recurrent mixers
        "block_auto_adjust_ff_dim",
        "block_ff_dim",
        "block_ffn_dim_multiplier",
        "block_multiple_of",
        "conv_L_cache",
        "conv_bias",
        "full_attention_interval",
        "full_attn_idxs",
        "gates_apart",
        "interleaved_value_heads",
        "linear_attn_config",
        "linear_conv_kernel_dim",
        "linear_head_dim",
        "linear_key_head_dim",
        "linear_num_heads",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "norm_eps",
        "num_dense_layers",
        "tie_embedding",
        # of Kimi Linear
        "mla_use_nope",
        "moe_renormalize",
        "moe_router_activation_func",
        "num_expert_group",
        "num_experts_per_token",
        "num_shared_experts",
        "use_grouped_topk",
        *CONTEXT_KEYS,
    }
)
# Keys that would change the mathematics, with the values under which they do not. Other values are
# refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": (False,),
    "compression_config": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "num_attention_sinks": (0,),
    "no_rope_layers": ([],),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "use_mrope": (False,),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (True,),
    "clip_qkv": (),
    "attention_out_bias": (False,),
    "normalization_function": ("rmsnorm",),
    "attention_in_multiplier": (1.0,),
    "attention_out_multiplier": (1.0,),
    "key_multiplier": (1.0,),
    "lm_head_multiplier": (1.0,),
    "mlp_multipliers": ([1.0, 1.0],),
    "ssm_in_multiplier": (1.0,),
    "ssm_multipliers": ([1.0] * 5,),
    "ssm_out_multiplier": (1.0,),
    "attn_output_gate": (True,),
    "use_attention_gate": (True,),
    "use_expert_bias": (True,),
    "use_sandwich_norm": (True,),
    "scoring_func": ("softmax",),
    "moe_norm_min": (1e-12,),
    "use_cla": (False,),
    "use_mla": (False,),
}
# Keys that name the activation of the MLP; a model has one activation, under these names.
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "mlp_hidden_act")
ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh",),
    "relu_squared": ("relu2",),
}
# Keys of numbers that a model may multiply by, if it honours them.
_MULTIPLIERS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention_scale",
}
# Keys of caps of logits, which a model may have, if it honours them.
_CAPS = {
    "attn_logit_softcapping": "attention_cap",
    "final_logit_softcapping": "logits_cap",
}
DEFAULT_MAX_WINDOW_LAYERS = 28  # transformers'
DEFAULT_NO_ROPE_INTERVAL = 4
FURTHER = "num_nextn_predict_layers"
UNROTATED_FULL_LAYERS = "unrotated full layers"  # not a key; see _unrotated_layers
# Far above any model: a larger value is a mistake and must not cost time or memory.
MOST = {
    "num_hidden_layers": 1024,
    "num_attention_heads": 65_536,
    "num_key_value_heads": 65_536,
    "head_dim": 65_536,
}
# of attention's result, before the output projection: q_proj has for each head rows of the gate
# after those of the query; or a projection of its own has a row for each head
GATE_OF_ELEMENTS, GATE_OF_HEADS = "elements", "heads"
LEAST_SCALE = 1e-6  # of a factor; the largest is its inverse
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


class LayerConfig(msgspec.Struct, frozen=True):
    """What a layer of a decoder has. Attention and a recurrent mixer in one layer read the same
    input, and their results are added.
    """

    mixer: MixerConfig | None = None
    has_attention: bool = True
    has_mlp: bool = True
    # of attention; 0: the model's
    head_dim: int = 0
    num_kv_heads: int = 0
    kv_from: int | None = None  # the layer whose keys and values it reads, in place of its own
    has_values: bool = True  # False: its values are its keys, as they are before norm and rotation
    intermediate_size: int = 0  # of its MLP; 0: the model's
    sparsity: float = 0.0  # the part of its MLP's activations that are dropped, of normal ones


class PerLayerInputs(msgspec.Struct, frozen=True):
    """Of each token, inputs of the layers beside the residual stream (Gemma 3n and 4)."""

    size: int  # features for each layer
    vocab_size: int  # tokens that their table has; any other has those of token 0


class AltUp(msgspec.Struct, frozen=True):
    """Streams beside the residual one, which layers predict and correct, with a low-rank part of
    the residual connections (Gemma 3n; Baykal et al. 2023).
    """

    num_streams: int
    active: int  # the stream that layers compute with
    scales_corrected: bool  # whether what the inputs of layers are mixed with is scaled first
    laurel_rank: int


class DecoderConfig(msgspec.Struct, frozen=True):
    """Sizes are counts of features, heads, layers or tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: dict[str, Any]  # see rope_config.parse_rope_parameters
    layers: tuple[LayerConfig, ...] = ()  # empty: each has attention and an MLP
    # Attention is over latent vectors. head_dim is then the size of a token in the cache, and
    # num_key_value_heads is 1.
    latent: LatentConfig | None = None
    # layers in the files, after the model's, that predict further tokens (draft_heads.py)
    num_nextn_predict_layers: int = 0
    use_qk_norm: bool = False  # of attention, where the architecture leaves it to config.json
    # for each layer: how many positions a token attends to, including its own; 0: all before it
    sliding_windows: tuple[int, ...] = ()
    sliding_rope: dict[str, Any] | None = None  # of layers with a window, where it is another one
    unrotated_layers: tuple[int, ...] = ()  # whose queries and keys do not rotate
    activation: str = "silu"  # of ACTIVATIONS
    attention_scale: float = 0.0  # factor of the attention's logits
    attention_cap: float = 0.0  # c: logits x of attention become c * tanh(x / c); 0: they do not
    attention_out_bias: bool = False  # of the output projection, whatever the row says
    attention_gate: str = ""  # GATE_OF_ELEMENTS or GATE_OF_HEADS; the gates pass a sigmoid
    embedding_scale: float = 1.0  # factor of the embedding's rows
    residual_scale: float = 1.0  # factor of what a block adds to the residual stream
    logits_scale: float = 1.0  # factor of the logits
    attention_out_scale: float = 1.0  # factor of what attention beside a mixer returns
    mlp_scales: tuple[float, ...] = (1.0, 1.0)  # factors of an MLP's gate, and of what it returns
    has_gated_mlp: bool = True  # else, an MLP is down(activation(up(x)))
    name_prefix: str = ""  # of all names of tensors
    base_name: str = "model."  # what follows it in those of the base model
    norm_offset: float = 0.0  # what is added to the stored weights of norms
    fp32_norms: bool = False  # norms round once, after the weight (kernels/ops.py: rms_norm)
    experts: ExpertsConfig | None = None  # of a mixture of experts
    per_layer_inputs: PerLayerInputs | None = None
    altup: AltUp | None = None
    logits_cap: float = 0.0  # c: logits x become c * tanh(x / c); 0: they do not
    has_lm_head: bool = True
    head: Head = ()  # of a classifier
    score_tokens: tuple[int, ...] = ()  # whose rows of the output head make a classifier
    # tokens see those behind them too, and a window reaches in both directions; there is no cache
    is_bidirectional: bool = False

    @property
    def base_prefix(self) -> str:
        """What names of the base model's tensors begin with; a checkpoint of it alone may not."""
        return f"{self.name_prefix}{self.base_name}"

    def layer(self, index: int) -> LayerConfig:
        """What a layer has, with the sizes of its heads."""
        own = self.layers[index] if self.layers else LayerConfig()
        return replace(
            own,
            head_dim=own.head_dim or self.head_dim,
            num_kv_heads=own.num_kv_heads or self.num_key_value_heads,
            intermediate_size=own.intermediate_size or self.intermediate_size,
        )

    def attention_shapes(self, layer: LayerConfig) -> list[tuple[int, int]]:
        """(rows, columns) of the linear layers of attention, as they are merged."""
        if self.latent is not None:
            return self.latent.linear_shapes(self.hidden_size, self.num_attention_heads)
        size, q_rows = self.hidden_size, self.num_attention_heads * layer.head_dim
        rows = 2 * q_rows if self.attention_gate == GATE_OF_ELEMENTS else q_rows
        if layer.kv_from is None:
            rows += (1 + layer.has_values) * layer.num_kv_heads * layer.head_dim
        own = [(self.num_attention_heads, size)] if self.attention_gate == GATE_OF_HEADS else []
        return [(rows, size), (size, q_rows), *own]

    def rotary_head_dim(self, index: int) -> int:
        """The size of what rotary embeddings are applied to in a layer."""
        return self.layer(index).head_dim if self.latent is None else self.latent.rotary_dim

    @property
    def cache_layers(self) -> tuple[int, ...]:
        """The layers that own keys and values in the KV cache."""
        if self.is_bidirectional:
            return ()
        kinds = [self.layer(index) for index in range(self.num_hidden_layers)]
        owns = [kind.has_attention and kind.kv_from is None for kind in kinds]
        return tuple(index for index, is_owner in enumerate(owns) if is_owner)

    @property
    def first_sharing(self) -> int:
        """The first of the last layers that all read keys and values of others. They keep nothing
        of a request. The number of layers, if there are none.
        """
        first = self.num_hidden_layers
        while first > 0 and self.layer(first - 1).kv_from is not None:
            first -= 1
        return first

    @property
    def cache_windows(self) -> tuple[int, ...]:
        """The windows of cache_layers; 0: none."""
        windows = self.sliding_windows or (0,) * self.num_hidden_layers
        return tuple(windows[index] for index in self.cache_layers)

    @property
    def state_parts(self) -> tuple[tuple[StatePart, ...], ...]:
        """What each recurrent layer keeps of a request, in order."""
        mixers = [layer.mixer for layer in self.layers]
        return tuple(mixer.state_parts for mixer in mixers if mixer is not None)

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of the states of one request. itemsize: of a number of the model's dtype."""
        return state_bytes(self.state_parts, itemsize)

    def rope_of(self, layer: int) -> dict[str, Any] | None:
        """The rope parameters of a layer; None: it does not rotate."""
        if layer in self.unrotated_layers:
            return None
        is_sliding = self.sliding_rope is not None and self.sliding_windows[layer] > 0
        return self.sliding_rope if is_sliding else self.rope


def parse_decoder_config(
    hf_config: dict[str, Any],
    *,
    default_head_dim: int | None = None,
    honours: tuple[str, ...] = (),
    activation: str = "silu",
) -> DecoderConfig:
    """Parses the config.json of a decoder-only model.

    `honours`: keys of _NEUTRAL that the model supports with any value, and the form of its windows
    (parse_sliding_windows). `activation`: the only one that the model supports.

    Raises ModelLoadError, naming the key, for one that is missing, out of range or unsupported.
    """
    if missing := [key for key in _REQUIRED if hf_config.get(key) is None]:
        raise ModelLoadError(f"config.json lacks {', '.join(missing)}")
    _refuse_unhandled(hf_config, honours, activation)
    _check_bidirectional(hf_config)
    parse_quantization(hf_config)  # refuses what is unsupported
    sizes: dict[str, Any] = {key: _size(hf_config, key) for key in _REQUIRED}
    hidden_size, num_heads = sizes["hidden_size"], sizes["num_attention_heads"]
    config = DecoderConfig(
        **sizes,
        num_key_value_heads=_size(hf_config, "num_key_value_heads", num_heads),
        head_dim=_size(hf_config, "head_dim", default_head_dim or hidden_size // num_heads),
        rms_norm_eps=_epsilon(hf_config),
        tie_word_embeddings=_switch(hf_config, "tie_word_embeddings"),
        attention_bias=_switch(hf_config, "attention_bias"),
        attention_out_bias=_switch(hf_config, "attention_out_bias"),
        mlp_bias=_switch(hf_config, "mlp_bias"),
        num_nextn_predict_layers=integer(FURTHER, hf_config.get(FURTHER) or 0, least=0),
        use_qk_norm=_switch(hf_config, "use_qk_norm"),
        rope={},
        activation=activation,
    )
    if num_heads % config.num_key_value_heads:
        raise ModelLoadError(
            f"config.json: num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
    if config.head_dim % 2:
        raise ModelLoadError(f"config.json: head_dim must be even, got {config.head_dim}")
    rope, sliding_rope = parse_ropes(hf_config, config.head_dim, honours)
    unrotated = _unrotated_layers(hf_config, honours)
    if unrotated and not hf_config.get("layer_types"):  # SmolLM3: only these may have windows
        kinds = [SLIDING if i in unrotated else FULL for i in range(config.num_hidden_layers)]
        if hf_config.get("use_sliding_window") and hf_config.get("sliding_window") is not None:
            hf_config = hf_config | {"layer_types": kinds}
    return replace(
        config,
        rope=rope,
        sliding_rope=sliding_rope,
        unrotated_layers=unrotated,
        sliding_windows=parse_sliding_windows(hf_config, honours),
        is_bidirectional=is_bidirectional(hf_config),
        has_lm_head=form_of(hf_config) == GENERATE,
        head=decoder_head(hf_config, hidden_size),
        score_tokens=score_tokens(hf_config),
        **_scales(hf_config, config.head_dim, honours),
    )


def most_of(key: str) -> int:
    """The largest value that a size of config.json may have."""
    return MOST.get(key, MOST_OF_A_SIZE)


def is_bidirectional(hf_config: dict[str, Any]) -> bool:
    """Whether the tokens of a model built as a decoder see those behind them (EmbeddingGemma)."""
    directions = hf_config.get("use_bidirectional_attention")
    if directions == "vision":  # of Gemma 4: tokens of an image alone see each other
        return False
    return hf_config.get("is_causal") is False or bool(directions)


def _check_bidirectional(hf_config: dict[str, Any]) -> None:
    if not is_bidirectional(hf_config):
        return
    key = "is_causal" if hf_config.get("is_causal") is False else "use_bidirectional_attention"
    if form_of(hf_config) == GENERATE:
        raise ModelLoadError(
            f"config.json: {key}={hf_config[key]} is not supported for a model that generates "
            f"text; set runner=pooling"
        )
    if key == "is_causal" and hf_config.get("use_sliding_window"):
        raise ModelLoadError("config.json: is_causal=False is not supported beside sliding windows")


def unread_keys(hf_config: dict[str, Any]) -> list[str]:
    """Keys that Quire does not read and that could change results, sorted."""
    known = _HARMLESS | _READ | _NEUTRAL.keys()
    known |= {*DecoderConfig.__struct_fields__, *_ACTIVATION_KEYS}
    unread = {
        key
        for key in hf_config.keys() - known
        if not key.startswith("_") and not key.endswith(_HARMLESS_ENDINGS)
    }
    if unread:
        from .mamba_config import MAMBA_KEYS

        unread -= MAMBA_KEYS
    return sorted(unread)


def _size(hf_config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = hf_config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise malformed(key, "a positive integer", value)
    if value > (most := most_of(key)):
        raise malformed(key, f"at most {most:,}", value)
    return value


def _switch(hf_config: dict[str, Any], key: str) -> bool:
    value = hf_config.get(key)
    if value not in (None, False, True):
        raise malformed(key, "true or false", value)
    return bool(value)


def _epsilon(hf_config: dict[str, Any]) -> float:
    value = hf_config.get("rms_norm_eps", 1e-6)
    if not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise malformed("rms_norm_eps", "a number from 0 to 1", value)
    return value


def _unrotated_layers(hf_config: dict[str, Any], honours: tuple[str, ...]) -> tuple[int, ...]:
    """The layers with a 0 in no_rope_layers, or every no_rope_layer_interval-th (SmolLM3); or those
    without a window, where others have one (EXAONE 4).
    """
    if UNROTATED_FULL_LAYERS in honours:
        windows = parse_sliding_windows(hf_config, honours)
        return tuple(i for i, window in enumerate(windows) if not window) if any(windows) else ()
    if "no_rope_layers" not in honours:
        return ()
    num_layers, rotates = hf_config["num_hidden_layers"], hf_config.get("no_rope_layers")
    if not rotates:
        interval = _size(hf_config, "no_rope_layer_interval", DEFAULT_NO_ROPE_INTERVAL)
        return tuple(i for i in range(num_layers) if (i + 1) % interval == 0)
    is_list = isinstance(rotates, list) and all(value in (0, 1) for value in rotates)
    if not is_list or len(rotates) < num_layers:
        wanted = f"a list of 0 and 1, one for each of {num_layers} layers"
        raise malformed("no_rope_layers", wanted, rotates)
    return tuple(i for i in range(num_layers) if not rotates[i])


def _scales(hf_config: dict[str, Any], head_dim: int, honours: tuple[str, ...]) -> dict[str, float]:
    """The factors of a DecoderConfig that config.json determines."""
    scales = {"attention_scale": head_dim**-0.5}
    for key, name in _MULTIPLIERS.items():
        if key in honours and hf_config.get(key) is not None:
            scales[name] = _positive(hf_config, key)
    if "logits_scaling" in honours and hf_config.get("logits_scaling") is not None:
        scales["logits_scale"] = 1 / _positive(hf_config, "logits_scaling")
    for key, name in _CAPS.items():
        if key in honours and hf_config.get(key) is not None:
            scales[name] = _positive(hf_config, key)
    if "query_pre_attn_scalar" in honours:
        scales["attention_scale"] = _positive(hf_config, "query_pre_attn_scalar") ** -0.5
    return scales


def _positive(hf_config: dict[str, Any], key: str) -> float:
    value = hf_config.get(key)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is None or not is_number or not LEAST_SCALE <= value <= 1 / LEAST_SCALE:
        raise malformed(key, f"a number from {LEAST_SCALE} to {1 / LEAST_SCALE}", value)
    return value


def _refuse_unhandled(hf_config: dict[str, Any], honours: tuple[str, ...], activation: str) -> None:
    names = dict.fromkeys(_ACTIVATION_KEYS, ACTIVATIONS[activation])
    for key, neutral in {**names, **_NEUTRAL}.items():
        value = hf_config.get(key)
        if value is None or key in honours or value in neutral:
            continue
        allowed = f"; supported: {', '.join(repr(v) for v in neutral)}" if neutral else ""
        raise ModelLoadError(f"config.json: {key}={value!r:.100} is not supported{allowed}")


def parse_sliding_windows(hf_config: dict[str, Any], honours: tuple[str, ...]) -> tuple[int, ...]:
    """Returns DecoderConfig.sliding_windows.

    Windows have three forms. Qwen's, "use_sliding_window" among `honours`, has a switch, a length,
    and the layers it applies to. Mistral's, "sliding_window", is only a length, for all layers.
    Gemma 3's, "layer_types", is a length and the layers, every n-th of which has no window where
    they are not listed (sliding_window_pattern).
    Raises ModelLoadError, naming the key, for a value out of range, and for a window in neither
    form.
    """
    num_layers = hf_config["num_hidden_layers"]
    listed = _listed_layer_types(hf_config, honours)
    is_on = _has_windows(hf_config, honours, listed)
    if is_on and listed and not {"use_sliding_window", "layer_types"} & {*honours}:
        # transformers' Mistral does not read them
        raise ModelLoadError(
            "config.json: layer_types beside sliding_window are not supported for this architecture"
        )
    layer_types = listed
    if not listed:
        first = _first_window_layer(hf_config, honours)
        layer_types = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    supported = (FULL, SLIDING) if is_on else (FULL,)
    unknown = {str(kind) for kind in listed} - {*supported}
    if unknown:
        raise ModelLoadError(
            f"config.json: layer_types of {', '.join(sorted(unknown)):.100} are not supported; "
            f"supported: {', '.join(supported)}"
        )
    if not is_on:
        # however many layer_types there are: hf_overrides may ask for fewer layers
        return (0,) * num_layers
    if len(layer_types) != num_layers:
        raise ModelLoadError(
            f"config.json: layer_types has {len(layer_types)} entries for "
            f"num_hidden_layers={num_layers}"
        )
    window = _size(hf_config, "sliding_window")
    return tuple(window if kind == SLIDING else 0 for kind in layer_types)


def _listed_layer_types(hf_config: dict[str, Any], honours: tuple[str, ...]) -> list[Any]:
    """layer_types, or those that sliding_window_pattern stands for; empty where there is none."""
    layer_types = hf_config.get("layer_types")
    if layer_types is not None and not isinstance(layer_types, list):
        raise malformed("layer_types", "a list", layer_types)
    if layer_types or "layer_types" not in honours:
        return layer_types or []
    every = _size(hf_config, "sliding_window_pattern")
    num_layers = hf_config["num_hidden_layers"]
    return [FULL if (i + 1) % every == 0 else SLIDING for i in range(num_layers)]


def _has_windows(hf_config: dict[str, Any], honours: tuple[str, ...], listed: list[Any]) -> bool:
    """Whether sliding_window is there and in use. Raises for one that the model would ignore."""
    window, has_switch = hf_config.get("sliding_window"), "use_sliding_window" in honours
    is_switched_on = _switch(hf_config, "use_sliding_window")
    if window is None:
        return False
    if is_switched_on if has_switch else {"layer_types", "sliding_window"} & {*honours}:
        _size(hf_config, "sliding_window")
        return True
    # Qwen's configs have a length that use_sliding_window=false disables.
    is_disabled = has_switch or hf_config.get("use_sliding_window") is not None
    if not is_disabled and not listed:
        raise ModelLoadError(
            f"config.json: sliding_window={window!r:.100} is not supported unless "
            f"use_sliding_window is false"
        )
    return False


def _first_window_layer(hf_config: dict[str, Any], honours: tuple[str, ...]) -> int:
    """The first layer with a window, where config.json lists none."""
    first = 0
    if "use_sliding_window" in honours:
        first = hf_config.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
    if not isinstance(first, int) or first < 0:
        raise malformed("max_window_layers", "an integer, at least 0", first)
    return first
