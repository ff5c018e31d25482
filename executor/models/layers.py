"""The layers that models are made of, and the factory that makes every layer with weights.

Must not know: architectures, files, requests. Tensor parallelism, quantization and LoRA belong to
the factory, never to branches in a model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ...ipc.errors import InvalidParameterError, NotEnoughMemoryError
from ...ipc.models.decoder_config import DecoderConfig
from ...ipc.models.encoder_config import EncoderConfig
from ...ipc.models.expert_parallel import NAME, experts_of
from ...ipc.models.gguf_weights import MEMORY_TYPES
from ...ipc.models.memory_plan import HEAD_BITS, QUANTIZATION_BITS, quantized_bytes
from ...ipc.models.quantized_tensors import BLOCKS
from ..device import free_bytes
from ..ranks.expert_group import ALL_EXPERTS, ExpertGroup
from ..ranks.tensor_group import ALONE, TensorGroup
from ..weights.packed_rows import PackedRows, copy_weights
from .divided_experts import DividedExperts
from .layer_registry import Layer, choose_layer
from .linear import Embedding as Embedding
from .linear import Linear as Linear
from .linear import Multiply, Packer, TiedHead
from .linear import Weights as Weights
from .parallel_layers import GatheredHead, PartEmbedding, RowLinear, Slice
from .rope import make_cos_sin_cache, query_scales

logger = logging.getLogger(__name__)


class Rope(NamedTuple):
    """Cosines and sines of the angles of queries and keys; usually one tensor."""

    query: torch.Tensor  # [positions, rotary_dim] f32; times the scale of a position's queries
    key: torch.Tensor


class RMSNorm:
    def __init__(self, name: str, weight: torch.Tensor, eps: float, ops: Any):
        self.name = name
        self.weight = weight  # [size]
        self.eps = eps
        self.rms_norm = ops.rms_norm
        self.fused_add_rms_norm = ops.fused_add_rms_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same shape, normalised over the last dimension"""
        return self.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """In place: residual += x, then x = norm(residual); both [T, size]."""
        self.fused_add_rms_norm(x, residual, self.weight, self.eps)

    def weights(self, prefix: str) -> Weights:
        yield f"{prefix}{self.name}.weight", self.weight


