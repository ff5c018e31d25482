"""Parses the rotary position embedding of a config.json, and the longest sequence that it allows.

Must not know: tensors, layers, how an angle is computed, which architectures there are.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from ..errors import ModelLoadError
from .config_values import integer, malformed

_ROPE_KEYS = {  # by type: required, optional
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    # LFM3's and Gemma 4's: rotates only the first frequencies, but pairs the halves of the head
    "proportional": (set(), {"factor"}),
    "dynamic": ({"factor"}, {"original_max_position_embeddings"}),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor"},
        {"original_max_position_embeddings"},
    ),
    # Phi-3's: what each frequency is divided by, up to the original length and beyond
    "longrope": (
        {"short_factor", "long_factor"},
        {"factor", "attention_factor", "original_max_position_embeddings"},
    ),
    # Quire's own: what each frequency is divided by; GGUF files store Llama 3's scaling in this way
    "factors": ({"factors"}, set()),
    "yarn": (
        {"factor"},
        {
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        },
    ),
}
_POSITIVE = frozenset(
    {
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factors",
        "short_factor",
        "long_factor",
        "llama_4_scaling_beta",
    }
)
_LISTS = frozenset({"factors", "short_factor", "long_factor"})  # a number for each frequency
_RENAMED = {"su": "longrope"}
DEFAULT_THETA = 10000.0
LEAST_FACTOR = 1e-6
FULL, SLIDING = "full_attention", "sliding_attention"  # of layer_types
# Keys of config.json that give the longest sequence of the model; the smallest one present counts.
CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "model_max_length",
)
INDEX_TOPK = "index_topk"  # tokens that an indexer chooses for each query
# max_position_embeddings is the length after scaling, or, for "dynamic", the length up to which no
# scaling takes place. Beyond it the angles of "dynamic" depend on the current length of a sequence,
# so that cached keys would be wrong; Quire does not exceed it.
_NOT_LENGTHENED = frozenset(
    {"default", "llama3", "longrope", "su", "mrope", "dynamic", "factors", "proportional"}
)


def model_context(hf_config: dict[str, Any]) -> int | None:
    """Longest sequence in tokens, including rope scaling; None if config.json does not say.

    Configuration, plan and model all use this length. As in vLLM, except for "dynamic", and for
    models with an indexer: attention is that of all tokens, as long as it would choose them all.
    Raises ModelLoadError, naming the key, for an invalid length or factor.
    """
    length, most = _context_of_positions(hf_config), hf_config.get(INDEX_TOPK)
    return length if most is None else min(integer(INDEX_TOPK, most), length or most)


def _context_of_positions(hf_config: dict[str, Any]) -> int | None:
    """What model_context returns for attention to all tokens."""
    lengths = {key: hf_config[key] for key in CONTEXT_KEYS if hf_config.get(key) is not None}
    for key, length in lengths.items():
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ModelLoadError(f"config.json: {key} must be a positive integer, got {length!r}")
    if not lengths:
        return None
    rope_type, parameters = _rope_of(_rope_of_full_layers(hf_config))
    factor = parameters.get("factor", 1.0)
    if "rope_local_base_freq" in hf_config or _by_kind(hf_config):
        # Gemma 3 and OLMo 3: the length of the windows' layers, which are not scaled, and which
        # max_position_embeddings includes the scaling of the others
        return min(lengths.values())
    if rope_type in _NOT_LENGTHENED:
        return min(lengths.values())
    _check_number("factor", factor)
    base = min(lengths.values())
    if rope_type == "yarn":
        base = parameters.get("original_max_position_embeddings", base)
        _check_number("original_max_position_embeddings", base)
    return int(base * factor)


def _rope_of(hf_config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the type, and the parameters that are not null, without the type."""
    given = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ModelLoadError(f"rope parameters must be an object, got {given!r:.100}")
    parameters = {key: value for key, value in given.items() if value is not None}
    old_name = parameters.pop("type", "default")
    rope_type = parameters.pop("rope_type", None) or old_name
    if not isinstance(rope_type, str):
        raise ModelLoadError(f"rope type must be a string, got {rope_type!r:.100}")
    return _RENAMED.get(rope_type, rope_type), parameters


def _by_kind(hf_config: dict[str, Any]) -> bool:
    """Whether layers with and without a window have rope parameters of their own."""
    given = hf_config.get("rope_parameters")
    return isinstance(given, dict) and (FULL in given or SLIDING in given)


def _rope_of_full_layers(hf_config: dict[str, Any]) -> dict[str, Any]:
    """hf_config with the rope parameters of layers without a window as the only ones."""
    if not _by_kind(hf_config):
        return hf_config
    return hf_config | {"rope_parameters": hf_config["rope_parameters"].get(FULL)}


