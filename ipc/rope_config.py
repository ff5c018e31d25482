"""Parses the rotary position embedding of a config.json, and the longest sequence that it allows.

Must not know: tensors, layers, how an angle is computed, which architectures there are.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from .errors import ModelLoadError

_ROPE_KEYS = {  # by type: required, optional
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, {"original_max_position_embeddings"}),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor"},
        {"original_max_position_embeddings"},
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
    }
)
DEFAULT_THETA = 10000.0
LAYER_KINDS = ("full_attention", "sliding_attention")  # that may have parameters of their own
# Keys of config.json that give the longest sequence of the model; the smallest one present counts.
CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
)
# max_position_embeddings is the length after scaling, or, for "dynamic", the length up to which no
# scaling takes place. Beyond it the angles of "dynamic" depend on the current length of a sequence,
# so that cached keys would be wrong; Quire does not exceed it.
_NOT_LENGTHENED = frozenset({"default", "llama3", "longrope", "su", "mrope", "dynamic", "factors"})


def model_context(hf_config: dict[str, Any]) -> int | None:
    """Longest sequence in tokens, including rope scaling; None if config.json does not say.

    Configuration, plan and model all use this length. As in vLLM, except for "dynamic". Raises
    ModelLoadError, naming the key, for an invalid length or factor.
    """
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
    return rope_type, parameters


def _by_kind(hf_config: dict[str, Any]) -> bool:
    """Whether layers with and without a window have rope parameters of their own."""
    given = hf_config.get("rope_parameters")
    return isinstance(given, dict) and any(kind in given for kind in LAYER_KINDS)


def _rope_of_full_layers(hf_config: dict[str, Any]) -> dict[str, Any]:
    """hf_config with the rope parameters of layers without a window as the only ones."""
    if not _by_kind(hf_config):
        return hf_config
    return hf_config | {"rope_parameters": hf_config["rope_parameters"].get(LAYER_KINDS[0])}


def parse_ropes(
    hf_config: dict[str, Any], head_dim: int, by_kind: bool
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The rope parameters of all layers, or with `by_kind` those of layers without a window and
    those of layers with one; the latter are never scaled by rope_scaling.

    Raises as parse_rope_parameters does, and for factors of another number than head_dim / 2.
    """
    if not by_kind:
        ropes = parse_rope_parameters(hf_config), None
    else:
        own = {"rope_scaling": None, "rope_parameters": None}
        if _by_kind(hf_config):
            own["rope_parameters"] = hf_config["rope_parameters"].get(LAYER_KINDS[1])
        local = {"rope_theta": hf_config.get("rope_local_base_freq")}
        ropes = (
            parse_rope_parameters(_rope_of_full_layers(hf_config)),
            parse_rope_parameters(hf_config | own | local),
        )
    factors = ropes[0].get("factors")
    if factors is not None and len(factors) != head_dim // 2:
        raise ModelLoadError(
            f"config.json: rope parameter factors needs {head_dim // 2} numbers, one for each "
            f"frequency"
        )
    return ropes


def _check_number(key: str, value: Any) -> None:
    if not isinstance(value, (int, float)):
        raise ModelLoadError(f"rope parameter {key} must be a number, got {value!r:.100}")
    if not isfinite(value) or (key in _POSITIVE and value <= 0):
        wanted = "positive and finite" if key in _POSITIVE else "finite"
        raise ModelLoadError(f"rope parameter {key} must be {wanted}, got {value!r:.100}")


def parse_rope_parameters(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the checked rope parameters: rope_type, rope_theta, and the keys of the type.

    Raises ModelLoadError for an unknown type, a missing key, or an unknown key, which could change
    the angles.
    """
    rope_type, parameters = _rope_of(hf_config)
    if rope_type not in _ROPE_KEYS:
        raise ModelLoadError(
            f"rope type {rope_type!r} is not supported; supported: {', '.join(_ROPE_KEYS)}"
        )
    if (
        parameters.pop("partial_rotary_factor", hf_config.get("partial_rotary_factor") or 1.0)
        != 1.0
    ):
        raise ModelLoadError("partial_rotary_factor other than 1 is not supported")
    theta = parameters.pop("rope_theta", hf_config.get("rope_theta") or DEFAULT_THETA)
    required, optional = _ROPE_KEYS[rope_type]
    if missing := required - parameters.keys():
        raise ModelLoadError(f"rope type {rope_type!r} lacks {', '.join(sorted(missing))}")
    if unknown := parameters.keys() - required - optional:
        raise ModelLoadError(f"rope type {rope_type!r} does not know {', '.join(sorted(unknown))}")
    if rope_type == "factors" and not isinstance(parameters["factors"], list):
        raise ModelLoadError("rope parameter factors must be a list of numbers")
    for key, value in {"rope_theta": theta, **parameters}.items():
        for number in value if key == "factors" else [value]:
            _check_number(key, number)
    if theta <= 1:
        raise ModelLoadError(f"rope parameter rope_theta must be more than 1, got {theta}")
    if rope_type == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        raise ModelLoadError("rope parameter low_freq_factor must be less than high_freq_factor")
    if rope_type in ("llama3", "yarn"):
        # As in transformers, the key beside the rope parameters takes precedence, and the model's
        # own length replaces a missing one.
        original = parameters.get(
            "original_max_position_embeddings", hf_config["max_position_embeddings"]
        )
        key = "original_max_position_embeddings"
        parameters[key] = hf_config.get(key) or original
        _check_number(key, parameters[key])
    return {"rope_type": rope_type, "rope_theta": theta, **parameters}
