"""Maps architectures to model classes; `register_model` adds one from outside the package.

Must not know: how a model is built; its module is imported on first use.

`decoder.py`, `blocks.py`, `layers.py` and `rope.py` are shared by the other modules: the
architectures.
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
    "Gemma3ForCausalLM": "gemma3",
}


def register_model(architecture: str, model_class: type) -> None:
    """Registers `model_class` for configs that name `architecture`.

    The class needs `parse_config(hf_config) -> DecoderConfig` and the constructor `(config, make:
    LayerFactory, max_model_len)`; models/llama.py is an example.
    """
    _MODELS[architecture] = model_class


def find_model_class(hf_config: dict[str, Any]) -> type:
    """Returns the class of the first supported name in `architectures`, or else of `model_type`.

    Raises ModelLoadError, which lists what is supported.
    """
    architecture = find_architecture(hf_config, _MODELS)
    found = _MODELS[architecture]
    if isinstance(found, str):
        return getattr(import_module(f".{found}", __name__), architecture)
    return found
