"""The configuration of a GGUF file's model: what config.json and generation_config.json would say.

Must not know: weights, torch, tokens' texts beyond the names of those that end an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nextafter
from pathlib import Path
from struct import pack, unpack
from typing import Any

from ..errors import ModelLoadError
from .architectures import ARCHITECTURES
from .decoder_config import MOST
from .gguf import GGUFFile, GGUFTensor
from .gguf_architectures import (
    OLMO3,
    QUERY_GROWTH,
    VARIANT_KEYS,
    VARIANTS,
    GGUFArchitecture,
)
from .gguf_weights import (
    ARCHITECTURE_KEY,
    LONG_ROPE_FACTORS,
    architecture_of,
    read_rope_factors,
)
from .pooling import STORED_POOLING
from .rope_config import DEFAULT_THETA, FULL, SLIDING

_GEMMA3_LOCAL_BASE = 10_000.0  # of the rotary embedding in layers with a window
# The number of layers of the models whose attention is not scaled by the size of a head.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
# Maps a key without the architecture's name to a key of config.json.
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "pooling_type": STORED_POOLING,
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
}
_ENCODER_KEYS = {
    key: _KEYS[key]
    for key in (
        *("context_length", "embedding_length", "feed_forward_length", "block_count"),
        *("attention.head_count", "pooling_type"),
    )
} | {"attention.layer_norm_epsilon": "layer_norm_eps"}
# Maps a table of a text encoder to the key of config.json that has the number of its rows.
_ENCODER_TABLES = {
    "token_embd": "vocab_size",
    "position_embd": "max_position_embeddings",
    "token_types": "type_vocab_size",
}
_LISTED = ("num_key_value_heads", "num_attention_heads", "intermediate_size")  # may be per layer
_READ = (
    "vocab_size",
    "attention.sliding_window_pattern",
    "rope.freq_base_swa",
    "rope.dimension_count",
    "attention.value_length",
    "expert_feed_forward_length",  # of tensors' shapes
    "expert_shared_feed_forward_length",
)
_ZERO_IS_NONE = ("attention.sliding_window", "expert_count", "expert_used_count")
_ORIGINAL = "original_max_position_embeddings"
# maps rope.scaling.* to a key of rope_scaling
_SCALING_KEYS = {
    "factor": "factor",
    "original_context_length": _ORIGINAL,
    "attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# These tokens end an answer in some model, whatever eos_token_id says: a file has room for one id,
# while generation_config.json lists several.
ENDING_TOKENS = frozenset(
    {
        "<|endoftext|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<turn|>",
        "<|end|>",
        "<|return|>",
    }
)
# In gpt-oss' format <|end|> ends one of the messages of an answer, and a call ends the answer.
MESSAGE_END, CALL_END = "<|end|>", "<|call|>"
CONTROL_TOKEN = 3  # a value of tokenizer.ggml.token_type
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """Returns what the model's config.json would hold. Keys of the architecture that are unknown
    here keep their own names, so that they are reported as unread.

    Raises ModelLoadError, naming file and key, for an unknown architecture and for a key that
    cannot be expressed.
    """
    path, metadata, tensors = file.paths[0], file.metadata, file.tensors
    known, architecture = architecture_of(file), metadata[ARCHITECTURE_KEY]
    own = {
        key.removeprefix(f"{architecture}."): _decimal(metadata[key])
        for key in metadata
        if key.startswith(f"{architecture}.")
    }
    if known.is_encoder:
        return _encoder_config(file, known, own)
    if any(own.get(key) for key in VARIANT_KEYS.get(architecture, ())):
        known = VARIANTS[architecture]
    of_family: dict[str, Any] = {}
    if known.read is not None:
        try:
            of_family = known.read(own, tensors, read_rope_factors(file))
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}: {error}") from None
    config: dict[str, Any] = {
        "architectures": [known.architecture],
        "model_type": known.model_type,
        "hidden_act": "silu",
        **known.constants,
        **_of_keys(path, architecture, known, own),
        **_of_tensors(tensors, known),
    }
    _check_heads(path, known, own, config)
    _add_of_architecture(architecture, known, own, config)
    if "rope_parameters" not in of_family:
        _add_rope_scaling(file, known, own, config)
    config |= of_family
    for end in ("bos", "eos"):
        if (token := metadata.get(f"tokenizer.ggml.{end}_token_id")) is not None:
            config[f"{end}_token_id"] = token
    return config


def _of_keys(
    path: Path, architecture: str, known: GGUFArchitecture, own: dict[str, Any]
) -> dict[str, Any]:
    """What the metadata says under names of its own. `own` holds the keys of the architecture."""
    keys, config = {**_KEYS, **known.keys}, {}
    for key, value in own.items():
        is_none = key in _ZERO_IS_NONE and not value
        if is_none or key.startswith("rope.scal"):
            continue
        if key in keys:
            config[keys[key]] = value
        elif key not in _READ:
            config[f"{architecture}.{key}"] = value
    for key in _LISTED:
        if isinstance(values := config.get(key), list):
            if len(set(map(repr, values))) != 1:
                raise ModelLoadError(f"{path}: {key} differs between layers: {values!s:.100}")
            config[key] = values[0]
    return config


def _of_tensors(tensors: Mapping[str, GGUFTensor], known: GGUFArchitecture) -> dict[str, Any]:
    """What only the tensors say: sizes, and whether there are biases and an output head."""
    config: dict[str, Any] = {"tie_word_embeddings": "output.weight" not in tensors}
    if (embedding := tensors.get("token_embd.weight")) is not None:
        config["vocab_size"] = embedding.shape[0]  # the file's own key may leave out padding
    parts = {name.split(".", 2)[-1] for name in tensors}
    for key, name in known.sizes.items():
        if (tensor := tensors.get(f"blk.0.{name}")) is not None and len(tensor.shape) > 1:
            config[key] = tensor.shape[-2]
    for key, name in known.presence.items():
        config[key] = name in parts or name.replace("attn_q.", "attn_qkv.") in parts
    return config


def _encoder_config(file: GGUFFile, known: GGUFArchitecture, own: dict[str, Any]) -> dict[str, Any]:
    """Reads a text encoder. The rows of its tables count: keys may leave out padding."""
    if own.get("attention.causal"):
        raise ModelLoadError(f"{file.paths[0]}: attention.causal is not supported for encoders")
    keys = {**_ENCODER_KEYS, **known.keys}
    config = {
        "architectures": [known.architecture],
        "model_type": known.model_type,
        "type_vocab_size": 0,
        **known.constants,
        **{keys[key]: value for key, value in own.items() if key in keys},
    }
    for name, key in _ENCODER_TABLES.items():
        if (table := file.tensors.get(f"{name}.weight")) is not None and table.shape:
            config[key] = table.shape[0] if len(table.shape) > 1 else 1
    return config


def gguf_generation_config(file: GGUFFile) -> dict[str, Any]:
    """Returns what the model's generation_config.json would hold: every token that ends an answer,
    and the recommended sampling.
    """
    metadata = file.metadata
    ends = [metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    kinds = metadata.get("tokenizer.ggml.token_type")
    if isinstance(kinds, list):
        ids = [i for i, kind in enumerate(kinds) if kind == CONTROL_TOKEN]
        texts = metadata.strings_at("tokenizer.ggml.tokens", ids)
        control = {text: i for i, text in texts.items()}
        ends += [i for text, i in control.items() if text in ENDING_TOKENS]
        if CALL_END in control:
            ends = [end for end in [*ends, control[CALL_END]] if end != control.get(MESSAGE_END)]
    found = list(dict.fromkeys(end for end in ends if end is not None))
    config: dict[str, Any] = {"eos_token_id": found} if found else {}
    for key, name in _SAMPLING_KEYS.items():
        if (value := metadata.get(f"general.sampling.{key}")) is not None:
            config[name] = _decimal(value)
    return config


def _add_of_architecture(
    name: str, known: GGUFArchitecture, own: dict[str, Any], config: dict[str, Any]
) -> None:
    """Adds what llama.cpp knows of an architecture without a key for it, and windows by layer."""
    num_layers = config.get("num_hidden_layers")
    if name in _LAYERS_OF_27B:
        scaled_by = config.get("head_dim")
        hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
        is_27b = num_layers == _LAYERS_OF_27B[name]
        if is_27b and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            scaled_by = hidden // heads
        config["query_pre_attn_scalar"] = scaled_by
    if name == "gemma3":
        config["hidden_act"] = config["hidden_activation"] = "gelu_pytorch_tanh"
        config["rope_local_base_freq"] = own.get("rope.freq_base_swa", _GEMMA3_LOCAL_BASE)
    elif known is OLMO3:
        config["rope_local_base_freq"] = own.get("rope.freq_base_swa", config.get("rope_theta"))
    config.setdefault("rope_theta", DEFAULT_THETA)  # llama.cpp uses this one for every model
    config["pad_token_id"] = None  # transformers' default may be out of the vocabulary
    pattern = own.get("attention.sliding_window_pattern")
    if known.windows and isinstance(num_layers, int) and num_layers <= MOST["num_hidden_layers"]:
        has_windows = config.get("sliding_window") is not None
        usual = [has_windows and (i + 1) % known.windows != 0 for i in range(num_layers)]
        pattern = pattern if has_windows and isinstance(pattern, list) else usual
    if isinstance(pattern, list):
        config["layer_types"] = [SLIDING if has_window else FULL for has_window in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = pattern


def _check_heads(
    path: Any, known: GGUFArchitecture, own: dict[str, Any], config: dict[str, Any]
) -> None:
    """Refuses a model unless values have as many features as keys. Where it cannot rotate a part of
    a head, it is also refused unless all of a head's features rotate.
    """
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if "head_dim" not in config:
        if not (isinstance(hidden, int) and isinstance(heads, int) and heads > 0):
            return  # the parser of the configuration names what is wrong
        config["head_dim"] = hidden // heads
    head_dim = config["head_dim"]
    if own.get("attention.value_length", head_dim) != head_dim:
        raise ModelLoadError(f"{path}: attention.value_length differs from the keys' {head_dim}")
    rotated = own.get("rope.dimension_count", head_dim)
    if rotated == head_dim or not (isinstance(rotated, int) and isinstance(head_dim, int)):
        return
    if known.architecture not in ARCHITECTURES and "partial_rotary_factor" not in known.constants:
        raise ModelLoadError(
            f"{path}: rope.dimension_count must be the size of a head, {head_dim}, for "
            f"{known.architecture}, got {rotated}"
        )
    part = rotated / max(head_dim, 1)
    # head_dim times the quotient may be less than `rotated`
    config["partial_rotary_factor"] = (
        part if int(part * head_dim) == rotated else nextafter(part, 1)
    )


def _add_rope_scaling(
    file: GGUFFile, known: GGUFArchitecture, own: dict[str, Any], config: dict[str, Any]
) -> None:
    growth, scaling = config.pop(QUERY_GROWTH, None), _rope_scaling(file, known, own)
    if scaling is None:
        if growth:
            raise ModelLoadError(
                f"{file.paths[0]}: attention.temperature_scale needs rope.scaling.type yarn"
            )
        return
    config["rope_scaling"] = scaling
    if growth:
        scaling[QUERY_GROWTH] = growth
    if known.architecture == "GptOssForCausalLM" and scaling["rope_type"] == "yarn":
        scaling["truncate"] = False
    if scaling["rope_type"] == "longrope" and (original := scaling.get(_ORIGINAL)):
        config[_ORIGINAL] = original  # Phi-3's config.json has it here


def _rope_scaling(
    file: GGUFFile, known: GGUFArchitecture, own: dict[str, Any]
) -> dict[str, Any] | None:
    path, prefix = file.paths[0], "rope.scaling."
    if (factors := read_rope_factors(file)) is not None:
        return {"rope_type": "factors", "factors": factors}
    if long := {
        key: factors
        for name, key in LONG_ROPE_FACTORS.items()
        if (factors := read_rope_factors(file, name)) is not None
    }:
        original = own.get(f"{prefix}original_context_length")
        length = {} if original is None else {_ORIGINAL: original}
        return {"rope_type": "longrope"} | long | length
    parameters = {key.removeprefix(prefix): own[key] for key in own if key.startswith(prefix)}
    if "rope.scale_linear" in own:  # old files have it
        parameters = {"type": "linear", "factor": own["rope.scale_linear"]} | parameters
    parameters.pop("finetuned", None)
    rope_type = parameters.pop("type", "none")
    if rope_type == "none" or (rope_type == "linear" and parameters.get("factor") == 1):
        return None
    scaling = {"rope_type": rope_type}
    for key, value in parameters.items():
        name = _SCALING_KEYS.get(key) or known.keys.get(prefix + key)
        if name is None:
            raise ModelLoadError(f"{path}: {prefix}{key:.50} is not supported")
        scaling[name] = value
    if rope_type == "linear":
        scaling.pop("original_max_position_embeddings", None)
    if rope_type == "yarn" and scaling.get("mscale_all_dim"):
        scaling.setdefault("mscale", 1.0)
    return scaling


def _decimal(value: Any) -> Any:
    """Returns a float as config.json writes it: the shortest decimal with the same 32 bits."""
    if not isinstance(value, float):
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        try:
            if unpack("<f", pack("<f", short))[0] == value:
                return short
        except OverflowError:  # it is rounded up beyond 32 bits, or has 64 bits
            continue
    return value
