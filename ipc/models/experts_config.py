"""What config.json says about a mixture of experts, and the names of its tensors.

Must not know: tensors' values, layers, how any of it is computed, which architectures there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from .config_values import integer, malformed

MOST_EXPERTS = 65_536
# Keys that give the number of experts; a model has one of them.
_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_LEAST_SCALE, _MOST_SCALE = 1e-6, 1e6


class ExpertsConfig(msgspec.Struct, frozen=True):
    """Sizes are counts of experts or features."""

    count: int
    per_token: int
    size: int  # inner size of an expert
    renormalizes: bool  # the weights of a token's experts add up to `scale`
    names: ExpertsFormat
    shared_size: int = 0  # inner size of the expert that all tokens share; 0: there is none
    dense_layers: tuple[int, ...] = ()  # that have an MLP instead
    # scale and limit of a clamped SwiGLU (kernels/moe.py), in place of the config's activation
    clamped_swiglu: tuple[float, float] | None = None
    scale: float = 1.0  # factor of the experts' weights
    num_groups: int = 1  # of experts
    top_groups: int = 1  # that take part, for each token
    latent_size: int = 0  # of what experts read and return; 0: the model's hidden_size


class ExpertsFormat(msgspec.Struct, frozen=True):
    """How an architecture writes its experts: keys of config.json, names of tensors.

    `size`: the key of an expert's inner size. `renormalizes`: None follows norm_topk_prob.
    `block`: the name of the layer's part; "": its parts stand in the layer itself. `router`,
    `experts`, `shared` and `shared_gate`: names within the block; `gate`, `up` and `down`: within
    an expert. `gate` is None for experts that have no gate. `has_biases`: of the router and of the
    experts.

    `shared_size` and `num_shared`: the keys of the shared expert's inner size, and of what it is
    multiplied by. `shared_gate` None: the result of the shared expert is added as it is.

    `scoring` and `correction`, the name of the bias, are those of route_experts (kernels/moe.py).
    `has_correction_row`: the bias is stored as a matrix of one row.
    `scale`, `num_groups`, `top_groups` and `latent_size` are keys of the fields of ExpertsConfig.
    `grouped`: a key and the value with which experts have groups; None: they always have them.
    `dense_layers` reads these layers from config.json. `is_optional`: a number of 0 means that no
    layer has experts. `is_beside_mlp`: a layer with experts also has a gated MLP, and norms of its
    own for both (Gemma 4).
    """

    size: str = "intermediate_size"
    renormalizes: bool | None = None
    shared_size: str | None = None
    num_shared: str | None = None
    dense_layers: Callable[[dict[str, Any]], tuple[int, ...]] | None = None
    has_biases: bool = False
    is_clamped: bool = False  # swiglu_alpha and swiglu_limit are those of a clamped SwiGLU
    is_optional: bool = False
    is_beside_mlp: bool = False
    scoring: str = "softmax"
    correction: str | None = None
    has_correction_row: bool = False
    scale: str | None = None
    num_groups: str | None = None
    top_groups: str | None = None
    latent_size: str | None = None
    group_best: int = 2  # as in route_experts
    added: float = 1e-20  # to the sum of a token's scores, as in route_experts
    grouped: tuple[str, str] | None = None
    block: str = "mlp"
    router: str = "gate"
    experts: str = "experts"
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    shared_gate: str | None = "shared_expert_gate"
    latent_in: str = "fc1_latent_proj"
    latent_out: str = "fc2_latent_proj"

    def parse(self, hf_config: dict[str, Any]) -> ExpertsConfig | None:
        """Returns None for a model without experts. Raises ModelLoadError, naming the key, for one
        that is missing or out of range.
        """
        count_key = next((k for k in _COUNT_KEYS if hf_config.get(k) is not None), _COUNT_KEYS[0])
        if self.is_optional and hf_config.get(count_key) == 0:
            return None
        count = integer(count_key, hf_config.get(count_key), MOST_EXPERTS)
        normalizes = hf_config.get("norm_topk_prob", False)
        if normalizes not in (False, True):
            raise malformed("norm_topk_prob", "true or false", normalizes)
        num_groups, top_groups = self._groups(hf_config, count)
        return ExpertsConfig(
            count,
            integer("num_experts_per_tok", hf_config.get("num_experts_per_tok"), count),
            integer(self.size, hf_config.get(self.size)),
            bool(normalizes) if self.renormalizes is None else self.renormalizes,
            self,
            self._shared_size(hf_config),
            () if self.dense_layers is None else self.dense_layers(hf_config),
            (_positive(hf_config, "swiglu_alpha"), _positive(hf_config, "swiglu_limit"))
            if self.is_clamped
            else None,
            1.0 if self.scale is None else _positive(hf_config, self.scale),
            num_groups,
            top_groups,
            _optional_size(hf_config, self.latent_size),
        )

    def _shared_size(self, hf_config: dict[str, Any]) -> int:
        if self.shared_size is None:
            return 0
        size = integer(self.shared_size, hf_config.get(self.shared_size))
        if self.num_shared is None:
            return size
        return size * integer(self.num_shared, hf_config.get(self.num_shared), MOST_EXPERTS, 0)

    def _groups(self, hf_config: dict[str, Any], count: int) -> tuple[int, int]:
        """The number of groups, and of those that take part."""
        if self.num_groups is None or self.top_groups is None:
            return 1, 1
        if self.grouped is not None and hf_config.get(self.grouped[0]) != self.grouped[1]:
            return 1, 1
        num_groups = integer(self.num_groups, hf_config.get(self.num_groups), count)
        if num_groups > 1 and (count % num_groups or count == num_groups):
            wanted = f"a divisor of the {count} experts, for at least 2 in a group"
            raise malformed(self.num_groups, wanted, num_groups)
        return num_groups, integer(self.top_groups, hf_config.get(self.top_groups), num_groups)

    def name_of(self, part: str) -> str:
        """The name of a part of the block within the layer."""
        return f"{self.block}.{part}" if self.block else part

    def correction_shape(self, config: ExpertsConfig) -> list[int]:
        """The shape of the tensor `correction`."""
        return [1, config.count] if self.has_correction_row else [config.count]

    def weight_shapes(
        self, config: ExpertsConfig, hidden_size: int
    ) -> Iterator[tuple[str, list[int]]]:
        """Name and shape of every tensor of a layer's experts, but for the shared one's MLP."""
        biased, size, width = {self.router: config.count}, config.size, hidden_size
        yield self.name_of(f"{self.router}.weight"), [config.count, hidden_size]
        if self.correction is not None:
            yield self.name_of(self.correction), self.correction_shape(config)
        if config.latent_size:
            width = config.latent_size
            yield self.name_of(f"{self.latent_in}.weight"), [width, hidden_size]
            yield self.name_of(f"{self.latent_out}.weight"), [hidden_size, width]
        inputs = [self.up] if self.gate is None else [self.gate, self.up]
        for expert in range(config.count):
            for name, shape in (
                *((name, [size, width]) for name in inputs),
                (self.down, [width, size]),
            ):
                name = f"{self.experts}.{expert}.{name}"
                biased[name] = shape[0]
                yield self.name_of(f"{name}.weight"), shape
        if self.has_biases:
            yield from ((self.name_of(f"{name}.bias"), [rows]) for name, rows in biased.items())
        if config.shared_size and self.shared_gate is not None:
            yield self.name_of(f"{self.shared_gate}.weight"), [1, hidden_size]


def sparse_steps(hf_config: dict[str, Any]) -> tuple[int, ...]:
    """The layers of mlp_only_layers, and all but every decoder_sparse_step-th (Qwen)."""
    num_layers, listed = hf_config["num_hidden_layers"], hf_config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(i, int) for i in listed):
        raise malformed("mlp_only_layers", "a list of layers", listed)
    every = integer("decoder_sparse_step", hf_config.get("decoder_sparse_step", 1))
    return tuple(i for i in range(num_layers) if i in listed or (i + 1) % every)


def first_layers(key: str) -> Callable[[dict[str, Any]], tuple[int, ...]]:
    """Reads the number of layers before the first one with experts from a key of config.json."""

    def read(hf_config: dict[str, Any]) -> tuple[int, ...]:
        return tuple(range(integer(key, hf_config.get(key), hf_config["num_hidden_layers"], 0)))

    return read


def _optional_size(hf_config: dict[str, Any], key: str | None) -> int:
    given = None if key is None else hf_config.get(key)
    return 0 if key is None or given is None else integer(key, given)


def _positive(hf_config: dict[str, Any], key: str) -> float:
    value = hf_config.get(key)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is None or not is_number or not _LEAST_SCALE <= value <= _MOST_SCALE:
        raise malformed(key, "a number above 0, at most 1,000,000", value)
    return float(value)
