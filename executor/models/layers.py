"""The layers that models are made of, and the factory that makes every layer with weights.

Must not know: architectures, files, requests. Tensor parallelism, quantization and LoRA belong to
the factory, never to branches in a model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ...ipc.config import LoRAConfig
from ...ipc.errors import InvalidParameterError, NotEnoughMemoryError
from ...ipc.models.decoder_config import DecoderConfig
from ...ipc.models.encoder_config import EncoderConfig
from ...ipc.models.expert_parallel import NAME, experts_of
from ...ipc.models.gguf import MEMORY_TYPES
from ...ipc.models.memory_plan import HEAD_BITS, QUANTIZATION_BITS, quantized_bytes
from ...ipc.models.quantized_tensors import BLOCKS, FP8_BLOCKS
from ..device import free_bytes
from ..groups.expert_group import ALL_EXPERTS, ExpertGroup
from ..groups.tensor_group import ALONE, TensorGroup
from ..weights.packed_rows import PackedRows, copy_weights
from ..weights.table import (
    ColumnOrder,
    Part,
    Rearranged,
    RowOrder,
    Slice,
    Weight,
    kept_part,
    stored_shape,
)
from .adapters import AdapterRows, EmbeddingAdapters, LinearAdapters
from .images import ImageReader
from .layer_registry import Layer, choose_layer
from .linear import Embedding as Embedding
from .linear import (
    GatheredHead,
    MappedTable,
    Packer,
    PartEmbedding,
    RowLinear,
    TiedHead,
)
from .linear import Linear as Linear
from .linear import Weights as Weights
from .rope import make_cos_sin_cache, query_scales

logger = logging.getLogger(__name__)
NO_ORDERS: Mapping[str, RowOrder] = {}


class Rope(NamedTuple):
    """Cosines and sines of the angles of queries and keys; usually one tensor."""

    query: torch.Tensor  # [positions, rotary_dim] f32, times the scale of a position's queries
    key: torch.Tensor
    # [rotary_dim / 2] i32: the component of the position by which each pair turns; None: positions
    # have one component
    components: torch.Tensor | None = None


class RMSNorm:
    def __init__(self, name: str, weight: torch.Tensor, eps: float, ops: Any):
        self.name = name
        self.weight = weight  # [size]
        self.eps = eps
        self.rms_norm = ops.rms_norm
        self.fused_add_rms_norm = ops.fused_add_rms_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same shape, normalised over the last dimension."""
        return self.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """In place: residual += x, then x = norm(residual); both [T, size]."""
        self.fused_add_rms_norm(x, residual, self.weight, self.eps)

    def weights(self, prefix: str) -> Weights:
        yield f"{prefix}{self.name}.weight", self.weight


