"""Layers from outside the package that replace built-in ones in any model.

Must not know: what a layer computes, architectures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...ipc.errors import InvalidParameterError
from ...ipc.models.decoder_config import DecoderConfig

BUILT_IN = ("Attention", "GatedMLP", "MixtureOfExperts", "RMSNorm")

Layer = Callable[..., Any]  # a class, or a function that makes a layer
Condition = Callable[[DecoderConfig, int | None], bool]


@dataclass(frozen=True)
class _Replacement:
    layer: Layer
    when: Condition


_replacements: dict[str, list[_Replacement]] = {name: [] for name in BUILT_IN}


def register_layer(
    built_in: str, layer: Layer, *, when: Condition = lambda config, index: True
) -> None:
    """Makes models use `layer` where they would use the built-in class of the name `built_in`:
    Attention, GatedMLP, MixtureOfExperts or RMSNorm.

    `layer` is called with the arguments of the class that it replaces. What it returns has the
    methods and attributes that the class documents; `layer` may be a subclass. `when` gets the
    model's configuration and the layer's index in the stack (None for a norm) and decides where the
    replacement applies. Of several whose condition holds, the last registered one is used.

    Raises InvalidParameterError for any other name. Models in transformers' code have none of these
    layers.
    """
    if built_in not in BUILT_IN:
        raise InvalidParameterError(
            "built_in", f"unknown layer {built_in!r}; there are: {', '.join(BUILT_IN)}"
        )
    _replacements[built_in].append(_Replacement(layer, when))


def unregister_layer(built_in: str, layer: Layer) -> None:
    """Removes a replacement. Models that are already built keep it.

    Raises InvalidParameterError if it is not registered.
    """
    found = [one for one in _replacements.get(built_in, []) if one.layer is layer]
    if not found:
        raise InvalidParameterError("layer", f"{built_in} has no replacement {layer!r}")
    _replacements[built_in].remove(found[-1])


def replacements() -> list[tuple[str, Layer]]:
    """The built-in layers' names with what replaces them, in order of registration."""
    return [(name, one.layer) for name, some in _replacements.items() for one in some]


def choose_layer(built_in: type, config: DecoderConfig, index: int | None) -> Layer:
    """The class itself, or what replaces it in this layer of this model."""
    for one in reversed(_replacements.get(built_in.__name__, [])):
        if one.when(config, index):
            return one.layer
    return built_in
