"""What config.json says about the mixers of Mamba 2, and the names and shapes of their tensors.

Must not know: tensors' values, layers, how any of it is computed, which architectures there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from ..errors import ModelLoadError
from .config_values import integer, malformed
from .state_layout import StatePart

MOST_OF_A_MIXER = 65_536  # of heads, groups and features of a head; far above any model
MOST_TAPS = 64  # of a convolution
LEAST_FACTOR, MOST_FACTOR = 1e-6, 1e6
# The parts of what the input projection gives, in the order of its rows.
PARTS = ("z", "x", "B", "C", "dt")
_INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it
ONES = (1.0,) * len(PARTS)


class Mamba2Config(msgspec.Struct, frozen=True):
    """Sizes are counts of heads, groups, features or tokens."""

    num_heads: int
    head_dim: int
    state_size: int  # of each feature of a head
    num_groups: int  # of heads that share B and C
    kernel_size: int  # of the convolution, in tokens
    eps: float  # of the norm
    has_conv_bias: bool = True
    has_in_bias: bool = False
    has_out_bias: bool = False
    has_norm: bool = True
    # The gate multiplies the norm's input; else, its result.
    gate_first: bool = True
    part_scales: tuple[float, ...] = ONES  # factors of PARTS, behind the input projection
    out_scale: float = 1.0  # factor of what the mixer returns

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """The rows of PARTS in the input projection."""
        of_groups = self.num_groups * self.state_size
        return self.inner_size, self.inner_size, of_groups, of_groups, self.num_heads

    @property
    def conv_size(self) -> int:
        """The channels of the convolution, which x, B and C pass."""
        return sum(self.part_sizes[1:4])

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """The convolution's last inputs, and the state of the recurrence."""
        return (
            StatePart((self.kernel_size - 1, self.conv_size), False),
            StatePart((self.num_heads, self.head_dim, self.state_size), True),
        )

    def linear_shapes(self, hidden_size: int) -> list[tuple[int, int]]:
        """(rows, columns) of the linear layers."""
        return [(sum(self.part_sizes), hidden_size), (hidden_size, self.inner_size)]

    def weight_shapes(self, hidden_size: int) -> Iterator[tuple[str, list[int]]]:
        """Name and shape of every tensor of a mixer."""
        rows, channels = sum(self.part_sizes), self.conv_size
        yield "in_proj.weight", [rows, hidden_size]
        if self.has_in_bias:
            yield "in_proj.bias", [rows]
        yield "conv1d.weight", [channels, 1, self.kernel_size]
        if self.has_conv_bias:
            yield "conv1d.bias", [channels]
        for name in ("A_log", "D", "dt_bias"):
            yield name, [self.num_heads]
        if self.has_norm:
            yield "norm.weight", [self.inner_size]
        yield "out_proj.weight", [hidden_size, self.inner_size]
        if self.has_out_bias:
            yield "out_proj.bias", [hidden_size]

    def divided(self) -> dict[str, int]:
        """See MixerConfig."""
        return {"heads of Mamba 2": self.num_heads}

    def shared(self) -> dict[str, int]:
        """See MixerConfig."""
        return {"groups of Mamba 2": self.num_groups}

    def of_rank(self, size: int) -> Mamba2Config:
        """See MixerConfig."""
        heads, groups = self.num_heads // size, max(1, self.num_groups // size)
        return replace(self, num_heads=heads, num_groups=groups)


