"""Implements linear layers with int8 and int4 weights, and embedding look-ups in such weights.

Must not know: models, requests.

kernels/reference/quantized.py specifies the arithmetic in torch. The reasons for it:

- Weights have one scale per group along k: int8 in groups of 256 (8.06 bits per weight), int4 in
  groups of 64 (4.5 bits: two halves, each with an integer factor, under one scale, so that a weight
  is also an int8). On the bundled model, int8 raises the perplexity by at most 0.03 % with groups
  of 32 to 256, and int4 raises it less than one scale per 32 weights does (llama.cpp's Q4_0, also
  4.5 bits).
- x is quantized with one scale per token and group, so that the products are integer products. A
  group confines the coarse scale of an outlier. The two fp32 multiplications by scales per group
  cost 1/8 of a group's products with 64 weights and 1/32 with 256.
- Integers are summed exactly, so few rows and many rows may use different instructions, and every
  instruction set gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...registry import register, with_forms
from .calls import Op, Quantize, Step
from .library import library
from .linear import PackedLinear, PackedRows, Release, by_panel
from .tensors import DTYPES, PRIORITY, is_native
from .weights import empty_weight

_PANEL, _DEPTH = 16, 64  # k is padded to a multiple of _DEPTH
_GROUP = {8: 256, 4: 64}
_SCALE_BYTES = {8: 2 * _PANEL, 4: 4 * _PANEL}  # per panel and group


class PackedQuantizedLinear(PackedLinear):
    """A PackedLinear whose weight is quantized; only storage and multiplication differ.

    The bits of a row do not depend on the rows beside it.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        bias: Tensor | None,
        bits: int,
        release: Release | None = None,
    ):
        """Takes what PackedLinear does, for bf16 or fp32 weights."""
        self.bits = bits
        super().__init__(parts, bias, release)

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
        bias: Tensor | None,
        bits: int,
    ) -> PackedQuantizedLinear:
        """Returns the layer with `arrays` of an earlier one, whose weight was [out, in] = shape.
        They are kept and never written to.

        Raises ValueError for arrays of another size.
        """
        layer = cls.__new__(cls)
        layer.bits, layer.dtype, layer.bias = bits, dtype, bias
        layer.out_features, layer.in_features = shape
        layer.weight, layer.scales = arrays["weight"], arrays["scales"]
        for array, expected in zip((layer.weight, layer.scales), layer._array_shapes()):
            if array.dtype != torch.uint8 or tuple(array.shape) != expected:
                raise ValueError(f"an array has shape {list(array.shape)}, not {list(expected)}")
        return layer

    @property
    def arrays(self) -> dict[str, Tensor]:
        """Returns what `from_arrays` takes."""
        return {"weight": self.weight, "scales": self.scales}

    def _array_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        panels = -(-self.out_features // _PANEL)
        depths = -(-self.in_features // _DEPTH)
        groups = -(-self.in_features // _GROUP[self.bits])
        numbers = panels, depths, _PANEL * _DEPTH * self.bits // 8
        return numbers, (panels, groups, _SCALE_BYTES[self.bits])

    def _pack(self, parts: Sequence[Tensor], release: Release | None) -> None:
        self.weight, self.scales = (
            empty_weight(*shape, dtype=torch.uint8) for shape in self._array_shapes()
        )
        for panel, part in by_panel(parts, release):
            call = Quantize(
                op=Op[f"QUANTIZE_INT{self.bits}"],
                dtype=DTYPES[self.dtype],
                rows=0,
                weight=part.data_ptr(),
                packed=self.weight[panel].data_ptr(),
                scales=self.scales[panel].data_ptr(),
                weight_row=part.stride(0),
                in_features=self.in_features,
                out_features=len(part),
            )
            library.run(call, Step())  # at once: this is not part of a model's step

    @property
    def parts(self) -> list[PackedRows]:
        sizes = self.out_features, self.in_features
        return [PackedRows(f"INT{self.bits}", *sizes, self.weight, self.scales)]


@register("pack_quantized_linear", name="native", predicate=is_native, priority=PRIORITY)
@with_forms(from_parts=PackedQuantizedLinear, from_arrays=PackedQuantizedLinear.from_arrays)
def pack_quantized_linear(weight: Tensor, bias: Tensor | None, bits: int) -> PackedQuantizedLinear:
    return PackedQuantizedLinear([weight], bias, bits)
