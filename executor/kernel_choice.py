"""What a choice of kernels means for the user: refusals and warnings.

Must not know: how kernels are chosen (kernels/registry.py), the model, requests.
"""

from __future__ import annotations

import json
import logging

import torch

from ..ipc.config import EngineConfig
from ..ipc.errors import InvalidParameterError
from ..ipc.models.decoder_config import DecoderConfig
from ..ipc.models.encoder_config import EncoderConfig
from ..ipc.models.ranks import row_of
from ..kernels import registry
from .plugins import describe_module, is_of_plugin

logger = logging.getLogger(__name__)

SERVED_BY = {
    "fp8": "the kernels for NVIDIA GPUs; use auto",
    "int8": "the native CPU kernels and those for NVIDIA GPUs for a head_dim that is a multiple of "
    "16 up to 512, and they do not serve here; use auto",
}

# On a GPU, the kernels with which the bits of a row depend on that row and its context alone. Those
# of the other operations are so anyway, see docs/kernels.md.
# With FP8 activations few rows are multiplied by other instructions than many.
INVARIANT_ON_A_GPU = {
    "pack_linear": "triton",
    "pack_gguf_linear": "triton",
    "paged_attention": "triton_invariant",
}


def chosen_kernels(
    config: EngineConfig, shape: DecoderConfig | EncoderConfig, device: torch.device
) -> dict[str, str]:
    """Returns the implementations that `kernels` names, and those that `batch_invariant` means.

    Raises InvalidParameterError for what cannot be had with batch_invariant on a GPU.
    """
    kernels = config.device_config.kernels
    if not config.device_config.batch_invariant or device.type != "cuda":
        return kernels
    for op, name in INVARIANT_ON_A_GPU.items():
        if kernels.get(op, name) != name:
            raise InvalidParameterError(
                "batch_invariant", f'needs the kernel "{name}" for {op}, not "{kernels[op]}"'
            )
    if problem := _varies_on_a_gpu(config, shape):
        raise InvalidParameterError("batch_invariant", f"must be False on a GPU {problem}")
    return kernels | INVARIANT_ON_A_GPU


def _varies_on_a_gpu(config: EngineConfig, shape: DecoderConfig | EncoderConfig) -> str:
    if isinstance(shape, EncoderConfig) or shape.is_bidirectional:
        return "with an encoder of texts, whose kernels have not been examined"
    if shape.latent is not None:
        return "with multi-head latent attention, which multiplies by cuBLAS"
    if row_of(config.model_config)[0] is None:
        return "with a model in transformers' code"
    if config.model_config.vision is not None:
        return "with an encoder of images, whose kernels have not been examined"
    return ""


def check_invariance(
    config: EngineConfig, ops: registry.OpTable, shape: DecoderConfig | EncoderConfig
) -> None:
    """Raises InvalidParameterError if batch_invariant is set and kernels were chosen on a CPU whose
    bits depend on other rows.
    """
    attention = "encoder_attention" if shape.is_bidirectional else "paged_attention"
    if isinstance(shape, DecoderConfig) and shape.latent is not None:
        attention = "latent_attention"
    slow = [op for op in ("pack_linear", attention) if op not in ops.native]
    if config.device_config.batch_invariant and slow:
        raise InvalidParameterError(
            "batch_invariant",
            f"needs the native kernels on a CPU, and {' and '.join(slow)} would be computed by "
            f"another one (the log says why)",
        )


def warn_of_slow_heads(head_dim: int, ops: registry.OpTable, overrides: dict[str, str]) -> None:
    """Logs what it means that the native kernels take no heads of this size. It is silent where
    they would not be chosen anyway.
    """
    op = "paged_attention"
    if ops.native and op not in ops.native and op not in overrides:
        logger.warning(
            "head_dim=%d: native attention takes multiples of 8 up to 512, so PyTorch computes it: "
            "more slowly, and the last bits of a request's logits may depend on the requests "
            "beside it",
            head_dim,
        )


def check_latent_cache(kv_cache_dtype: str) -> None:
    """Raises InvalidParameterError for a cache of latent vectors in another dtype."""
    if kv_cache_dtype != "auto":
        raise InvalidParameterError(
            "kv_cache_dtype",
            f"{kv_cache_dtype} does not serve multi-head latent attention, whose cache is in the "
            f"model's dtype; use auto",
        )


def warn_of_slow_latents(row: int, ops: registry.OpTable, overrides: dict[str, str]) -> None:
    """Does what warn_of_slow_heads does, for a cache that keeps `row` numbers of a token."""
    op = "latent_attention"
    if ops.native and op not in ops.native and op not in overrides:
        logger.warning(
            "kv_lora_rank + qk_rope_head_dim = %d: native latent attention takes multiples of 8 up "
            "to 576, so PyTorch computes it, more slowly",
            row,
        )


def warn_of_unused_kernels(ops: registry.OpTable, overrides: dict[str, str]) -> None:
    """Logs for which operations a plugin has kernels of which none is chosen, unless `overrides`
    names another kernel.
    """
    for op in ops.chosen.keys() - overrides.keys():
        declined: dict[str, list[str]] = {}  # by plugin
        for one in registry.implementations(op):
            if is_of_plugin(one.function.__module__):
                names = declined.setdefault(describe_module(one.function.__module__), [])
                names.append(one.name)
        for plugin, names in declined.items():
            if ops.chosen[op] not in names:
                logger.warning(
                    "%s replaces no kernel of %s: %r is used, because the predicate of %s declines "
                    "this model or its priority is lower",
                    plugin,
                    op,
                    ops.chosen[op],
                    " and ".join(map(repr, names)),
                )


def check_quantization(
    quantization: str | None, ops: registry.OpTable, overrides: dict[str, str]
) -> None:
    """Raises InvalidParameterError if quantized layers have no fast kernels.

    The slow reference is used only if `kernels` names it.
    """
    op, slow = "pack_quantized_linear", "reference"
    if quantization is not None and ops.chosen[op] == slow and overrides.get(op) != slow:
        raise InvalidParameterError(
            "quantization",
            f"{quantization} needs the native CPU kernels with dtype bfloat16 or float32, or a GPU "
            f"with Triton, and none of them serves here (the log says why); "
            f'leave quantization out, or set kernels={{"{op}": "{slow}"}}, which is slow',
        )


def check_kv_cache_dtype(
    kv_cache_dtype: str, ops: registry.OpTable, overrides: dict[str, str]
) -> None:
    """Raises InvalidParameterError if no fast kernels support such a cache.

    The slow reference is used only if `kernels` names it.
    """
    readers = dict.fromkeys(("reshape_and_cache", "paged_attention"), "reference")
    if kv_cache_dtype != "auto" and any(
        ops.chosen[op] == slow and overrides.get(op) != slow for op, slow in readers.items()
    ):
        raise InvalidParameterError(
            "kv_cache_dtype",
            f"{kv_cache_dtype} is served by {SERVED_BY[kv_cache_dtype]}, or set "
            f"kernels={json.dumps(readers)}, which is slow",
        )
