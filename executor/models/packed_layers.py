"""All weights of a model as named, packed arrays for executor/weights/packed_cache.py. They are
taken from the model after a load, or take the place of a load.

Must not know: architectures, files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ..weights.load_times import LoadTimes
from ..weights.packed_cache import PackedCache, StoredArray
from ..weights.table import layer_of
from .latent import HeadProjections
from .layers import Embedding, Linear

logger = logging.getLogger(__name__)

_SEPARATOR = "#"  # between the name of a layer's first weight and that of its packed array


class PackedLayers:
    """Exchanges a model's weights with a cache; without a cache it does nothing.

    Create it before the model is filled, because packed layers no longer have their tensors.
    """

    def __init__(self, model: Any, cache: PackedCache | None):
        self._cache = cache
        self._linears: dict[str, Linear] = {}
        self._embeddings: dict[str, Embedding] = {}
        self._others: dict[str, torch.Tensor] = {}  # norms and biases
        self._derived: dict[str, Any] = {}  # layers that compute something from the values of some
        can_restore = True
        for name, tensor in model.weights() if cache is not None else ():
            layer = layer_of(tensor)
            if isinstance(layer, Embedding):
                self._embeddings[name] = layer
            elif isinstance(layer, Linear) and tensor.dim() == 2:
                if layer not in self._linears.values():
                    self._linears[name] = layer
            else:
                can_restore = can_restore and not isinstance(layer, HeadProjections)
                self._others[name] = tensor
                if layer is not None and not isinstance(layer, Linear):
                    self._derived[name] = layer
        can_restore = can_restore and all(layer.can_restore for layer in self._linears.values())
        if cache is not None and not can_restore:
            logger.info("packed_weights_cache has no effect on this model's layers or kernels")
            self._cache = None

    def restored(self) -> bool:
        """Fills the model from the cache. Returns False if the cache holds nothing usable."""
        if self._cache is None:
            return False
        times = LoadTimes()
        if (arrays := self._cache.read()) is None:
            return False
        try:
            self.restore(dict(times.reading((n, _load(array)) for n, array in arrays.items())))
        except (ValueError, KeyError, RuntimeError) as error:
            logger.warning("%s: damaged, written again: %r", self._cache.path, error)
            return False
        logger.info("packed weights from %s", self._cache.path)
        times.log()
        return True

    def keep(self) -> None:
        """Writes the arrays to the cache. Call it once the model is filled."""
        if self._cache is not None:
            self._cache.write(self.arrays())

    def arrays(self) -> dict[str, StoredArray]:
        """The arrays of the model. Call it once the model is filled."""
        stored = {name: _store(tensor) for name, tensor in self._others.items()}
        stored |= {name: _store(layer.weight) for name, layer in self._embeddings.items()}
        for name, layer in self._linears.items():
            for part, array in layer.arrays.items():
                stored[f"{name}{_SEPARATOR}{part}"] = _store(array)
        return stored

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fills the model. Large arrays are used where they lie, and are not written to.

        Raises ValueError and KeyError for arrays of another model, before anything has changed.
        """
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            layer_name, separator, part = name.partition(_SEPARATOR)
            if separator:
                parts.setdefault(layer_name, {})[part] = tensor
        restored = [(layer, layer.restored(parts[name])) for name, layer in self._linears.items()]
        dense = [(name, layer.weight) for name, layer in self._embeddings.items()]
        for name, tensor in [*self._others.items(), *dense]:
            if (tensors[name].shape, tensors[name].dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(f"{name} has another shape or type")
        for name, tensor in self._others.items():
            tensor.copy_(tensors[name])
        for name, layer in self._derived.items():
            layer.fill(self._others[name], tensors[name])
        for name, embedding in self._embeddings.items():
            embedding.use(tensors[name])
        for linear, multiply in restored:
            linear.use(multiply)


def _store(tensor: torch.Tensor) -> StoredArray:
    dtype = str(tensor.dtype).removeprefix("torch.")
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return StoredArray(dtype, list(tensor.shape), data.data)


def _load(array: StoredArray) -> torch.Tensor:
    dtype = getattr(torch, array.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no type {array.dtype!r:.50}")
    return torch.frombuffer(array.data, dtype=torch.uint8).view(dtype).view(array.shape)
