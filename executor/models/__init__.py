"""Maps architectures to model classes; `register_model` adds one from outside the package, and
`register_layer` replaces a layer of the built-in ones.

Must not know: how a model is built; its module is imported on first use.

`decoder.py`, `encoder.py`, `blocks.py`, `experts.py`, `layers.py` and `rope.py` are shared by the
other modules: the architectures.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...ipc.models.fallback_architectures import QUIRE, choose_implementation
from ...ipc.models.fallback_encoders import FALLBACK_ENCODERS
from .layer_registry import register_layer as register_layer

_MODELS: dict[str, str | type] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "GraniteForCausalLM": "granite",
    "Ministral3ForCausalLM": "ministral3",
    "MixtralForCausalLM": "llama",
    "Qwen2MoeForCausalLM": "qwen2",
    "Qwen3MoeForCausalLM": "qwen3",
    "OlmoeForCausalLM": "olmoe",
    "GptOssForCausalLM": "gpt_oss",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Mistral3ForConditionalGeneration": "ministral3",
    "BertModel": "bert",
    "RobertaModel": "bert",
    "XLMRobertaModel": "bert",
    "CamembertModel": "bert",
    "MPNetModel": "mpnet",
    "DistilBertModel": "distilbert",
    "ModernBertModel": "modernbert",
    "NomicBertModel": "nomic_bert",
}


def register_model(architecture: str, model_class: type) -> None:
    """Registers `model_class` for configs that name `architecture`.

    The class needs `parse_config(hf_config) -> DecoderConfig` and the constructor `(config, make:
    LayerFactory, max_model_len)`; models/llama.py is an example.
    """
    _MODELS[architecture] = model_class


def registered_models() -> dict[str, str | type]:
    """By architecture: a module of this package, or a registered class."""
    return dict(_MODELS)


def find_model_class(hf_config: dict[str, Any], model_impl: str = "auto") -> type:
    """Returns the class of the first supported name in `architectures`, or else of `model_type`.

    model_impl: see ipc/config.py. Raises ModelLoadError, which lists what is supported.
    """
    implementation, name = choose_implementation(hf_config, model_impl, _MODELS)
    if implementation != QUIRE and name in FALLBACK_ENCODERS:
        return import_module(".fallback.encoder", __name__).TransformersEncoder
    if implementation != QUIRE:
        return import_module(".fallback.model", __name__).TransformersModel
    found = _MODELS[name]
    if isinstance(found, str):
        return getattr(import_module(f".{found}", __name__), name)
    return found
