"""What a vision tower and its projector consist of: sizes, kinds of layers, and the names and
shapes of their tensors.

Must not know: families of models (vision_families.py), config.json, tensors' values, layers.

    image ─▶ patches ─▶ patch projection + positions ─▶ layers ─▶ final norm ─▶ projector ─▶ rows

A name lacks its ending ".weight" or ".bias"; in a layer, {} stands for its index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

import msgspec

Shapes = Iterator[tuple[str, list[int]]]

LAYER, RMS = "layer", "rms"  # kinds of norms

# How a patch gets its place in the image. All but AXES make a row for each patch from a table of
# the places in a square, [side * side, hidden_size].
TABLE = "table"  # the table itself: all images have its size
BUCKETS = "buckets"  # the row of the same fraction of the image (Idefics 2)
ALIGNED = "aligned"  # resized bilinearly, corners stay corners (Qwen3-VL)
RESIZED = "resized"  # resized bilinearly, as images are, with antialiasing (SigLIP 2)
AXES = "axes"  # the sum of a row for x and a row for y: [2, side, hidden_size] (Gemma 4)
PAIRS = "pairs"  # the same, from a table [side, 2, hidden_size] (Gemma 4 12B)

# How queries and keys rotate. In each, half of the frequencies belong to the patch's row, and half
# to its column.
ROWS_THEN_COLUMNS = "rows_then_columns"  # of one list of frequencies, each half has all (Qwen)
ALTERNATING = "alternating"  # the even ones are the rows', the odd ones the columns' (Pixtral)
HALVES_OF_HEADS = "halves_of_heads"  # a head's first half by columns, its second by rows (Gemma 4)

JOIN, MEAN = "join", "mean"  # what becomes of the square of patches that a row stands for


class Norm(msgspec.Struct, frozen=True):
    """A norm over the last dimension. A layer norm has a bias. Without a name it has no weight.

    is_fp32: the weight stays fp32 in any dtype of the model, and nothing is rounded before it.
    """

    name: str
    size: int
    eps: float
    kind: str = LAYER
    offset: float = 0.0  # what is added to the weight
    is_fp32: bool = False

    def shapes(self) -> Shapes:
        if self.name:
            yield f"{self.name}.weight", [self.size]
        if self.name and self.kind == LAYER:
            yield f"{self.name}.bias", [self.size]


class Stored(msgspec.Struct, frozen=True):
    """How a file has a weight [out_features, in_features]: in this shape. Its numbers as a tensor
    of shape `view`, whose dimensions are put into the order `dims`, are the weight's.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    view: tuple[int, ...]


class Dense(msgspec.Struct, frozen=True):
    """A linear layer.

    activation: what follows it. is_clipped: four numbers beside it bound its inputs and outputs.
    """

    name: str
    in_features: int
    out_features: int
    has_bias: bool = True
    activation: str = ""
    stored: Stored | None = None
    is_clipped: bool = False

    def shapes(self) -> Shapes:
        shape = [self.out_features, self.in_features]
        yield f"{self.name}.weight", shape if self.stored is None else list(self.stored.shape)
        if self.has_bias:
            yield f"{self.name}.bias", [self.out_features]
        if self.is_clipped:
            yield from ((name, []) for name in self.bounds)

    @property
    def bounds(self) -> list[str]:
        """The names of the least and the largest input and output."""
        block = self.name.rpartition(".")[0]
        return [f"{block}.{end}" for end in ("input_min", "input_max", "output_min", "output_max")]


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of a layer. `qkv`: layers of q, k and v, or one of all three."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qkv: tuple[Dense, ...]
    out: Dense
    q_norm: Norm | None = None  # of each head, or of all heads as one where it is as large
    k_norm: Norm | None = None
    value_norm: Norm | None = None
    rope: str = ""
    rope_theta: float = 10_000.0
    # Patches see those of their window alone, a square of this many rows of the encoder's result;
    # 0: they see all. In these layers they see all in any case.
    window: int = 0
    whole_layers: tuple[int, ...] = ()

    def shapes(self) -> Shapes:
        for part in (*self.qkv, self.out, self.q_norm, self.k_norm):
            if part is not None:
                yield from part.shapes()


class TowerLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer: each block is normed before, may be normed or multiplied by a factor after, and is
    added to its input. `up`: one linear layer, or that of the gate and the other.
    """

    attention: Attention
    attention_norm: Norm
    mlp_norm: Norm
    up: tuple[Dense, ...]
    down: Dense
    activation: str
    attention_after: Norm | None = None
    mlp_after: Norm | None = None
    attention_factor: str = ""  # the names of vectors [hidden_size]
    mlp_factor: str = ""

    def shapes(self) -> Shapes:
        norms = self.attention_norm, self.attention_after, self.mlp_norm, self.mlp_after
        for part in (self.attention, *norms, *self.up, self.down):
            if part is not None:
                yield from part.shapes()
        size = [self.attention_norm.size]
        yield from ((name, size) for name in (self.attention_factor, self.mlp_factor) if name)


class Projector(msgspec.Struct, frozen=True, kw_only=True):
    """Makes rows of the text model's width from patches.

    Patches are normed, joined or averaged, multiplied by `factor`, standardised (shift and scale
    are names of vectors), normed again, and pass linear layers.
    """

    layer: int | None = None  # the layer after which it reads; None: after the final norm
    before: Norm | None = None
    pooling: str = JOIN
    factor: float = 1.0
    shift: str = ""
    scale: str = ""
    after: Norm | None = None
    dense: tuple[Dense, ...] = ()

    def shapes(self) -> Shapes:
        if self.shift:
            size = [self.dense[0].in_features]
            yield from ((name, size) for name in (self.shift, self.scale))
        for part in (self.before, self.after, *self.dense):
            if part is not None:
                yield from part.shapes()


class Tower(msgspec.Struct, frozen=True, kw_only=True):
    """A vision tower with its projectors, of which each makes one vector of a row."""

    hidden_size: int
    num_layers: int
    patch_size: int  # pixels on a side
    frames: int = 1  # how often a patch's pixels occur in the input of the patch projection
    merge: int = 1  # patches on each side of the square that a row stands for
    mean: tuple[float, ...]  # of the channels, which are normalised by it and `std`
    std: tuple[float, ...]
    patch: Dense
    positions: str = ""  # "": patches have none
    position_name: str = ""  # with its ending, of a tensor of this shape
    position_shape: tuple[int, ...] = ()
    class_token: str = ""  # of one more token, whose place is the table's first row; with ending
    # before the patch projection, after it, and once the positions are added
    pixel_norm: Norm | None = None
    patch_norm: Norm | None = None
    first_norm: Norm | None = None
    layer: TowerLayer | None = None  # None: there are no layers
    final_norm: Norm | None = None
    projectors: tuple[Projector, ...]

    @property
    def unit(self) -> int:
        """Pixels on each side of the square that a row stands for."""
        return self.patch_size * self.merge

    def largest_side(self, num_rows: int) -> int:
        """Pixels on each side of the largest square image that the positions allow, with at most
        `num_rows` rows where they allow any size.
        """
        side = max(1, math.isqrt(num_rows)) * self.merge
        if self.positions == TABLE:
            side = math.isqrt(math.prod(self.position_shape[:-1]))
        elif self.positions == AXES:
            side = min(side, self.position_shape[1])
        elif self.positions == PAIRS:
            side = min(side, self.position_shape[0])
        return side // self.merge * self.unit

    def weight_shapes(self) -> dict[str, list[int]]:
        """The shape of every tensor that a checkpoint must hold, by name."""
        norms = self.pixel_norm, self.patch_norm, self.first_norm, self.final_norm
        ends = [self.patch, *(norm for norm in norms if norm is not None), *self.projectors]
        shapes = dict(chain.from_iterable(part.shapes() for part in ends))
        if self.positions:
            shapes[self.position_name] = list(self.position_shape)
        if self.class_token:
            shapes[self.class_token] = [1, 1, self.hidden_size]
        layer = [] if self.layer is None else list(self.layer.shapes())
        for index in range(self.num_layers):
            shapes |= {name.format(index): shape for name, shape in layer}
        return shapes

    def linear_shapes(self) -> list[tuple[int, int]]:
        """(rows, columns) of the layers that follow `quantization`, as they are merged. Those whose
        weight files have in another order, and the patch projection, keep the dtype.
        """
        denses = [[one] for projector in self.projectors for one in projector.dense]
        if self.layer is not None:
            own = self.layer.attention
            blocks = [[*own.qkv], [own.out], [*self.layer.up], [self.layer.down]]
            if own.out.is_clipped:  # bounds of their own keep layers apart
                blocks = [[one] for block in blocks for one in block]
            denses += blocks * self.num_layers
        return [
            (sum(one.out_features for one in block), block[0].in_features)
            for block in denses
            if block[0].stored is None
        ]

    @property
    def num_fp32(self) -> int:
        """How many numbers are fp32 in every dtype of the model."""
        count = 0
        ends = self.pixel_norm, self.patch_norm, self.first_norm, self.final_norm
        norms = [*ends, *(norm for one in self.projectors for norm in (one.before, one.after))]
        count += sum(2 * one.dense[0].in_features for one in self.projectors if one.shift)
        if (layer := self.layer) is not None:
            own = layer.attention
            inside = layer.attention_norm, layer.attention_after, layer.mlp_norm, layer.mlp_after
            norms += [*inside, own.q_norm, own.k_norm] * self.num_layers
            denses = *own.qkv, own.out, *layer.up, layer.down
            count += self.num_layers * sum(4 for one in denses if one.is_clipped)
        return count + sum(one.size for one in norms if one and one.is_fp32 and one.name)
