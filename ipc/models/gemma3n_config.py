"""What config.json says about the layers of Gemma 3n beyond what all decoders have: streams beside
the residual one, the low-rank part of its residual connections, widths and sparsity by layer.

Must not know: tensors, how any of it is computed.
"""

from __future__ import annotations

from typing import Any

from ..errors import ModelLoadError
from .config_values import MOST_OF_A_SIZE, integer, malformed
from .decoder_config import AltUp, LayerConfig, PerLayerInputs
from .gemma_config import key_owners
from .rope_config import FULL, SLIDING

# transformers' defaults, where config.json lacks the key
_CAPS = {"final_logit_softcapping": 30.0}
_PATTERN, _NUM_SPARSE, _SPARSITY = 5, 10, 0.95
MOST_STREAMS = 16  # of kernels/altup.py


def gemma3n_keys(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The config.json with the keys that all decoders have, in their forms. Null is no cap of
    logits. transformers reads no scale of attention.

    Raises ModelLoadError, naming the key, for one that is malformed.
    """
    num_layers = integer("num_hidden_layers", hf_config.get("num_hidden_layers"))
    own: dict[str, Any] = {"query_pre_attn_scalar": None}
    if not hf_config.get("layer_types"):
        own["layer_types"] = [
            FULL if (i + 1) % _PATTERN == 0 else SLIDING for i in range(num_layers)
        ]
    own["intermediate_size"] = max(_widths(hf_config, num_layers))
    return _CAPS | hf_config | own


def gemma3n_fields(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Fields of DecoderConfig."""
    hf_config = hf_config | {"layer_types": gemma3n_keys(hf_config)["layer_types"]}
    num_layers = hf_config["num_hidden_layers"]
    owners, widths = key_owners(hf_config), _widths(hf_config, num_layers)
    layers = (
        LayerConfig(kv_from=owner, intermediate_size=width, sparsity=sparsity)
        for owner, width, sparsity in zip(owners, widths, _sparsity(hf_config, num_layers))
    )
    size, known = (
        integer(key, hf_config.get(key))
        for key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
    )
    return {
        "layers": tuple(layers),
        "per_layer_inputs": PerLayerInputs(size, known),
        "altup": _altup(hf_config),
    }


def _altup(hf_config: dict[str, Any]) -> AltUp:
    count = integer("altup_num_inputs", hf_config.get("altup_num_inputs"), MOST_STREAMS, least=2)
    scales = hf_config["altup_correct_scale"]
    if not isinstance(scales, bool):
        raise malformed("altup_correct_scale", "true or false", scales)
    return AltUp(
        num_streams=count,
        active=integer("altup_active_idx", hf_config.get("altup_active_idx"), count - 1, least=0),
        scales_corrected=scales,
        laurel_rank=integer("laurel_rank", hf_config.get("laurel_rank")),
    )


def _widths(hf_config: dict[str, Any], num_layers: int) -> list[int]:
    """The width of each layer's MLP."""
    given = hf_config.get("intermediate_size")
    if not isinstance(given, list):
        return [integer("intermediate_size", given)] * num_layers
    if len(given) != num_layers:
        raise malformed("intermediate_size", f"an integer, or a list of {num_layers}", given)
    return [integer("intermediate_size", width, MOST_OF_A_SIZE) for width in given]


def _sparsity(hf_config: dict[str, Any], num_layers: int) -> list[float]:
    """The part of each layer's activations that its MLP drops; 0: it drops none."""
    given = hf_config.get("activation_sparsity_pattern")
    if given is None:
        num_sparse = _NUM_SPARSE if num_layers > _NUM_SPARSE else 0
        return [_SPARSITY] * num_sparse + [0.0] * (num_layers - num_sparse)
    if not isinstance(given, list) or len(given) != num_layers:
        raise malformed("activation_sparsity_pattern", f"a list of {num_layers} entries", given)
    for one in given:
        if not isinstance(one, (int, float)) or isinstance(one, bool) or not 0 <= one < 1:
            raise ModelLoadError(
                "config.json: activation_sparsity_pattern must have numbers from 0 to below 1, "
                f"got {one!r:.100}"
            )
    return [float(one) for one in given]
