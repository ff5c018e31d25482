"""The memory of encoded images.

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


def table_bytes(config: EngineConfig, item_bytes: int) -> int:
    """The memory of that table. item_bytes: of a number of the model's dtype."""
    vision = config.model_config.vision
    if vision is None:
        return 0
    return encoder_cache_tokens(config) * vision.num_vectors * vision.hidden_size * item_bytes
