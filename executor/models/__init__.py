"""Finds how the model of a config.json is made; `register_model` adds an architecture from outside
the package, and `register_layer` replaces a layer of the built-in ones.

Must not know: how a model is built; its module is imported on first use.

An architecture is a row of ipc/models/: `decoder.py` and `encoder.py` build the model from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...ipc.models.architectures import NATIVE, Architecture
from ...ipc.models.decoder_config import DecoderConfig
from ...ipc.models.encoders import FALLBACK_ENCODERS, EncoderArchitecture
from ...ipc.models.fallback_architectures import QUIRE, choose_implementation
from .layer_registry import register_layer as register_layer

_MODELS: dict[str, Architecture | EncoderArchitecture | type] = dict(NATIVE)


@dataclass(frozen=True)
class ModelKind:
    """How a model is made: from the row of its architecture, by a class, or in transformers' code.

    `build(config, make: LayerFactory, max_model_len)` returns it unfilled; config is what
    `parse_config(hf_config)` returns.
    """

    name: str  # of the architecture, or of the class
    parse_config: Callable[[dict[str, Any]], Any]
    build: Callable[..., Any]
    is_fallback: bool = False  # whether transformers reads config.json
    row: Architecture | None = None  # of which it is made


def register_model(architecture: str, model: Architecture | type) -> None:
    """Makes `model` the model of every config that names `architecture`. `model` is the row of a
    model with built-in layers, or a class.

    The class needs `parse_config(hf_config) -> DecoderConfig` and the constructor `(config, make:
    LayerFactory, max_model_len)`; docs/extending.md has an example.
    """
    _MODELS[architecture] = model


def registered_models() -> dict[str, Any]:
    """The row or the registered class of each architecture."""
    return dict(_MODELS)


def find_model(hf_config: dict[str, Any], model_impl: str = "auto") -> ModelKind:
    """The kind of the first supported name in `architectures`, or else of `model_type`.

    model_impl: see ipc/config.py. Raises ModelLoadError, which lists what is supported.
    """
    implementation, name = choose_implementation(hf_config, model_impl, _MODELS)
    if implementation != QUIRE:
        return _fallback(name)
    found = _MODELS[name]
    if isinstance(found, Architecture):
        return ModelKind(name, found.parse, partial(_decoder, found), row=found)
    if isinstance(found, EncoderArchitecture):
        from .encoder import Encoder

        return ModelKind(name, found.parse, partial(Encoder, found))
    made: Any = found
    return ModelKind(made.__name__, made.parse_config, made)


def _decoder(row: Architecture, config: DecoderConfig, *args: Any) -> Any:
    from .decoder import Decoder

    if config.altup is None:
        return Decoder.of_row(row, config, *args)
    from .altup import AltUpDecoder

    return AltUpDecoder.of_row(row, config, *args)


def _fallback(model_type: str) -> ModelKind:
    made: Any
    if model_type in FALLBACK_ENCODERS:
        from .fallback.encoder import TransformersEncoder as made
    else:
        from .fallback.model import TransformersModel as made
    return ModelKind(made.__name__, made.parse_config, made, is_fallback=made.IS_FALLBACK)
