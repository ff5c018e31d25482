"""The memory of the KV cache on one rank: which layers share pages, what a page holds, how large it
is.

Must not know: requests, block tables, how much memory there is.
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


class KVCacheMemory:
    """The layout of the cache. `layers` are a model's attention layers, which may be replaced by
    others of the same shape. Without any layers, blocks have no bytes.

    A layer has num_kv_heads and head_dim. If it also has a sliding_window and a kv_cache_group,
    blocks behind the window are returned (ipc/models/kv_layout.py).
    """

    def __init__(
        self,
        layers: Sequence[Any],
        config: EngineConfig,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._block_size = config.cache_config.block_size
        self._dtype = dtype
        self._device = device
        self.groups = self._choose_groups(layers, config)

    def _choose_groups(self, layers: Sequence[Any], config: EngineConfig) -> LayerGroups:
        if not layers:  # those of a text encoder
            return one_group(0)
        groups = plan_groups(config, [getattr(layer, "sliding_window", 0) for layer in layers])
        if groups.windows == (0,):
            return groups
        if not all(hasattr(layer, "kv_cache_group") for layer in layers):
            reason = "a layer has no attribute kv_cache_group"
        elif len(groups.windows) > 1 and len({self._shape(layer, 1) for layer in layers}) > 1:
            reason = "the layers' caches have different shapes"
        else:
            windows = sorted({window for window in groups.windows if window})
            logger.info(
                "KV cache: %d groups of up to %d layers; windows of %s return blocks",
                len(groups.windows),
                len(groups.pages),
                ", ".join(map(str, windows)),
            )
            return groups
        logger.info("KV cache: layers with windows keep the whole context: %s", reason)
        return one_group(len(layers))

    def _shape(self, layer: Any, num_blocks: int) -> tuple[int, ...]:
        """The shape of a layer's memory: keys come first, then values."""
        row = kv_cache_row(layer.head_dim, self._dtype)
        return 2, num_blocks, self._block_size, layer.num_kv_heads, row

    def block_bytes(self, layers: Sequence[Any]) -> int:
        """Bytes of one block: keys and values of block_size tokens in every layer of a group."""
        pages = (math.prod(self._shape(layers[index], 1)) for index in self.groups.pages)
        return sum(pages) * self._dtype.itemsize

    def bind(self, layers: Sequence[Any], num_blocks: int) -> None:
        """Allocates all blocks. The layers of one group have different pages; the layers of another
        group have the same pages again.
        """
        pages = [
            devices.zeros(self._shape(layers[index], num_blocks), self._dtype, self._device)
            for index in self.groups.pages
        ]
        for group, members in enumerate(self.groups.layers):
            for index, page in zip(members, pages):
                _bind(layers[index], page[0], page[1], group)

    def host_caches(
        self, layers: Sequence[Any], num_blocks: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each page, keys and values of `num_blocks` blocks in host memory."""
        caches = [
            devices.host_zeros(self._shape(layers[index], num_blocks), self._dtype, self._device)
            for index in self.groups.pages
        ]
        return [(cache[0], cache[1]) for cache in caches]


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
