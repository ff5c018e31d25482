"""What config.json says of ERNIE 4.5 beside what all decoders have: one switch for all biases, and
names of its own for a mixture of experts.

Must not know: tensors, layers, how any of it is computed.
"""

from __future__ import annotations

from typing import Any

from ..errors import ModelLoadError
from .config_values import integer

Keys = dict[str, Any]


def ernie_keys(hf_config: Keys) -> Keys:
    """The two switches of biases that other decoders have."""
    use_bias = hf_config.get("use_bias")
    return hf_config | {"attention_bias": use_bias, "mlp_bias": use_bias}


def ernie_moe_keys(hf_config: Keys) -> Keys:
    """The keys of other mixtures of experts. Raises ModelLoadError for biases."""
    if (use_bias := hf_config.get("use_bias")) not in (None, False):
        raise ModelLoadError(
            f"config.json: use_bias={use_bias!r:.100} is not supported; supported: False"
        )
    return hf_config | {
        "num_experts": hf_config.get("moe_num_experts"),
        "num_experts_per_tok": hf_config.get("moe_k"),
    }


def ernie_dense_layers(hf_config: Keys) -> tuple[int, ...]:
    """The layers that have an MLP: those before the first and after the last with experts, and all
    but every moe_layer_interval-th between them. An end of -1 is the last layer.
    """
    num_layers = hf_config["num_hidden_layers"]
    start, every = (
        integer(key, hf_config.get(key), least=least)
        for key, least in (("moe_layer_start_index", 0), ("moe_layer_interval", 1))
    )
    end = integer("moe_layer_end_index", hf_config.get("moe_layer_end_index"), least=-1)
    end = num_layers - 1 if end == -1 else end
    return tuple(i for i in range(num_layers) if not start <= i <= end or (i + 1) % every)
