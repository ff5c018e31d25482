"""What a config.json says about a decoder-only model, checked and in one form.

Must not know: tensors, layers, how any of it is computed, which architectures there are.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from .errors import ModelLoadError
from .rope_config import parse_rope_parameters

logger = logging.getLogger(__name__)

# Keys that say nothing about the mathematics of inference (or say it again: dtype comes from the
# engine's own configuration).
_HARMLESS = {
    "architectures",
    "model_type",
    "transformers_version",
    "_name_or_path",
    "torch_dtype",
    "dtype",
    "use_cache",
    "initializer_range",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "pretraining_tp",
    "max_window_layers",
    "sliding_window",
    "auto_map",
    "id2label",
    "label2id",
    "attention_probs_dropout_prob",
    "hidden_dropout",
    "hidden_dropout_prob",
    "embd_pdrop",
    "resid_pdrop",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "torchscript",
    "tie_encoder_decoder",
    "is_encoder_decoder",
    "is_decoder",
    "cross_attention_hidden_size",
    "add_cross_attention",
    "gradient_checkpointing",
    "problem_type",
    "task_specific_params",
    "tokenizer_class",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "chunk_size_feed_forward",
    "use_bfloat16",
    "max_length",
    "do_sample",
    "prefix",
    "finetuning_task",
    "pruned_heads",
    "decoder_start_token_id",
    "sep_token_id",
}
# Keys that would change the mathematics, with the values under which they do not. Anything else is
# refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "use_sliding_window": (False,),
    "quantization_config": (),
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
    "num_attention_sinks": (0,),
    "no_rope_layers": ([],),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "use_mrope": (False,),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}
FULL, SLIDING = "full_attention", "sliding_attention"  # of layer_types
DEFAULT_MAX_WINDOW_LAYERS = 28  # transformers'
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class DecoderConfig:
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
    # of each layer: how many positions a token sees, its own the last; 0: all before it
    sliding_windows: tuple[int, ...] = ()


def parse_decoder_config(
    hf_config: dict[str, Any], *, default_head_dim: int | None = None, honours: tuple[str, ...] = ()
) -> DecoderConfig:
    """Reads the config.json of a decoder-only model.

    `honours`: keys of _NEUTRAL that the model at hand acts on, whatever their value. Raises
    ModelLoadError, naming the key, for one that is missing, that is out of range, or that asks for
    what is not built.
    """
    if missing := [key for key in _REQUIRED if hf_config.get(key) is None]:
        raise ModelLoadError(f"config.json lacks {', '.join(missing)}")
    _refuse_unhandled(hf_config, honours)
    num_heads, num_kv_heads = (
        hf_config["num_attention_heads"],
        hf_config.get("num_key_value_heads") or hf_config["num_attention_heads"],
    )
    config = DecoderConfig(
        **{key: hf_config[key] for key in _REQUIRED},
        num_key_value_heads=num_kv_heads,
        head_dim=hf_config.get("head_dim")
        or default_head_dim
        or hf_config["hidden_size"] // num_heads,
        rms_norm_eps=hf_config.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
        attention_bias=bool(hf_config.get("attention_bias", False)),
        mlp_bias=bool(hf_config.get("mlp_bias", False)),
        rope=parse_rope_parameters(hf_config),
    )
    _check_sizes(config)
    config = replace(config, sliding_windows=parse_sliding_windows(hf_config, honours))
    unread = (
        hf_config.keys()
        - _HARMLESS
        - _NEUTRAL.keys()
        - config.__dataclass_fields__.keys()
        - {"layer_types"}
    )
    if unread:
        logger.warning(
            "config.json: keys that Quire does not know were not used: %s",
            ", ".join(sorted(unread)),
        )
    return config


def _refuse_unhandled(hf_config: dict[str, Any], honours: tuple[str, ...]) -> None:
    for key, neutral in _NEUTRAL.items():
        value = hf_config.get(key)
        if value is None or key in honours or value in neutral:
            continue
        allowed = f"; supported: {', '.join(repr(v) for v in neutral)}" if neutral else ""
        raise ModelLoadError(f"config.json: {key}={value!r} is not supported{allowed}")


def parse_sliding_windows(hf_config: dict[str, Any], honours: tuple[str, ...]) -> tuple[int, ...]:
    """DecoderConfig.sliding_windows.

    Two ways to ask for them: Qwen's, "use_sliding_window" among `honours`, is a switch, a length,
    and which layers have it; Mistral's, "sliding_window", is the length alone, for all layers.

    Raises ModelLoadError, naming the key, for what is out of range, and for a window that is asked
    for in neither way.
    """
    num_layers, window, layer_types = (
        hf_config["num_hidden_layers"],
        hf_config.get("sliding_window"),
        hf_config.get("layer_types"),
    )
    has_switch, switch = "use_sliding_window" in honours, hf_config.get("use_sliding_window")
    is_on = window is not None and bool(switch if has_switch else "sliding_window" in honours)
    if is_on and (not isinstance(window, int) or window < 1):
        raise ModelLoadError(
            f"config.json: sliding_window must be a positive integer, got {window!r}"
        )
    # Qwen's configs carry a length that use_sliding_window=false switches off.
    if (
        window is not None
        and not is_on
        and not has_switch
        and switch is not False
        and not layer_types
    ):
        raise ModelLoadError(
            f"config.json: sliding_window={window} is not supported unless use_sliding_window is "
            f"false"
        )
    if not layer_types:
        first = hf_config.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS) if has_switch else 0
        if not isinstance(first, int) or first < 0:
            raise ModelLoadError(
                f"config.json: max_window_layers must be an integer, at least 0, got {first!r}"
            )
        layer_types = [SLIDING if is_on and layer >= first else FULL for layer in range(num_layers)]
    elif is_on and not has_switch:  # transformers' Mistral would not look at them
        raise ModelLoadError(
            "config.json: layer_types beside sliding_window are not supported for this architecture"
        )
    supported = [FULL, SLIDING] if is_on else [FULL]
    if unknown := {str(layer_type) for layer_type in layer_types} - set(supported):
        raise ModelLoadError(
            f"config.json: layer_types of {', '.join(sorted(unknown))} are not supported; "
            f"supported: {', '.join(supported)}"
        )
    if not is_on:
        return (0,) * num_layers  # however many are listed: hf_overrides may ask for fewer layers
    if len(layer_types) != num_layers:
        raise ModelLoadError(
            f"config.json: layer_types has {len(layer_types)} entries for "
            f"num_hidden_layers={num_layers}"
        )
    return tuple((window or 0) if layer_type == SLIDING else 0 for layer_type in layer_types)


def _check_sizes(config: DecoderConfig) -> None:
    for key in (*_REQUIRED, "num_key_value_heads", "head_dim"):
        value = getattr(config, key)
        if not isinstance(value, int) or value < 1:
            raise ModelLoadError(f"config.json: {key} must be a positive integer, got {value!r}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ModelLoadError(
            f"config.json: num_attention_heads={heads} is not a multiple of "
            f"num_key_value_heads={kv_heads}"
        )
    if config.head_dim % 2:
        raise ModelLoadError(f"config.json: head_dim must be even, got {config.head_dim}")
