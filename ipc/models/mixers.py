"""What a recurrent mixer of a decoder's layer is: its sizes, the names and shapes of its tensors,
and what it keeps of a request.

Must not know: torch, files, keys of config.json, which architectures there are.
executor/models/recurrent.py builds the layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec
from msgspec.structs import replace

from .state_layout import StatePart

Shapes = Iterator[tuple[str, list[int]]]  # of tensors, by their name within the mixer


class MixerConfig(Protocol):
    """A frozen struct. Sizes are counts of heads, features or tokens."""

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """What the layer keeps of a request, in the order of its bind_states."""
        ...

    def weight_shapes(self, hidden_size: int) -> Shapes:
        """Name and shape of every tensor of the mixer in a checkpoint."""
        ...

    def linear_shapes(self, hidden_size: int) -> list[tuple[int, int]]:
        """(rows, columns) of the mixer's linear layers, as they are merged."""
        ...

    def divided(self) -> dict[str, int]:
        """What ranks divide among them, by name. Each count has to be a multiple of the number of
        ranks.
        """
        ...

    def shared(self) -> dict[str, int]:
        """What they divide as well, or have in common where it is fewer than ranks, by name. The
        number of ranks may also be a multiple of a count.
        """
        ...

    def of_rank(self, size: int) -> MixerConfig:
        """The sizes that each of `size` ranks has."""
        ...


class GatedDeltaNetConfig(msgspec.Struct, frozen=True):
    """A layer with Gated DeltaNet (Yang et al. 2024), as in Qwen3-Next and Qwen3.5."""

    num_key_heads: int
    num_value_heads: int  # a multiple of num_key_heads
    key_head_dim: int
    value_head_dim: int
    kernel_size: int  # of the convolution
    eps: float  # of the norm
    # The checkpoint has one tensor for queries, keys, values and gates, and one for beta and decay,
    # whose rows are ordered by key head (Qwen3-Next).
    is_by_key_head: bool = False
    # With is_by_key_head: the checkpoint has queries, keys and values in one tensor and gates in
    # another, in the order of other models, as GGUF files have them.
    has_gates_apart: bool = False
    # Value head h belongs to key head h % num_key_heads, as GGUF files have them. Else the value
    # heads of a key head are neighbours.
    is_interleaved: bool = False

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: those of queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """The last inputs of the convolution, and the state of each value head."""
        shape = self.num_value_heads, self.key_head_dim, self.value_head_dim
        return (
            StatePart((self.kernel_size - 1, self.conv_size), is_fp32=False),
            StatePart(shape, is_fp32=True),
        )

    def projections(self) -> tuple[dict[str, int], dict[str, int]]:
        """Name -> rows of the tensors of the two projections of a token."""
        heads = self.num_value_heads
        apart = {"in_proj_qkv": self.conv_size, "in_proj_z": self.value_size}
        if not self.is_by_key_head:
            return apart, {"in_proj_b": heads, "in_proj_a": heads}
        together = {"in_proj_qkvz": self.conv_size + self.value_size}
        return apart if self.has_gates_apart else together, {"in_proj_ba": 2 * heads}

    def weight_shapes(self, hidden_size: int) -> Shapes:
        for projection in self.projections():
            for name, rows in projection.items():
                yield f"{name}.weight", [rows, hidden_size]
        yield "conv1d.weight", [self.conv_size, 1, self.kernel_size]
        yield "A_log", [self.num_value_heads]
        yield "dt_bias", [self.num_value_heads]
        yield "norm.weight", [self.value_head_dim]
        yield "out_proj.weight", [hidden_size, self.value_size]

    def linear_shapes(self, hidden_size: int) -> list[tuple[int, int]]:
        merged = [(sum(one.values()), hidden_size) for one in self.projections()]
        return [*merged, (hidden_size, self.value_size)]

    def divided(self) -> dict[str, int]:
        return {"linear_num_value_heads": self.num_value_heads}

    def shared(self) -> dict[str, int]:
        return {"linear_num_key_heads": self.num_key_heads}

    def of_rank(self, size: int) -> GatedDeltaNetConfig:
        return replace(
            self,
            num_key_heads=max(1, self.num_key_heads // size),
            num_value_heads=self.num_value_heads // size,
        )


class KimiDeltaConfig(msgspec.Struct, frozen=True):
    """A layer with Kimi Delta Attention (Moonshot AI 2025), as in Kimi Linear."""

    num_heads: int
    head_dim: int  # of queries, keys and values
    kernel_size: int  # of the convolutions
    eps: float  # of the norm

    @property
    def size(self) -> int:
        """Features of all heads' queries, of their keys, and of their values."""
        return self.num_heads * self.head_dim

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """The last inputs of the convolutions of queries, keys and values, and the state of each
        head.
        """
        return (
            StatePart((self.kernel_size - 1, 3 * self.size), is_fp32=False),
            StatePart((self.num_heads, self.head_dim, self.head_dim), is_fp32=True),
        )

    def weight_shapes(self, hidden_size: int) -> Shapes:
        size, head_dim = self.size, self.head_dim
        for part in ("q", "k", "v"):
            yield f"{part}_proj.weight", [size, hidden_size]
            yield f"{part}_conv1d.weight", [size, 1, self.kernel_size]
        for part in ("f", "g"):  # of decays and of output gates, in two steps
            yield f"{part}_a_proj.weight", [head_dim, hidden_size]
            yield f"{part}_b_proj.weight", [size, head_dim]
        yield "b_proj.weight", [self.num_heads, hidden_size]
        yield "A_log", [1, 1, self.num_heads, 1]
        yield "dt_bias", [size]
        yield "o_norm.weight", [head_dim]
        yield "o_proj.weight", [hidden_size, size]

    def linear_shapes(self, hidden_size: int) -> list[tuple[int, int]]:
        size, head_dim = self.size, self.head_dim
        inputs = 3 * size, self.num_heads, 2 * head_dim
        second = [(size, head_dim)] * 2
        return [*((rows, hidden_size) for rows in inputs), *second, (hidden_size, size)]

    def divided(self) -> dict[str, int]:
        return {"linear_num_heads": self.num_heads}

    def shared(self) -> dict[str, int]:
        return {}

    def of_rank(self, size: int) -> KimiDeltaConfig:
        return replace(self, num_heads=self.num_heads // size)


class ShortConvConfig(msgspec.Struct, frozen=True):
    """A gated short convolution, as in LFM2."""

    size: int  # the channels: the model's hidden_size, or a rank's part of it
    kernel_size: int
    has_bias: bool = False  # of the convolution and of both projections

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """The last inputs of the convolution."""
        return (StatePart((self.kernel_size - 1, self.size), is_fp32=False),)

    def weight_shapes(self, hidden_size: int) -> Shapes:
        for name, shape in (
            ("in_proj", [3 * hidden_size, hidden_size]),
            ("conv", [hidden_size, 1, self.kernel_size]),
            ("out_proj", [hidden_size, hidden_size]),
        ):
            yield f"{name}.weight", shape
            if self.has_bias:
                yield f"{name}.bias", shape[:1]

    def linear_shapes(self, hidden_size: int) -> list[tuple[int, int]]:
        return [(3 * hidden_size, hidden_size), (hidden_size, hidden_size)]

    def divided(self) -> dict[str, int]:
        return {"hidden_size": self.size}

    def shared(self) -> dict[str, int]:
        return {}

    def of_rank(self, size: int) -> ShortConvConfig:
        return replace(self, size=self.size // size)
