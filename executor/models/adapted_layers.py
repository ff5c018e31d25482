"""Gives the layers of a model LoRA adapters. Models do not know of them.

Must not know: architectures, files, requests, which adapters there are.
"""

from __future__ import annotations

from ...ipc.config import LoRAConfig
from ..model import Model
from .adapters import AdapterRows, EmbeddingAdapters, LinearAdapters
from .layers import LayerFactory
from .linear import Embedding, Linear, TiedHead

# name of a module -> the adapters of its layer, and its index among the merged projections
Modules = dict[str, tuple[LinearAdapters | EmbeddingAdapters, int]]


def adapt_layers(model: Model, make: LayerFactory, config: LoRAConfig) -> None:
    """Makes room for adapters in the layers of `model`, which `make` has made and not yet filled.

    They are `model.adapted_modules`. Experts and routers have none.
    """
    rows = AdapterRows(make.device)
    sizes = make.ops, rows, config.max_loras, config.max_lora_rank
    modules: Modules = {}
    heads: dict[int, TiedHead] = {}
    for name, tensor in model.weights():
        layer, module = make.waiting(tensor), name.removesuffix(".weight")
        if tensor.dim() != 2 or ".experts." in name:
            continue
        if isinstance(layer, TiedHead):
            heads[id(layer)] = layer
            layer = layer.tied_to
        if isinstance(layer, Embedding):
            layer.adapters = EmbeddingAdapters(
                *sizes, (tensor.shape[0], tensor.shape[1]), make.dtype
            )
            modules[module] = layer.adapters, 0
        elif isinstance(layer, Linear) and layer.takes_adapters:
            if layer.adapters is None:
                slices = list(layer.shards.values())
                is_head = slices == [model.config.vocab_size]
                layer.adapters = LinearAdapters(
                    *sizes, tensor.shape[1], slices, make.dtype, is_common=not is_head
                )
            # of a model in transformers' code the shards have their full names
            shards = list(layer.shards)
            index = shards.index(module if module in shards else module.rpartition(".")[2])
            modules[module] = layer.adapters, index
    for layer in heads.values():
        ((shard, num_rows),) = layer.shards.items()
        layer.adapters = LinearAdapters(
            *sizes, layer.weight.shape[1], [num_rows], make.dtype, is_common=False
        )
        modules[shard] = layer.adapters, 0
    model.use_adapters(rows, modules)


def explore_layers(model: Model) -> None:
    """Removes from `model.adapted_modules` those that may not see one row for each token of a step:
    nobody but transformers knows what the modules of its models are called with.

    Call it for a model in transformers' code whose weights are there.
    """
    rows = model.adapter_rows
    assert rows is not None  # adapt_layers has set it
    rows.seen = {}
    try:
        num_tokens = model.explore()
        seen = rows.seen
    finally:
        rows.seen = None
    for name, (adapters, _) in list(model.adapted_modules.items()):
        if name != model.head_name and {*seen.get(id(adapters), ())} != {num_tokens}:
            del model.adapted_modules[name]
