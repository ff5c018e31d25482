"""The memory of the KV cache on one rank: which layers share blocks, what a block holds, how large
it is.

Must not know: requests, block tables, how much memory there is.

If all layers have keys and values of the same size, or all are in one group, a block has a page for
each layer of a group, and each page has its own memory. Otherwise the blocks follow one another,
and in each the parts of the layers of one group: a layer's cache is a view, whose blocks are apart.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from ..ipc.config import EngineConfig
from ..ipc.models.kv_layout import LayerGroups, one_group, plan_groups
from ..kernels.ops import kv_cache_row
from . import device as devices

logger = logging.getLogger(__name__)

# A long context is read faster from pages of 2 MiB, most of all by a processor with nested page
# tables. A short one would take 2 MiB of each layer's keys and of its values, so the first blocks,
# which are used first, are in small pages.
SMALL_PAGES = 2**21  # bytes of a layer's keys, and of its values


class KVCacheMemory:
    """The layout of the cache. `layers` are a model's attention layers that own a part of it. They
    may be replaced by others of the same shape. Without any layers, blocks have no bytes.

    A layer has num_kv_heads and head_dim. If it also has a sliding_window and a kv_cache_group,
    blocks behind the window are returned (ipc/models/kv_layout.py).
    """

    def __init__(
        self,
        layers: Sequence[Any],
        config: EngineConfig,
        dtype: torch.dtype,
        device: torch.device,
        groups: LayerGroups | None = None,
    ):
        """groups: of a stage's layers; None: of a whole model's, which are chosen here."""
        self._block_size = config.cache_config.block_size
        self._dtype = dtype
        self._device = device
        self.groups = self._choose_groups(layers, config) if groups is None else groups

    def _choose_groups(self, layers: Sequence[Any], config: EngineConfig) -> LayerGroups:
        if not layers:  # those of a text encoder
            return one_group(0)
        windows = [getattr(layer, "sliding_window", 0) for layer in layers]
        groups = plan_groups(config, windows, self._sizes(layers))
        if groups.windows == (0,):
            return groups
        if not all(hasattr(layer, "kv_cache_group") for layer in layers):
            logger.info(
                "KV cache: layers with windows keep the whole context: a layer has no attribute "
                "kv_cache_group"
            )
            return one_group(len(layers))
        logger.info(
            "KV cache: %d groups of up to %d layers; windows of %s return blocks",
            len(groups.windows),
            max(map(len, groups.layers)),
            ", ".join(map(str, sorted({window for window in groups.windows if window}))),
        )
        return groups

    def _shape(self, layer: Any) -> tuple[int, ...]:
        """The shape of a layer's keys in a block, which its values also have."""
        row = kv_cache_row(layer.head_dim, self._dtype)
        return self._block_size, layer.num_kv_heads, row

    def _sizes(self, layers: Sequence[Any]) -> list[int]:
        """The numbers of keys and values of each layer in a block."""
        return [_num_tensors(layer) * math.prod(self._shape(layer)) for layer in layers]

    def _has_pages(self, layers: Sequence[Any]) -> bool:
        kinds = {(_num_tensors(layer), *self._shape(layer)) for layer in layers}
        return len(self.groups.layers) == 1 or len(kinds) == 1

    def block_bytes(self, layers: Sequence[Any]) -> int:
        """Bytes of one block: keys and values of block_size tokens in every layer of a group."""
        if not layers:
            return 0
        return self.groups.largest(self._sizes(layers)) * self._dtype.itemsize

    def bind(self, layers: Sequence[Any], num_blocks: int) -> None:
        """Allocates all blocks. The layers of one group have different parts of a block; the layers
        of another group have the same memory again.
        """
        if not self._has_pages(layers):
            self._bind_parts(layers, num_blocks)
            return
        shapes = self._page_shapes(layers, num_blocks)
        pages = [self._zeros(shape) for shape in shapes]
        for group, members in enumerate(self.groups.layers):
            for index, page in zip(members, pages):
                _bind(layers[index], *_keys_and_values(page), group)

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Memory of the shape [tensors, num_blocks, ...]."""
        memory = devices.zeros(shape, self._dtype, self._device, huge_pages=True)
        for tensor in memory:
            devices.use_small_pages(tensor[: SMALL_PAGES // tensor[0].nbytes])
        return memory

    def _page_shapes(self, layers: Sequence[Any], num_blocks: int) -> list[tuple[int, ...]]:
        of_pages = [layers[index] for index in self.groups.pages]
        return [(_num_tensors(one), num_blocks, *self._shape(one)) for one in of_pages]

    def _bind_parts(self, layers: Sequence[Any], num_blocks: int) -> None:
        sizes = self._sizes(layers)
        shape = num_blocks, self.groups.largest(sizes)
        memory = self._zeros((1, *shape))[0]
        for group, members in enumerate(self.groups.layers):
            begin = 0
            for index in members:
                end = begin + sizes[index]
                shape = _num_tensors(layers[index]), *self._shape(layers[index])
                parts = memory[:, begin:end].unflatten(1, shape).transpose(0, 1)
                _bind(layers[index], *_keys_and_values(parts), group)
                begin = end

    def host_caches(self, layers: Sequence[Any], num_blocks: int) -> list[torch.Tensor]:
        """`num_blocks` blocks in host memory, in the order of block_mover.caches_of: for each page
        keys and values, or the whole blocks.
        """
        if not layers:
            return []
        if not self._has_pages(layers):
            shape = num_blocks, self.groups.largest(self._sizes(layers))
            return [devices.host_zeros(shape, self._dtype, self._device)]
        shapes = self._page_shapes(layers, num_blocks)
        caches = [devices.host_zeros(shape, self._dtype, self._device) for shape in shapes]
        return [part for cache in caches for part in cache.unbind(0)]


def _num_tensors(layer: Any) -> int:
    """How many tensors a layer keeps: keys and values, or keys alone."""
    return 1 + getattr(layer, "has_values", True)


def _keys_and_values(parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    return parts[0], parts[1] if len(parts) == 2 else None


def release_caches(layers: Sequence[Any]) -> None:
    """Frees the caches of a model's layers."""
    for layer in layers:
        _bind(layer, None, None, _group_of(layer))


def move_caches(old: Sequence[Any], new: Sequence[Any]) -> None:
    """Gives the caches of a model's layers to those of another one."""
    for layer, other in zip(new, old, strict=True):
        _bind(layer, other.key_cache, other.value_cache, _group_of(other))


def _bind(layer: Any, key: torch.Tensor | None, value: torch.Tensor | None, group: int) -> None:
    """Makes these the layer's part of the cache. A plugin's layer may lack `bind_cache`: this
    function then sets its attributes.
    """
    if hasattr(layer, "bind_cache"):
        layer.bind_cache(key, value, group)
        return
    attributes = {"key_cache": key, "value_cache": value, "kv_cache_group": group}
    for name, attribute in attributes.items():
        setattr(layer, name, attribute)


def _group_of(layer: Any) -> int:
    return getattr(layer, "kv_cache_group", 0)