class Mamba2Format(msgspec.Struct, frozen=True):
    """The keys of config.json that an architecture has for its mixers. None: it has no such key.

    `inner_size`: of the heads together, for a head_dim that is "auto". `expand`: the same divided
    by hidden_size. `norm_before_gate` and `has_norm` default to what all but Falcon-H1 do.
    """

    num_heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    state_size: str = "mamba_d_state"
    num_groups: str = "mamba_n_groups"
    kernel_size: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"
    in_bias: str = "mamba_proj_bias"
    out_bias: str = "mamba_proj_bias"
    expand: str = "mamba_expand"
    eps: str = "rms_norm_eps"
    inner_size: str | None = None
    has_norm: str | None = None
    norm_before_gate: str | None = None
    part_scales: str | None = None
    in_scale: str | None = None
    out_scale: str | None = None

    def keys(self) -> frozenset[str]:
        """All keys that this architecture's mixers have."""
        names = (getattr(self, name) for name in self.__struct_fields__)
        return frozenset(name for name in names if name is not None)

    def parse(self, hf_config: dict[str, Any]) -> Mamba2Config:
        """Raises ModelLoadError, naming the key, for one that is missing or out of range."""

        def size(key: str, most: int = MOST_OF_A_MIXER, least: int = 1) -> int:
            return integer(key, hf_config.get(key), most, least)

        def switch(key: str | None, default: bool) -> bool:
            return default if key is None else _switch(hf_config, key)

        def factor(key: str | None) -> float:
            return 1.0 if key is None else read_factor(hf_config, key)

        _check_time_step(hf_config)
        num_heads, num_groups = size(self.num_heads), size(self.num_groups)
        if num_heads % num_groups:
            raise ModelLoadError(
                f"config.json: {self.num_heads}={num_heads} is not a multiple of "
                f"{self.num_groups}={num_groups}"
            )
        has_in_bias = switch(self.in_bias, False)
        in_scale = factor(self.in_scale)
        if has_in_bias and in_scale != 1.0:  # the bias would have to be left out of the factor
            raise ModelLoadError(
                f"config.json: {self.in_scale}={in_scale} is not supported beside {self.in_bias}"
            )
        scales = ONES
        if self.part_scales is not None:
            scales = read_factors(hf_config, self.part_scales, PARTS)
        return Mamba2Config(
            num_heads=num_heads,
            head_dim=self._head_dim(hf_config, num_heads),
            state_size=size(self.state_size),
            num_groups=num_groups,
            kernel_size=size(self.kernel_size, MOST_TAPS, 2),
            eps=_epsilon(hf_config, self.eps),
            has_conv_bias=switch(self.conv_bias, True),
            has_in_bias=has_in_bias,
            has_out_bias=switch(self.out_bias, False),
            has_norm=switch(self.has_norm, True),
            gate_first=not switch(self.norm_before_gate, False),
            part_scales=tuple(in_scale * scale for scale in scales),
            out_scale=factor(self.out_scale),
        )

    def _head_dim(self, hf_config: dict[str, Any], num_heads: int) -> int:
        given = hf_config.get(self.head_dim)
        if given != "auto":
            return integer(self.head_dim, given, MOST_OF_A_MIXER)
        inner = hf_config.get(self.inner_size) if self.inner_size is not None else None
        if inner is None:
            expand = hf_config.get(self.expand)
            if not isinstance(expand, (int, float)) or not 0 < expand <= MOST_OF_A_MIXER:
                raise malformed(self.expand, f"a number up to {MOST_OF_A_MIXER:,}", expand)
            inner = int(expand * integer("hidden_size", hf_config.get("hidden_size")))
        key = self.inner_size or self.expand
        if integer(key, inner) % num_heads:
            raise ModelLoadError(
                f"config.json: the {inner} features of {key} are not a multiple of "
                f"{self.num_heads}={num_heads}"
            )
        return integer(self.head_dim, inner // num_heads, MOST_OF_A_MIXER)


MAMBA_FORMAT = Mamba2Format()  # of Granite and Bamba
FALCON_FORMAT = Mamba2Format(
    out_bias="projectors_bias",
    inner_size="mamba_d_ssm",
    has_norm="mamba_rms_norm",
    norm_before_gate="mamba_norm_before_gate",
    part_scales="ssm_multipliers",
    in_scale="ssm_in_multiplier",
    out_scale="ssm_out_multiplier",
)
MAMBA2_FORMAT = Mamba2Format(
    num_heads="num_heads",
    head_dim="head_dim",
    state_size="state_size",
    num_groups="n_groups",
    kernel_size="conv_kernel",
    conv_bias="use_conv_bias",
    in_bias="use_bias",
    out_bias="use_bias",
    expand="expand",
    eps="layer_norm_epsilon",
)
NEMOTRON_FORMAT = Mamba2Format(
    num_heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    state_size="ssm_state_size",
    num_groups="n_groups",
    kernel_size="conv_kernel",
    conv_bias="use_conv_bias",
    in_bias="use_bias",
    out_bias="use_bias",
    expand="expand",
    eps="layer_norm_epsilon",
)
# Keys that change nothing here: how transformers computes, and how a model was initialised. It
# raises steps to time_step_min in prefill, but not while it decodes; no other engine does, nor do
# the models' own kernels. The residual stream is of the model's dtype, whatever residual_in_fp32
# says. norm_before_gate of Mamba 2 is not read by transformers, whose gate is always first.
HARMLESS_KEYS = frozenset(
    {
        *("chunk_size", "mamba_chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype"),
        *("time_step_min", "time_step_max", "time_step_floor", "time_step_rank"),
        *("mamba_dt_min", "mamba_dt_max", "mamba_dt_init_floor", "rescale_prenorm_residual"),
        *("num_logits_to_keep", "z_loss_coefficient", "residual_in_fp32"),
        *("moe_shared_expert_overlap", "num_nextn_predict_layers", "mtp_layers_block_type"),
        *("mtp_hybrid_override_pattern", "norm_eps", "norm_before_gate", "rms_norm", "init_method"),
        *("time_step_init_scheme", "time_step_scale", "mamba_use_mlp", "mlp_expansion_factor"),
    }
)
MAMBA_KEYS = HARMLESS_KEYS.union(
    {"time_step_limit", "mamba_hidden_act"},
    *(form.keys() for form in (MAMBA_FORMAT, FALCON_FORMAT, MAMBA2_FORMAT, NEMOTRON_FORMAT)),
)


def _check_time_step(hf_config: dict[str, Any]) -> None:
    """Refuses limits of steps, which transformers applies in prefill alone, and activations of the
    convolution other than SiLU.
    """
    limits = hf_config.get("time_step_limit")
    unlimited = ((0.0, math.inf), (0.0, _INFINITY))
    if limits is not None and tuple(limits) not in unlimited:
        raise malformed("time_step_limit", "[0.0, Infinity]", limits)
    activation = hf_config.get("mamba_hidden_act")
    if activation not in (None, "silu", "swish"):
        raise malformed("mamba_hidden_act", "'silu'", activation)


def _switch(hf_config: dict[str, Any], key: str) -> bool:
    value = hf_config.get(key)
    if value not in (None, False, True):
        raise malformed(key, "true or false", value)
    return bool(value)


def _epsilon(hf_config: dict[str, Any], key: str) -> float:
    value = hf_config.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
        raise malformed(key, "a number from 0 to 1", value)
    return value


def read_factor(hf_config: dict[str, Any], key: str) -> float:
    """A factor, 1 where config.json has none. Raises ModelLoadError, naming the key."""
    value = hf_config.get(key)
    return 1.0 if value is None else _checked_factor(key, value)


def read_factors(hf_config: dict[str, Any], key: str, names: tuple[str, ...]) -> tuple[float, ...]:
    """The factors of these names, as read_factor."""
    values = hf_config.get(key)
    if values is None:
        return (1.0,) * len(names)
    if not isinstance(values, (list, tuple)) or len(values) != len(names):
        raise malformed(key, f"a list of {len(names)} numbers, of {', '.join(names)}", values)
    return tuple(_checked_factor(key, value) for value in values)


def _checked_factor(key: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not LEAST_FACTOR <= value <= MOST_FACTOR:
        raise malformed(key, f"a number from {LEAST_FACTOR} to {MOST_FACTOR}", value)
    return float(value)
