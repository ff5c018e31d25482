"""What config.json says about a mixture of experts, and the names of its tensors.

Must not know: tensors' values, layers, how any of it is computed, which architectures there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .config_values import integer, malformed

MOST_EXPERTS = 65_536
# Keys that give the number of experts; a model has one of them.
_COUNT_KEYS = ("num_experts", "num_local_experts")
_SHARED_SIZE = "shared_expert_intermediate_size"


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes are counts of experts or features."""

    count: int
    per_token: int
    size: int  # inner size of an expert
    renormalizes: bool  # the weights of a token's experts add up to 1
    names: ExpertsFormat
    shared_size: int = 0  # inner size of the expert that all tokens share; 0: there is none
    dense_layers: tuple[int, ...] = ()  # that have a gated MLP instead
    # scale and limit of a clamped SwiGLU (kernels/moe.py), in place of the config's activation
    clamped_swiglu: tuple[float, float] | None = None


@dataclass(frozen=True)
class ExpertsFormat:
    """How an architecture writes its experts: keys of config.json, names of tensors.

    `size`: the key of an expert's inner size. `renormalizes`: None follows norm_topk_prob.
    `block`: the prefix of the layer's tensors; `gate`, `up` and `down`: names within an expert.
    `has_biases`: of the router and of the experts.
    """

    size: str = "intermediate_size"
    renormalizes: bool | None = None
    has_shared: bool = False
    has_dense_layers: bool = False
    has_biases: bool = False
    is_clamped: bool = False  # swiglu_alpha and swiglu_limit are those of a clamped SwiGLU
    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def parse(self, hf_config: dict[str, Any]) -> ExpertsConfig:
        """Raises ModelLoadError, naming the key, for one that is missing or out of range."""
        count_key = next((k for k in _COUNT_KEYS if hf_config.get(k) is not None), _COUNT_KEYS[0])
        count = integer(count_key, hf_config.get(count_key), MOST_EXPERTS)
        normalizes = hf_config.get("norm_topk_prob", False)
        if normalizes not in (False, True):
            raise malformed("norm_topk_prob", "true or false", normalizes)
        return ExpertsConfig(
            count,
            integer("num_experts_per_tok", hf_config.get("num_experts_per_tok"), count),
            integer(self.size, hf_config.get(self.size)),
            bool(normalizes) if self.renormalizes is None else self.renormalizes,
            self,
            integer(_SHARED_SIZE, hf_config.get(_SHARED_SIZE)) if self.has_shared else 0,
            _dense_layers(hf_config) if self.has_dense_layers else (),
            (_positive(hf_config, "swiglu_alpha"), _positive(hf_config, "swiglu_limit"))
            if self.is_clamped
            else None,
        )

    def weight_shapes(
        self, config: ExpertsConfig, hidden_size: int
    ) -> Iterator[tuple[str, list[int]]]:
        """Name and shape of every tensor of a layer's experts."""
        sizes, size = {self.router: config.count}, config.size
        yield f"{self.block}.{self.router}.weight", [config.count, hidden_size]
        for expert in range(config.count):
            for name, shape in (
                (self.gate, [size, hidden_size]),
                (self.up, [size, hidden_size]),
                (self.down, [hidden_size, size]),
            ):
                sizes[f"experts.{expert}.{name}"] = shape[0]
                yield f"{self.block}.experts.{expert}.{name}.weight", shape
        if self.has_biases:
            yield from ((f"{self.block}.{name}.bias", [rows]) for name, rows in sizes.items())
        if self.has_shared:
            shared = f"{self.block}.shared_expert"
            for name in ("gate_proj", "up_proj"):
                yield f"{shared}.{name}.weight", [config.shared_size, hidden_size]
            yield f"{shared}.down_proj.weight", [hidden_size, config.shared_size]
            yield f"{shared}_gate.weight", [1, hidden_size]


def _dense_layers(hf_config: dict[str, Any]) -> tuple[int, ...]:
    """The layers of mlp_only_layers, and all but every decoder_sparse_step-th."""
    num_layers, listed = hf_config["num_hidden_layers"], hf_config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(i, int) for i in listed):
        raise malformed("mlp_only_layers", "a list of layers", listed)
    every = integer("decoder_sparse_step", hf_config.get("decoder_sparse_step", 1))
    return tuple(i for i in range(num_layers) if i in listed or (i + 1) % every)


def _positive(hf_config: dict[str, Any], key: str) -> float:
    value = hf_config.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1e6:
        raise malformed(key, "a number above 0, at most 1,000,000", value)
    return float(value)
