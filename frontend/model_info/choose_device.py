"""Chooses where a model runs if `device` is "auto": on a GPU that has room for it, otherwise on the
CPU. The log says which, and why.

Must not know: torch, which is not imported.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from ...ipc.config import EngineConfig, resolved
from ...ipc.errors import InvalidParameterError
from ...ipc.models.memory_plan import free_of_share
from ...ipc.models.ranks import num_ranks
from .gpu_memory import gpu_memory_bytes

logger = logging.getLogger(__name__)

GIB = 2**30


def choose_device(config: EngineConfig, resolve: Callable[[], EngineConfig]) -> str:
    """Returns "cuda" or "cpu". `config` is as it was given; `resolve` returns it as it is on a GPU.

    Raises what `resolve` raises, except for what a GPU does not offer.
    """
    try:
        free_bytes, total_bytes = gpu_memory_bytes()
    except InvalidParameterError:
        return "cpu"  # most machines have no GPU: nothing to say
    reason = _why_not(config)
    if reason is None:
        try:
            needed = needed_bytes(on_gpu := resolve())
        except InvalidParameterError as error:
            reason = str(error)
        else:
            share = on_gpu.cache_config.gpu_memory_utilization
            free_bytes = free_of_share(free_bytes, total_bytes, share)
            numbers = (
                f"{needed / GIB:.1f} GiB are needed, {max(0, free_bytes) / GIB:.1f} GiB of the GPU "
                f"are free (gpu_memory_utilization={share})"
            )
            if needed <= free_bytes:
                logger.info("device: cuda: %s", numbers)
                return "cuda"
            reason = numbers
    logger.warning("device: the CPU, though there is a GPU: %s", reason)
    return "cpu"


def _why_not(config: EngineConfig) -> str | None:
    """What speaks against any GPU; None: nothing."""
    device_config = config.device_config
    if not torch_has_cuda():
        return "PyTorch is built without CUDA"
    if num_ranks(config) > 1 or device_config.data_parallel_size > 1:
        return "several ranks or engines run on GPUs with device=cuda alone"
    if device_config.cpu_isa != "auto":
        return f"cpu_isa={device_config.cpu_isa} is set"
    for name, value in (
        ("quantization", config.model_config.quantization),
        ("kv_cache_dtype", config.cache_config.kv_cache_dtype),
    ):
        if value in ("int8", "int4"):
            return f"{name}={value} runs on a GPU with device=cuda alone"
    return None


def torch_has_cuda() -> bool:
    """Reads torch/version.py: importing torch takes a second."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return False
    path = Path(found.origin).with_name("version.py")
    return path.exists() and re.search(r"^cuda\b.*= *['\"]\d", path.read_text(), re.M) is not None


def needed_bytes(config: EngineConfig) -> int:
    """The bytes of a GPU that an engine of this resolved configuration takes at least: weights, the
    largest step, and the cache and state of one request of max_model_len.
    """
    # know all architectures, which a machine without a GPU does not need
    from ...ipc.models.gguf_weights import DTYPE_BYTES
    from .model_sizes import encoder_bytes, kv_bytes_per_token, measure_model

    model, scheduler, cache = config.model_config, config.scheduler_config, config.cache_config
    sizes = measure_model(model.hf_config, model.model, model.model_impl)
    num_bytes = sizes.weights_bytes(model.dtype) + encoder_bytes(model.vision, model.dtype)
    most_tokens = resolved(scheduler.max_num_batched_tokens)
    num_logits = min(most_tokens, scheduler.max_num_seqs)
    num_bytes += sizes.step_bytes(model.dtype, most_tokens, num_logits)
    num_bytes += sizes.step_bytes(model.dtype, scheduler.max_num_seqs, num_logits)
    length = resolved(model.max_model_len) + 2 * cache.block_size
    num_bytes += length * kv_bytes_per_token(sizes.config, model.dtype, cache.kv_cache_dtype)
    return num_bytes + scheduler.max_num_seqs * sizes.config.state_bytes(DTYPE_BYTES[model.dtype])
