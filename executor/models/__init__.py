"""Which class runs which architecture. `register_model` adds one from outside the package.

Must not know: how any model is built; its module is imported when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...ipc.errors import ModelLoadError

_MODELS: dict[str, str | type] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def register_model(architecture: str, model_class: type) -> None:
    """Makes `model_class` the model of configs that name `architecture`. models/llama.py shows what
    such a class has: parse_config(hf_config) -> DecoderConfig, and the constructor (config, make:
    LayerFactory, max_model_len).
    """
    _MODELS[architecture] = model_class


def find_model_class(hf_config: dict[str, Any]) -> type:
    """The class for the first supported name in `architectures`.

    Raises ModelLoadError that lists what is supported.
    """
    architectures = hf_config.get("architectures") or []
    for architecture in architectures:
        found = _MODELS.get(architecture)
        if isinstance(found, str):
            return getattr(import_module(f".{found}", __name__), architecture)
        if found is not None:
            return found
    named = (
        f"architecture {', '.join(architectures)} is not supported"
        if architectures
        else "config.json names no architecture"
    )
    raise ModelLoadError(f"{named}; supported: {', '.join(sorted(_MODELS))}")
