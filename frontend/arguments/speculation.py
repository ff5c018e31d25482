"""The meaning of speculative_config: conflicts are refused, and the draft model's files are found.

Must not know: how drafts are made, torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ...ipc.config import EngineConfig, ModelConfig, SpeculativeConfig, resolved
from ...ipc.errors import InvalidParameterError, ModelLoadError
from ...ipc.models.gguf import is_gguf
from ...ipc.models.rope_config import model_context
from ..model_info.model_files import find_model_directory, read_hf_config

OPTION = "speculative_config"
HEADS = ("eagle3", "mtp")
MODEL_METHODS = ("draft_model", *HEADS)


def check_speculation(config: EngineConfig) -> None:
    """Raises InvalidParameterError for arguments that do not go together, whatever the model is."""
    wanted = config.scheduler_config.speculative_config
    if wanted is None:
        return
    if wanted.prompt_lookup_min > wanted.prompt_lookup_max:
        raise InvalidParameterError(
            OPTION,
            f"prompt_lookup_min must be at most prompt_lookup_max={wanted.prompt_lookup_max}, got "
            f"{wanted.prompt_lookup_min}",
        )
    if wanted.method in ("draft_model", "eagle3") and wanted.model is None:
        raise InvalidParameterError(OPTION, f"method {wanted.method} needs a model")
    if wanted.method not in MODEL_METHODS:
        for name in ("model", "revision", "quantization"):
            if (value := getattr(wanted, name)) is not None:
                raise InvalidParameterError(
                    OPTION,
                    f"{name} needs one of the methods {', '.join(MODEL_METHODS)}, got {value!r} "
                    f"with {wanted.method}",
                )
    if wanted.method in HEADS and config.lora_config.enable_lora:
        raise InvalidParameterError(OPTION, f"method {wanted.method} needs enable_lora=False")
    if wanted.draft_model_config is not None:
        raise InvalidParameterError(OPTION, "draft_model_config follows from model; leave it out")


def resolve_speculation(scheduler_config: Any, config: EngineConfig, target: ModelConfig) -> Any:
    """Returns scheduler_config with the configuration of the model or head that drafts, if there is
    one. `target` is the resolved configuration of the model that verifies. Raises
    InvalidParameterError.
    """
    wanted = scheduler_config.speculative_config
    if wanted is None or wanted.method not in MODEL_METHODS:
        return scheduler_config
    draft = _draft_model_config(wanted, config, target)
    return msgspec.structs.replace(
        scheduler_config,
        speculative_config=msgspec.structs.replace(wanted, draft_model_config=draft),
    )


def _draft_model_config(
    wanted: SpeculativeConfig, config: EngineConfig, target: ModelConfig
) -> ModelConfig:
    if target.runner != "generate":
        raise InvalidParameterError(OPTION, "needs a model that generates text")
    name = wanted.model or target.model
    try:
        directory = find_model_directory(
            name,
            revision=wanted.revision,
            weights=config.load_config.load_format != "dummy" or wanted.method in HEADS,
            download_dir=config.load_config.download_dir,
        )
        hf_config = read_hf_config(directory, {})
    except ModelLoadError as error:
        raise InvalidParameterError(OPTION, f"model: {error}") from error
    sizes = {
        kind: (of.get("text_config") or of).get("vocab_size")
        for kind, of in (("draft", hf_config), ("target", target.hf_config))
    }
    if sizes["draft"] != sizes["target"]:
        raise InvalidParameterError(
            OPTION,
            f"model: must have the vocabulary of the model that verifies, {sizes['target']} "
            f"tokens; that of {name} has {sizes['draft']}",
        )
    if wanted.method == "eagle3" and is_gguf(directory):
        raise InvalidParameterError(OPTION, f"model: EAGLE-3 is in safetensors files, got {name}")
    if wanted.method == "mtp":
        _check_mtp(directory, target)
    longest = resolved(target.max_model_len)
    return msgspec.structs.replace(
        target,
        model=str(directory),
        tokenizer=str(directory),
        served_model_name=name,
        quantization=wanted.quantization or target.quantization,
        max_model_len=min(longest, model_context(hf_config) or longest),
        hf_config=hf_config,
        hf_overrides={},
        model_impl="auto",
        logits_processors=[],
        pooler_config=None,
        pooling=None,
        vision=None,  # a draft model reads text alone; a head reads the rows of the model's images
    )


def _check_mtp(directory: Path, target: ModelConfig) -> None:
    """Raises InvalidParameterError for a model whose heads for multi-token prediction are unknown,
    and ModelLoadError for files in `directory` that have none.
    """
    # know all architectures, which a help text does not need
    from ...ipc.models.architectures import ARCHITECTURES
    from ...ipc.models.decoder_config import DecoderConfig
    from ...ipc.models.draft_heads import find_heads, head_config, why_no_head
    from ...ipc.models.fallback_architectures import parse_model

    try:
        _, architecture, shape = parse_model(target.hf_config, target.model_impl)
    except ModelLoadError:
        return  # of a plugin: the engine knows it
    if not isinstance(shape, DecoderConfig):
        raise InvalidParameterError(OPTION, "needs a model that generates text")
    row = ARCHITECTURES.get(architecture)
    if reason := why_no_head(row, shape):
        raise InvalidParameterError(OPTION, f"method mtp is not offered for {reason}")
    assert row is not None
    head = head_config(row, target.hf_config)
    find_heads(directory, shape.num_hidden_layers, head.num_hidden_layers, 1)
