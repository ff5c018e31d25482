"""Linear layers with int8 and int4 weights, and embedding look-ups in such weights.

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

from ...registry import register
from .calls import EmbeddingInt8, Epilogue, Op, Quantize, QuantizedLinear, Step
from .library import library
from .linear import PackedLinear, Release, by_panel
from .program import empty, num_rows, submit
from .tensors import DTYPES, PRIORITY, as_matrix, is_native
from .weights import empty_weight

_PANEL, _DEPTH = 16, 64  # k is padded to a multiple of _DEPTH
_GROUP = {8: 256, 4: 64}
_SCALE_BYTES = {8: 2 * _PANEL, 4: 4 * _PANEL}  # per panel and group
_QUANTIZE = {8: Op.QUANTIZE_INT8, 4: Op.QUANTIZE_INT4}
_LINEAR = {8: Op.LINEAR_INT8, 4: Op.LINEAR_INT4}


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
        """As PackedLinear, for bf16 or fp32 weights."""
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
        """The layer with `arrays` of an earlier one, whose weight was [out, in] = shape. They are
        kept and never written to.

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
        """What `from_arrays` takes."""
        return {"weight": self.weight, "scales": self.scales}

    def _array_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        panels, depths, groups = (
            -(-self.out_features // _PANEL),
            -(-self.in_features // _DEPTH),
            -(-self.in_features // _GROUP[self.bits]),
        )
        numbers = panels, depths, _PANEL * _DEPTH * self.bits // 8
        return numbers, (panels, groups, _SCALE_BYTES[self.bits])

    def _pack(self, parts: Sequence[Tensor], release: Release | None) -> None:
        self.weight, self.scales = (
            empty_weight(*shape, dtype=torch.uint8) for shape in self._array_shapes()
        )
        for panel, part in by_panel(parts, release):
            call = Quantize(
                _QUANTIZE[self.bits],
                DTYPES[self.dtype],
                0,
                part.data_ptr(),
                self.weight[panel].data_ptr(),
                self.scales[panel].data_ptr(),
                part.stride(0),
                self.in_features,
                len(part),
            )
            library.run(call, Step())  # at once: this is not part of a model's step

    def embedding(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, in]: rows of the quantized weight, rounded to its dtype. 8 bits only."""
        if token_ids.dtype != torch.int32:
            token_ids = token_ids.int()
        out = empty(len(token_ids), self.in_features, dtype=self.dtype)
        call = EmbeddingInt8(
            Op.EMBEDDING_INT8,
            DTYPES[self.dtype],
            num_rows(token_ids),
            self.weight.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            self.out_features,
            self.in_features,
            scales=self.scales.data_ptr(),
        )
        submit(call, Step(token_ids=token_ids.data_ptr()))
        return out

    def _multiply(
        self, x: Tensor, columns: int, epilogue: Epilogue, out_dtype: torch.dtype
    ) -> Tensor:
        x = as_matrix(x)
        out = empty(x.shape[0], columns, dtype=out_dtype)
        call = QuantizedLinear(
            _LINEAR[self.bits],
            DTYPES[x.dtype],
            num_rows(x),
            x.data_ptr(),
            self.weight.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            x.stride(0),
            columns,
            self.in_features,
            self.out_features,
            epilogue,
            DTYPES[out_dtype],
            scales=self.scales.data_ptr(),
        )
        submit(call)
        return out


@register("pack_quantized_linear", name="native", predicate=is_native, priority=PRIORITY)
def pack_quantized_linear(weight: Tensor, bias: Tensor | None, bits: int) -> PackedQuantizedLinear:
    return PackedQuantizedLinear([weight], bias, bits)


pack_quantized_linear.from_parts = PackedQuantizedLinear
pack_quantized_linear.from_arrays = PackedQuantizedLinear.from_arrays