def parse_ropes(
    hf_config: dict[str, Any], head_dim: int, honours: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The rope parameters of all layers; or, with "layer_types" among `honours`, those of layers
    without a window and those of layers with one, where config.json has both. The latter are never
    scaled by rope_scaling.

    Raises as parse_rope_parameters does, and for lists of another length than there are
    frequencies.
    """
    has_own = _by_kind(hf_config) or hf_config.get("rope_local_base_freq") is not None
    if "layer_types" not in honours or not has_own:
        ropes = parse_rope_parameters(hf_config, honours), None
    else:
        own = {"rope_scaling": None, "rope_parameters": None}
        if _by_kind(hf_config):
            own["rope_parameters"] = hf_config["rope_parameters"].get(SLIDING)
        local = {"rope_theta": hf_config.get("rope_local_base_freq")}
        ropes = (
            parse_rope_parameters(_rope_of_full_layers(hf_config), honours),
            parse_rope_parameters(hf_config | own | local, honours),
        )
    for rope in filter(None, ropes):
        num_rotated = rotary_dim(rope, head_dim)
        if num_rotated < 2 or num_rotated % 2:
            raise ModelLoadError(
                f"config.json: partial_rotary_factor rotates {num_rotated} of a head's {head_dim} "
                f"features; it must be an even number, at least 2"
            )
        for key in sorted(_LISTS & rope.keys()):
            if len(rope[key]) != num_rotated // 2:
                raise ModelLoadError(
                    f"config.json: rope parameter {key} needs {num_rotated // 2} numbers, one for "
                    f"each frequency"
                )
    return ropes


def rotary_dim(rope: dict[str, Any], head_dim: int) -> int:
    """How many features of a head the table of angles is for, the first ones. With the type
    "proportional" it is for all of them, and most of its angles are 0.
    """
    if rope["rope_type"] == "proportional":
        return head_dim
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))


def _check_number(key: str, value: Any) -> None:
    if not isinstance(value, (int, float)):
        raise ModelLoadError(f"rope parameter {key} must be a number, got {value!r:.100}")
    if not isfinite(value) or (key in _POSITIVE and value <= 0):
        wanted = "positive and finite" if key in _POSITIVE else "finite"
        raise ModelLoadError(f"rope parameter {key} must be {wanted}, got {value!r:.100}")


def parse_rope_parameters(
    hf_config: dict[str, Any], honours: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns the checked rope parameters: rope_type, rope_theta, and the keys of the type.

    `honours`: partial_rotary_factor and llama_4_scaling_beta, if the model supports them.

    Raises ModelLoadError for an unknown type, a missing key, or an unknown key, which could change
    the angles.
    """
    rope_type, parameters = _rope_of(hf_config)
    if rope_type not in _ROPE_KEYS:
        raise ModelLoadError(
            f"rope type {rope_type!r} is not supported; supported: {', '.join(_ROPE_KEYS)}"
        )
    own: dict[str, Any] = {}
    part = parameters.pop("partial_rotary_factor", hf_config.get("partial_rotary_factor") or 1.0)
    if part != 1.0:
        own["partial_rotary_factor"] = _rotated_part(part, honours)
    if "llama_4_scaling_beta" in honours and rope_type == "yarn":
        parameters.pop("max_position_embeddings", None)  # a copy of the model's
        if "llama_4_scaling_beta" in parameters:
            own["llama_4_scaling_beta"] = parameters.pop("llama_4_scaling_beta")
            _check_number("llama_4_scaling_beta", own["llama_4_scaling_beta"])
    theta = parameters.pop("rope_theta", hf_config.get("rope_theta") or DEFAULT_THETA)
    required, optional = _ROPE_KEYS[rope_type]
    if missing := required - parameters.keys():
        raise ModelLoadError(f"rope type {rope_type!r} lacks {', '.join(sorted(missing))}")
    if unknown := parameters.keys() - required - optional:
        raise ModelLoadError(f"rope type {rope_type!r} does not know {', '.join(sorted(unknown))}")
    for key in sorted(_LISTS & parameters.keys()):
        if not isinstance(parameters[key], list):
            raise ModelLoadError(f"rope parameter {key} must be a list of numbers")
    for key, value in {"rope_theta": theta, **parameters}.items():
        for number in value if key in _LISTS else [value]:
            _check_number(key, number)
    if theta <= 1:
        raise ModelLoadError(f"rope parameter rope_theta must be more than 1, got {theta}")
    if rope_type == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        raise ModelLoadError("rope parameter low_freq_factor must be less than high_freq_factor")
    if rope_type in ("llama3", "yarn", "longrope"):
        # As in transformers, the key beside the rope parameters takes precedence, and the model's
        # own length replaces a missing one.
        original = parameters.get(
            "original_max_position_embeddings", hf_config["max_position_embeddings"]
        )
        key = "original_max_position_embeddings"
        parameters[key] = hf_config.get(key) or original
        _check_number(key, parameters[key])
        if rope_type == "longrope":
            if parameters[key] <= 1:
                raise ModelLoadError(f"rope parameter {key} must be more than 1 for longrope")
            longer = hf_config["max_position_embeddings"] / parameters[key]
            parameters.setdefault("factor", max(longer, LEAST_FACTOR))
    return {"rope_type": rope_type, "rope_theta": theta, **parameters, **own}


def _rotated_part(value: Any, honours: tuple[str, ...]) -> float:
    if "partial_rotary_factor" not in honours:
        raise ModelLoadError("partial_rotary_factor other than 1 is not supported")
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1:
        raise malformed("partial_rotary_factor", "a number from 0 to 1", value)
    return value