class LayerFactory:
    """Allocates every parameter of a model, unfilled, on one device in one dtype.

    Models get layers only from here.
    """

    def __init__(
        self,
        ops: Any,
        dtype: torch.dtype,
        device: torch.device,
        quantization: str | None = None,
        group: TensorGroup = ALONE,
        expert_group: ExpertGroup = ALL_EXPERTS,
    ):
        """quantization: "int8" or "int4" for the weights of linear layers; the head is int8 in both
        cases. group: the ranks that have the other parts of layers. expert_group: the engines that
        have the other experts.
        """
        self.group, self.expert_group = group, expert_group
        self._slices: dict[int, Slice] = {}  # by the addresses of tensors that are parts of stored
        self.ops = ops  # the kernels' table, selected once
        self.dtype = dtype
        self.device = device
        self.weights_bytes = 0  # of all layers made so far, packed
        self._bits = QUANTIZATION_BITS[quantization] if quantization else None
        self._logged_types: set[str] = set()  # of blocks that memory does not hold, and of layers
        # by the addresses of the tensors that they wait for
        self._unpacked: dict[int, Linear | Embedding] = {}
        self._offsets: dict[int, float] = {}  # of norms, by the addresses of their weights
        # what stands in the model so far for layers that a plugin can replace, by the built-in name
        self.chosen_layers: dict[str, set[Layer]] = {}

    def fill(self, tensor: torch.Tensor, values: torch.Tensor | PackedRows) -> None:
        """Fills a tensor of the model's weight-name table, from values of any float dtype or from
        blocks of a GGUF file.

        Call it for every tensor before the model runs. Blocks are kept where `keeps_blocks` says
        so: linear layers multiply them, embeddings read their rows. Others are dequantized.
        `values` may lie in a private mapping of a file and are not used afterwards. A complete
        linear layer is packed, directly from the mapping where possible, and its source is
        released, so that at most one layer is in memory twice.
        """
        if (part := self._slices.pop(tensor.data_ptr(), None)) is not None:
            assert isinstance(values, torch.Tensor)
            values = part.of(values)
        layer = self._unpacked.pop(tensor.data_ptr(), None)
        if layer is None:
            offset = self._offsets.get(tensor.data_ptr())
            if offset is not None:
                assert isinstance(values, torch.Tensor)
                values = values.double() + offset
            copy_weights(tensor, values)
            return
        if isinstance(values, PackedRows):
            values = self._in_memory(values, tensor.dtype)
        layer.fill(tensor, values)
        self.weights_bytes -= layer.saved_bytes

    def _in_memory(self, blocks: PackedRows, dtype: torch.dtype) -> torch.Tensor | PackedRows:
        """Blocks of the type that memory holds, or numbers; logs each change of a type once."""
        kept: torch.Tensor | PackedRows
        if self.keeps_blocks(blocks.type):
            kept = blocks.for_memory()
            change = "" if kept.type == blocks.type else f"packed again as {kept.type}"
        else:
            kept = blocks.dequantized(dtype)
            change = f"unpacked to {self.dtype}"
        if change and blocks.type not in self._logged_types:
            logger.info("weights of type %s are %s", blocks.type, change)
            self._logged_types.add(blocks.type)
        return kept

    def keeps_blocks(self, type: str) -> bool:
        """Whether blocks of this type stay blocks (of a GGUF file: of the type in MEMORY_TYPES).

        In float32 they do not: their activations would be quantized.
        """
        return self.multiplies_blocks and (type in MEMORY_TYPES or type in BLOCKS)

    def stored_shape(self, tensor: torch.Tensor) -> list[int]:
        """Of what fills a tensor of the weight-name table, of which this rank may keep a part."""
        part = self._slices.get(tensor.data_ptr())
        return list(tensor.shape) if part is None else part.stored_shape(tensor)

    def share(self, count: int, name: str) -> int:
        """How many of `count` heads this rank has; `name` says what they are. See TensorGroup."""
        return self.group.share(count, name)

    def waiting(self, tensor: torch.Tensor) -> Linear | Embedding | None:
        """The layer that waits for this tensor of the weight-name table."""
        return self._unpacked.get(tensor.data_ptr())

    def wait(self, tensor: torch.Tensor, layer: Any) -> None:
        """Makes `fill` call layer.fill for this tensor."""
        self._unpacked[tensor.data_ptr()] = layer

    @property
    def multiplies_blocks(self) -> bool:
        """`keeps_blocks` of the types that have kernels."""
        return (
            self._bits is None
            and self.dtype == torch.bfloat16
            and self.ops.chosen["pack_gguf_linear"] != "reference"
        )

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        try:
            parameter = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        except RuntimeError:  # of torch's allocators, in several lines
            raise NotEnoughMemoryError(
                "model",
                f"a tensor of shape {list(shape)} does not fit the memory; quire plan shows what "
                f"a model needs",
            ) from None
        self.weights_bytes += parameter.nbytes
        return parameter

    def linear(
        self, in_features: int, shards: dict[str, int], bias: bool = False, unit: int = 1
    ) -> Linear:
        """Projections of one input, merged into one multiplication.

        Under tensor parallelism a rank keeps a part of the rows of every shard, in whole units (of
        rows of a head); ranks that are more than a shard has units have some in common.
        """
        ranges = {name: self.group.range_of(rows, unit) for name, rows in shards.items()}
        own = {name: end - begin for name, (begin, end) in ranges.items()}
        rows = sum(own.values())
        linear = self._linear(
            own,
            self.parameter(rows, in_features),
            self.parameter(rows) if bias else None,
            self._bits,
        )
        for name, tensor in linear.weights("") if self.group.size > 1 else ():
            shard = name.rpartition(".")[0]
            self._slices[tensor.data_ptr()] = Slice(0, *ranges[shard], shards[shard])
        return linear

    def row_linear(
        self, name: str, in_features: int, out_features: int, bias: bool = False
    ) -> Linear:
        """A projection back to the residual stream.

        Under tensor parallelism a rank keeps a part of the columns, and the results are added.
        """
        if self.group.size == 1:
            return self.linear(in_features, {name: out_features}, bias)
        begin, end = self.group.range_of(in_features)
        weight = self.parameter(out_features, end - begin)
        self._slices[weight.data_ptr()] = Slice(1, begin, end, in_features)
        return self._register(
            RowLinear(
                {name: out_features},
                weight,
                self.parameter(out_features) if bias else None,
                self._packer(weight, self._bits),
                self.group,
            )
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, rounded to its dtype; x itself where there is one rank."""
        return x if self.group.size == 1 else self.group.all_reduce(x, x.dtype)

    def own_experts(self, count: int) -> range:
        """Which of a layer's experts this engine has."""
        return experts_of(self.expert_group.rank, self.expert_group.size, count)

    def divided_experts(self, count: int) -> DividedExperts | None:
        """`fused_moe` with the `own_experts` of a layer; None where all are here."""
        if self.expert_group.size == 1:
            return None
        return DividedExperts(self.ops, self.expert_group, len(self.own_experts(count)))

    def router(self, name: str, in_features: int, out_features: int, bias: bool = False) -> Linear:
        """The choice of experts, by `logits`: its weight keeps the dtype in every quantization."""
        router = self._linear(
            {name: out_features},
            self.parameter(out_features, in_features),
            self.parameter(out_features) if bias else None,
            None,
        )
        router.takes_adapters = False
        return router

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        if self.group.size == 1:
            embedding = Embedding(name, self.parameter(vocab_size, hidden_size), self.ops)
        else:
            begin, end = self.group.even_range(vocab_size)
            weight = self.parameter(end - begin, hidden_size)
            self._slices[weight.data_ptr()] = Slice(0, begin, end, vocab_size)
            embedding = PartEmbedding(name, weight, self.ops, begin, self.group)
        self._unpacked[embedding.weight.data_ptr()] = embedding  # until a tied head waits for it
        return embedding

    def head(self, name: str, in_features: int, out_features: int) -> Linear | GatheredHead:
        """An untied output head. Under tensor parallelism a rank has some tokens' rows."""
        begin, end = self.group.even_range(out_features)
        weight, bits = self.parameter(end - begin, in_features), self._bits and HEAD_BITS
        if self.group.size == 1:
            return self._linear({name: out_features}, weight, None, bits)
        self._slices[weight.data_ptr()] = Slice(0, begin, end, out_features)
        head = Linear({name: end - begin}, weight, None, self._packer(weight, bits))
        return GatheredHead(self._register(head), out_features, self.group)

    def tied_head(self, name: str, embedding: Embedding) -> Linear | GatheredHead:
        bits = self._bits and HEAD_BITS
        head = self._register(TiedHead(name, embedding, self._packer(embedding.weight, bits)))
        if not isinstance(embedding, PartEmbedding):
            return head
        return GatheredHead(head, self.stored_shape(embedding.weight)[0], self.group)

    def block(
        self, built_in: type, config: DecoderConfig, layer: int, *args: Any, **kw: Any
    ) -> Any:
        """The block of a layer of the stack, or what a plugin has registered in its place."""
        chosen = self._choose(built_in, config, layer)
        if chosen is not built_in and self.group.size > 1:
            raise InvalidParameterError(
                "tensor_parallel_size",
                f"must be 1 with a plugin's layers ({chosen!r}), got {self.group.size}",
            )
        if chosen is not built_in and self.expert_group.size > 1:
            raise InvalidParameterError(NAME, f"cannot be used with a plugin's layers ({chosen!r})")
        made = chosen(self, config, layer, *args, **kw)
        if chosen is not built_in and self._bits is not None:
            self._warn_of_own_weights(made)
        return made

    def _warn_of_own_weights(self, layer: Any) -> None:
        """Of a plugin's layer, what `linear` and its relatives make is quantized."""
        values = getattr(layer, "__dict__", {}).values()
        own = [one for one in values if isinstance(one, torch.Tensor) and one.dim() > 1]
        kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
        if own and kind not in self._logged_types:
            self._logged_types.add(kind)
            logger.warning(
                "%s keeps matrices of its own, which stay %s: quantization applies to what "
                "make.linear makes",
                kind,
                str(self.dtype).removeprefix("torch."),
            )

    def norm(self, name: str, size: int, config: DecoderConfig) -> RMSNorm:
        """A norm of the model's kind. Its offset is added to the weight when it is filled."""
        weight = self.parameter(size, dtype=torch.float32 if config.fp32_norms else None)
        if config.norm_offset:
            self._offsets[weight.data_ptr()] = config.norm_offset
        chosen = self._choose(RMSNorm, config, None)
        return chosen(name, weight, config.rms_norm_eps, self.ops)

    def _choose(self, built_in: type, config: DecoderConfig, layer: int | None) -> Layer:
        chosen = choose_layer(built_in, config, layer)
        self.chosen_layers.setdefault(built_in.__name__, set()).add(chosen)
        return chosen

    def ropes(self, config: DecoderConfig | EncoderConfig, num_positions: int) -> list[Rope | None]:
        """The tables of each layer, None where it does not rotate; layers share equal ones. See
        rope.make_cos_sin_cache.

        Raises NotEnoughMemoryError where a table and what makes it exceed the free memory.
        """
        tables: dict[str, Rope | None] = {}
        wanted = [config.rope_of(layer) for layer in range(config.num_hidden_layers)]
        for rope in wanted:
            if repr(rope) not in tables:
                tables[repr(rope)] = (
                    None if rope is None else self._rope(rope, config.head_dim, num_positions)
                )
        return [tables[repr(rope)] for rope in wanted]

    def _rope(self, rope: dict[str, Any], head_dim: int, num_positions: int) -> Rope:
        num_bytes = 3 * num_positions * head_dim * 4
        if num_bytes > (free := free_bytes(self.device)):
            raise NotEnoughMemoryError(
                "max_model_len",
                f"the rotary embeddings of {num_positions} positions take {num_bytes} bytes, "
                f"{free} bytes are free",
            )
        table = make_cos_sin_cache(rope, head_dim, num_positions)
        scales = query_scales(rope, num_positions)
        key = table.to(self.device)
        return Rope(key if scales is None else (table * scales[:, None]).to(self.device), key)

    def _linear(
        self,
        shards: dict[str, int],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        bits: int | None,
    ) -> Linear:
        return self._register(Linear(shards, weight, bias, self._packer(weight, bits)))

    def _packer(self, weight: torch.Tensor, bits: int | None) -> Packer:
        pack: Callable[..., Multiply] = self.ops.pack_linear
        options: dict[str, int] = {}
        if bits is not None:
            self.weights_bytes += (
                quantized_bytes(weight.shape[0], weight.shape[1], bits) - weight.nbytes
            )
            pack, options = self.ops.pack_quantized_linear, {"bits": bits}
        forms = pack, getattr(pack, "from_parts", None), getattr(pack, "from_arrays", None)
        return tuple(form and partial(form, **options) for form in forms)  # type: ignore[return-value]

    def _register(self, linear: Linear) -> Linear:
        linear.pack_blocks = self.ops.pack_gguf_linear
        self._unpacked |= {tensor.data_ptr(): linear for _, tensor in linear.weights("")}
        return linear
