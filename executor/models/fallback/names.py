"""Maps the tensors of a checkpoint to a model's, with the conversions of transformers. These rename
and join tensors, put experts into one tensor, and handle prefixes.

Must not know: files, what a tensor is for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ....ipc.errors import ModelLoadError
from ...weights.converted import Conversion


class _WithTensors:
    """A model whose parameters are those that transformers' own layers would have."""

    def __init__(self, model: Any, tensors: Mapping[str, torch.Tensor]):
        self._model, self._tensors = model, tensors

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def plan_conversions(
    model: Any, tensors: Mapping[str, torch.Tensor], tied: Iterable[str], stored: Iterable[str]
) -> list[Conversion]:
    """Plans how stored tensors become the model's. `tensors` are the model's by name, `tied` has
    further names of some, and `stored` has the checkpoint's names.

    Tensors that transformers ignores are left out. Raises ModelLoadError for one without a place.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    places = dict.fromkeys([*tensors, *tied], True)
    prefix = model.base_model_prefix
    plain: list[Conversion] = []
    joined: dict[str, tuple[WeightConverter, list[tuple[str, str]]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, places)
        if target not in places and name in places:
            target, pattern = name, None
        if target not in places:
            if _is_ignored(model, name, target):
                continue
            raise ModelLoadError(f"the model has no place for tensor {name:.100}")
        if pattern is None:
            plain.append(Conversion([name], _renamed(target), target, is_plain=True))
        else:
            joined.setdefault(target, (by_pattern[pattern], []))[1].append((name, pattern))
    return plain + [
        Conversion(
            [name for name, _ in parts],
            _converted(_WithTensors(model, tensors), converter, target, parts),
            target,
        )
        for target, (converter, parts) in joined.items()
    ]


def _is_ignored(model: Any, *names: str) -> bool:
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    return any(re.search(pattern, name) for pattern in patterns for name in names)


def _renamed(target: str) -> Callable[[list[torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda values: {target: values[0]}


def _converted(
    model: Any, converter: WeightConverter, target: str, parts: list[tuple[str, str]]
) -> Callable[[list[torch.Tensor]], dict[str, torch.Tensor]]:
    def convert(values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        mapping: Any = deepcopy(converter)
        for (name, pattern), value in zip(parts, values, strict=True):
            mapping.add_tensor(target, name, pattern, value)
        found = mapping.convert(target, model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in found.items()
        }

    return convert
