"""Which class runs which architecture. `register_model` adds one from outside the package.

Must not know: how any model is built; its module is imported when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...ipc.architectures import find_architecture

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
    """The class of the first supported name in `architectures`; without that key, of `model_type`.

    Raises ModelLoadError that lists what is supported.
    """
    architecture = find_architecture(hf_config, _MODELS)
    found = _MODELS[architecture]
    if isinstance(found, str):
        return getattr(import_module(f".{found}", __name__), architecture)
    return found