class GatheredNorm:
    """A norm over the features of all ranks. Each rank norms all, with the bits of one rank, and
    keeps its own. Ranks that have the same features give a part of them each.
    """

    def __init__(self, norm: RMSNorm, group: TensorGroup):
        self.norm, self.weight = norm, norm.weight
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, this rank's size] -> the same shape"""
        size, group = x.shape[1], self._group
        num_sharing = group.size * size // len(self.weight)  # ranks with the same features
        begins = [size * part // num_sharing for part in range(num_sharing + 1)]
        widths = [end - begin for begin, end in pairwise(begins)]
        own, part = divmod(group.rank, num_sharing)
        given = x[:, begins[part] : begins[part + 1]]
        normed = self.norm(group.all_gather(given, widths * (group.size // num_sharing)))
        return normed[:, own * size : (own + 1) * size]

    def weights(self, prefix: str) -> Weights:
        yield from self.norm.weights(prefix)


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
        loras: LoRAConfig | None = None,
        images: ImageReader | None = None,
        *,
        has_draft_head: bool = False,
        reads_blocks: bool = False,
    ):
        """quantization: "int8" or "int4" for the weights of linear layers; the head is int8 in both
        cases. group: the ranks that have the other parts of layers. expert_group: the engines that
        have the other experts. loras: the adapters for which linear layers and embeddings have
        room, if any. images: of a model that reads images. has_draft_head: a head that drafts reads
        the embedding where the output head is. reads_blocks: whether files have quantized weights.
        """
        self.has_draft_head = has_draft_head
        self.images = images
        self.group, self.expert_group = group, expert_group
        self._loras = loras if loras is not None and loras.enable_lora else None
        self.adapter_rows = None if self._loras is None else AdapterRows(device)
        self.ops = ops  # the kernels' table, selected once
        self.dtype = dtype
        self.device = device
        self.weights_bytes = 0  # of all layers made so far, packed
        self._bits = QUANTIZATION_BITS[quantization] if quantization else None
        self._reads_blocks = reads_blocks
        self._logged_types: set[str] = set()  # of blocks that memory does not hold, and of layers
        # by the built-in name: the layers that the model has so far where a plugin can replace them
        self.chosen_layers: dict[str, set[Layer]] = {}

    def fill(self, tensor: torch.Tensor, values: torch.Tensor | PackedRows) -> None:
        """Fills a tensor of the model's weight-name table, from values of any float dtype or from
        blocks of a GGUF file.

        Call it for every tensor before the model runs. Blocks are kept where `keeps_blocks` says
        so: linear layers multiply them, and embeddings read their rows. Other blocks are
        dequantized. `values` may lie in a private mapping of a file, and are not used afterwards. A
        complete linear layer is packed, directly from the mapping where possible, and its source is
        released, so that at most one layer is in memory twice.
        """
        if not isinstance(tensor, Weight):
            copy_weights(tensor, values)
            return
        if tensor.part is not None:
            values = self._part_of(values, tensor)
        if tensor.offset:
            assert isinstance(values, torch.Tensor)
            values = values.double() + tensor.offset
        if tensor.layer is None:
            copy_weights(tensor, values)
            return
        if isinstance(values, PackedRows):
            values = self._in_memory(values, tensor.dtype)
        tensor.layer.fill(tensor, values)
        self.weights_bytes -= tensor.layer.saved_bytes

    def _part_of(
        self, values: torch.Tensor | PackedRows, tensor: Weight
    ) -> torch.Tensor | PackedRows:
        """What this rank keeps of the values for a tensor."""
        part = tensor.part
        assert part is not None
        if isinstance(values, torch.Tensor):
            return part.of(values)
        if values.can_cut(part):
            return values.kept(part)
        if not self.keeps_blocks(values.type):
            return part.of(values.dequantized(tensor.dtype))
        assert isinstance(part, (Slice, ColumnOrder))
        raise InvalidParameterError(
            "tensor_parallel_size",
            f"must divide the {part.size} columns of a weight in blocks of {values.type}, so that "
            f"each rank has whole blocks of {values.block[0]}, got {self.group.size}",
        )

    def _in_memory(self, blocks: PackedRows, dtype: torch.dtype) -> torch.Tensor | PackedRows:
        """Returns blocks of the type that memory holds, or numbers. It logs each change of a type
        once.
        """
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
        """Whether blocks of this type stay blocks; a GGUF file's become those of MEMORY_TYPES.

        In float32 they do not: their activations would be quantized.
        """
        if type in FP8_BLOCKS:
            return self.multiplies_fp8
        return self.multiplies_blocks and (type in MEMORY_TYPES or type in BLOCKS)

    def share(self, count: int, name: str) -> int:
        """How many of `count` heads this rank has; `name` says what they are. See TensorGroup."""
        return self.group.share(count, name)

    @property
    def multiplies_blocks(self) -> bool:
        """What `keeps_blocks` says of the types that have kernels."""
        return (
            self._bits is None
            and self.dtype == torch.bfloat16
            and self.ops.chosen["pack_gguf_linear"] != "reference"
        )

    @property
    def multiplies_fp8(self) -> bool:
        """What `keeps_blocks` says of blocks of FP8."""
        return self.multiplies_blocks and getattr(self.ops.pack_gguf_linear, "takes_fp8", False)

    @property
    def quantizes_to_fp8(self) -> bool:
        """Whether activations are in FP8 where a checkpoint wants it."""
        return self.multiplies_fp8 and getattr(self.ops.pack_gguf_linear, "quantizes_to_fp8", False)

    def parameter(
        self, *shape: int, dtype: torch.dtype | None = None, is_on_host: bool = False
    ) -> torch.Tensor:
        device = torch.device("cpu") if is_on_host else self.device
        try:
            parameter = torch.empty(shape, dtype=dtype or self.dtype, device=device)
        except RuntimeError:  # torch's allocators raise it, with several lines of text
            raise NotEnoughMemoryError(
                "model",
                f"a tensor of shape {list(shape)} does not fit the memory; quire plan shows what "
                f"a model needs",
            ) from None
        self.weights_bytes += parameter.nbytes
        return parameter

    def _unpacked(self, out_features: int, in_features: int) -> torch.Tensor:
        """The weight of a linear layer, until it is packed. Where it becomes smaller, it is in the
        host's memory, of which only the pages are taken that are filled.
        """
        becomes_smaller = self._bits is not None or (self._reads_blocks and self.multiplies_blocks)
        return self.parameter(out_features, in_features, is_on_host=becomes_smaller)

    def linear(
        self,
        in_features: int,
        shards: dict[str, int],
        bias: bool = False,
        unit: int = 1,
        *,
        takes_adapters: bool = True,
        orders: Mapping[str, RowOrder] = NO_ORDERS,
        is_divided: bool = True,
    ) -> Linear:
        """Makes projections of one input, merged into one multiplication.

        Under tensor parallelism a rank keeps a part of the rows of every shard, in whole units (the
        rows of a head). Where a shard has fewer units than there are ranks, several ranks have the
        same unit. takes_adapters: whether LoRA applies, where the model's layers have adapters.
        orders: which rows of a shard this rank keeps (kept_rows), where that is not a whole range.
        is_divided: if not, every rank keeps all rows.
        """
        group = self.group if is_divided else ALONE
        own: dict[str, int] = {}
        parts: list[Part | None] = []
        for name, count in shards.items():
            order = orders.get(name)
            if order is not None:
                own[name] = len(order.rows)
                parts.append(order)
                continue
            begin, end = group.range_of(count, unit)
            own[name] = end - begin
            parts.append(Slice(0, begin, end, count) if group.size > 1 else None)
        rows = sum(own.values())
        weight = self._unpacked(rows, in_features)
        return Linear(
            own,
            weight,
            self.parameter(rows) if bias else None,
            self._packer(weight, self._bits),
            self._adapters(in_features, list(own.values()), parts) if takes_adapters else None,
            parts,
        )

    def kept_rows(self, *parts: tuple[torch.Tensor, int]) -> RowOrder:
        """Which rows this rank keeps of a tensor that consists of `parts`: of each part the stored
        rows, head by head, and the number of heads, which are divided as in `share`.
        """
        kept = []
        for rows, num_heads in parts:
            begin, end = self.group.range_of(len(rows), len(rows) // num_heads)
            kept.append(rows[begin:end])
        return RowOrder(torch.cat(kept), sum(len(rows) for rows, _ in parts))

    def head_parameter(self, num_heads: int, order: torch.Tensor | None = None) -> torch.Tensor:
        """Makes a number in fp32 for each of `num_heads` heads, of which this rank has its part.
        order [num_heads] i64: the stored heads, those of the first rank first; None: as stored.
        """
        own = self.parameter(self.share(num_heads, "heads"), dtype=torch.float32)
        heads = torch.arange(num_heads) if order is None else order
        return kept_part(own, self.kept_rows((heads, num_heads)) if self.is_divided else None)

    @property
    def is_divided(self) -> bool:
        """Whether there are several ranks, which have parts of layers."""
        return self.group.size > 1

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the columns [T, N / ranks] of all ranks side by side: [T, N]."""
        return self.group.all_gather(x, [x.shape[1]] * self.group.size)

    def row_linear(
        self,
        name: str,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        takes_adapters: bool = True,
        order: torch.Tensor | None = None,
    ) -> Linear:
        """Makes a projection back to the residual stream.

        Under tensor parallelism a rank keeps a part of the columns, and the results are added.
        order [in_features] i64: the stored columns, those of the first rank first; None: as stored.
        """
        if self.group.size == 1:
            shards = {name: out_features}
            return self.linear(in_features, shards, bias, takes_adapters=takes_adapters)
        begin, end = self.group.range_of(in_features)
        weight = self._unpacked(out_features, end - begin)
        part = (
            Slice(1, begin, end, in_features)
            if order is None
            else ColumnOrder(order[begin:end], in_features)
        )
        adapters = self._adapters(end - begin, [out_features], [part]) if takes_adapters else None
        return RowLinear(
            {name: out_features},
            weight,
            self.parameter(out_features) if bias else None,
            self._packer(weight, self._bits),
            part,
            self.group,
            adapters,
        )

    def whole_linear(self, name: str, in_features: int, out_features: int) -> Linear:
        """Makes a projection that every rank has whole. It takes no adapters."""
        weight = self._unpacked(out_features, in_features)
        return Linear({name: out_features}, weight, None, self._packer(weight, self._bits))

    def table(self, name: str, num_rows: int, size: int, is_part: bool = False) -> Embedding:
        """Makes a table of which a step reads few rows, and every rank all. is_part: tokens that it
        does not have get its first row.
        """
        return MappedTable(name, self.parameter(num_rows, size), self.ops, is_part)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' `x`, rounded to its dtype, or `x` itself for one rank."""
        return x if self.group.size == 1 else self.group.all_reduce(x, x.dtype)

    def own_experts(self, count: int) -> range:
        """Which of a layer's experts this engine has."""
        return experts_of(self.expert_group.rank, self.expert_group.size, count)

    def router(self, name: str, in_features: int, out_features: int, bias: bool = False) -> Linear:
        """Makes the layer whose `logits` choose experts; see plain_linear."""
        return self.plain_linear(name, in_features, out_features, bias)

    def plain_linear(
        self,
        name: str,
        in_features: int,
        out_features: int,
        bias: bool = False,
        stored: Rearranged | None = None,
    ) -> Linear:
        """Makes a layer whose weight keeps the dtype in every quantization. It takes no adapters.
        stored: how files have the weight.
        """
        weight = self.parameter(out_features, in_features)
        bias_of_all = self.parameter(out_features) if bias else None
        packer, parts = self._packer(weight, None), [] if stored is None else [stored]
        return Linear({name: out_features}, weight, bias_of_all, packer, parts=parts)

    def embedding(
        self, name: str, vocab_size: int, hidden_size: int, head: str | None = None
    ) -> Embedding:
        """Makes an embedding. head: the name of an output head with its weight (`tied_head`)."""
        adapters = None
        if self._loras is not None and self.adapter_rows is not None:
            sizes = self._loras.max_loras, self._loras.max_lora_rank
            shape = vocab_size, hidden_size
            adapters = EmbeddingAdapters(self.ops, self.adapter_rows, *sizes, shape, self.dtype)
        if self.group.size > 1:
            begin, end = self.group.even_range(vocab_size)
            weight = self.parameter(end - begin, hidden_size)
            part = Slice(0, begin, end, vocab_size)
            tie = None if head is None else partial(self._tie, head, part)
            return PartEmbedding(name, weight, self.ops, tie, part, self.group, adapters)
        tie = None if head is None else partial(self._tie, head, None)
        weight = self.parameter(vocab_size, hidden_size)
        return Embedding(name, weight, self.ops, tie, adapters)

    def _tie(self, name: str, part: Slice | None, embedding: Embedding) -> TiedHead:
        weight = embedding.weight
        adapters = self._adapters(weight.shape[1], [len(weight)], [part], is_common=False)
        return TiedHead(name, embedding, self._packer(weight, self._head_bits), adapters)

    def tied_head(self, embedding: Embedding) -> Linear | GatheredHead:
        """The output head with the weight of the embedding, which was made with it."""
        head = embedding.tied_head
        assert head is not None
        if not isinstance(embedding, PartEmbedding):
            return head
        ((_, weight),) = embedding.weights("")
        return GatheredHead(head, stored_shape(weight)[0], self.group)

    def head(self, name: str, in_features: int, out_features: int) -> Linear | GatheredHead:
        """Makes an untied output head. Under tensor parallelism a rank has some tokens' rows."""
        begin, end = self.group.even_range(out_features)
        weight = self._unpacked(end - begin, in_features)
        packer = self._packer(weight, self._head_bits)
        if self.group.size > 1:
            part = Slice(0, begin, end, out_features)
            adapters = self._adapters(in_features, [end - begin], [part], is_common=False)
            own = Linear({name: end - begin}, weight, None, packer, adapters, [part])
            return GatheredHead(own, out_features, self.group)
        adapters = self._adapters(in_features, [out_features], [None], is_common=False)
        return Linear({name: out_features}, weight, None, packer, adapters)

    @property
    def quantizes_heads(self) -> bool:
        """Whether output heads are quantized as the model is loaded. A table that is tied to one
        has the quantized rows, in a stage without the head, too.
        """
        return bool(self._bits)

    @property
    def _head_bits(self) -> int | None:
        return self._bits and HEAD_BITS

    def _adapters(
        self,
        in_features: int,
        slices: list[int],
        parts: Sequence[Part | None],
        is_common: bool = True,
    ) -> LinearAdapters | None:
        """Makes the adapters of a linear layer; None where the model takes none. See LinearAdapters
        for the arguments.
        """
        if self._loras is None or self.adapter_rows is None:
            return None
        sizes = self._loras.max_loras, self._loras.max_lora_rank, in_features, slices
        return LinearAdapters(self.ops, self.adapter_rows, *sizes, self.dtype, is_common, parts)

    def block(
        self, built_in: type, config: DecoderConfig, layer: int, *args: Any, **kw: Any
    ) -> Any:
        """Makes the block of a layer of the stack, or what a plugin has registered in its place."""
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
        """Warns that in a plugin's layer only what `linear` and its relatives make is quantized."""
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
        """Makes a norm of the model's kind."""
        weight = self.parameter(size, dtype=torch.float32 if config.fp32_norms else None)
        if config.norm_offset:
            weight = Weight(weight, offset=config.norm_offset)
        chosen = self._choose(RMSNorm, config, None)
        return chosen(name, weight, config.rms_norm_eps, self.ops)

    def gathered_norm(self, name: str, size: int, config: DecoderConfig) -> RMSNorm | GatheredNorm:
        """Makes a norm over `size` features, of which ranks have equal parts, or several the same
        one.
        """
        norm = self.norm(name, size, config)
        return GatheredNorm(norm, self.group) if self.is_divided else norm

    def unweighted_norm(self, size: int, config: DecoderConfig) -> RMSNorm:
        """Makes a norm whose weight is 1, and stands in no checkpoint."""
        ones = torch.ones(size, dtype=torch.float32, device=self.device)
        return self._choose(RMSNorm, config, None)("", ones, config.rms_norm_eps, self.ops)

    def _choose(self, built_in: type, config: DecoderConfig, layer: int | None) -> Layer:
        chosen = choose_layer(built_in, config, layer)
        self.chosen_layers.setdefault(built_in.__name__, set()).add(chosen)
        return chosen

    def ropes(self, config: DecoderConfig | EncoderConfig, num_positions: int) -> list[Rope | None]:
        """Makes the tables of each layer, None where it does not rotate. Layers share equal tables;
        see rope.make_cos_sin_cache.

        Raises NotEnoughMemoryError where a table and what makes it exceed the free memory.
        """
        tables: dict[tuple[str, int], Rope | None] = {}
        keys = []
        for layer in range(config.num_hidden_layers):
            rope, head_dim = config.rope_of(layer), config.rotary_head_dim(layer)
            keys.append((repr(rope), head_dim))
            if keys[-1] not in tables:
                made = None if rope is None else self._rope(rope, head_dim, num_positions)
                tables[keys[-1]] = made
        return [tables[key] for key in keys]

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
        query = key if scales is None else (table * scales[:, None]).to(self.device)
        found = [] if self.images is None else self.images.components(table.shape[1] // 2)
        if not found:
            return Rope(query, key)
        return Rope(query, key, torch.tensor(found, dtype=torch.int32).to(self.device))

    def sees_later(self, sliding_window: int) -> bool:
        """Whether tokens of an image see each other in a layer with this window, or with 0."""
        return self.images is not None and self.images.sees_later(sliding_window)

    def _packer(self, weight: torch.Tensor, bits: int | None) -> Packer:
        pack: Any = self.ops.pack_linear
        options: dict[str, int] = {}
        if bits is not None:
            self.weights_bytes += (
                quantized_bytes(weight.shape[0], weight.shape[1], bits) - weight.nbytes
            )
            pack, options = self.ops.pack_quantized_linear, {"bits": bits}
        from_parts, from_arrays = (
            form and partial(form, **options)
            for form in (getattr(pack, name, None) for name in ("from_parts", "from_arrays"))
        )
        blocks = self.ops.pack_gguf_linear
        return Packer(partial(pack, **options), from_parts, from_arrays, blocks, self.device)
