"""The memory of encoded images, and which ranks have it.

Must not know: pixels, how an image is encoded, torch.
"""

from __future__ import annotations

from ..config import EngineConfig

LEAST_CACHE_TOKENS = 16384


def encoder_cache_tokens(config: EngineConfig) -> int:
    """The rows of the executor's table of encoded images."""
    chosen = config.multimodal_config.encoder_cache_tokens
    budget = config.scheduler_config.max_num_batched_tokens or 0
    return chosen or max(LEAST_CACHE_TOKENS, budget)


def has_encoder(config: EngineConfig, stage: int) -> bool:
    """Whether the ranks of a stage encode images, each into a table of its own: those of the first
    stage and, where a head reads the rows to draft, those of the last one.
    """
    last = config.device_config.pipeline_parallel_size - 1
    if config.model_config.vision is None:
        return False
    return stage == 0 or (stage == last and config.scheduler_config.has_draft_head)


def num_encoders(config: EngineConfig) -> int:
    """How many ranks of an engine encode images; see has_encoder."""
    device_config = config.device_config
    stages = range(device_config.pipeline_parallel_size)
    return device_config.tensor_parallel_size * sum(has_encoder(config, stage) for stage in stages)


def table_bytes(config: EngineConfig, item_bytes: int) -> int:
    """The memory of that table. item_bytes: of a number of the model's dtype."""
    vision = config.model_config.vision
    if vision is None:
        return 0
    return encoder_cache_tokens(config) * vision.num_vectors * vision.hidden_size * item_bytes
