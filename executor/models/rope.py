"""Rotary position embeddings: the table of cosines and sines for a model's config.

Must not know: layers, requests, how a table is applied (kernels/ops.py: rotary_embedding).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...ipc.models.rope_config import rotary_dim


def inverse_frequencies(
    rope: dict[str, Any], head_dim: int, num_positions: int = 0
) -> tuple[torch.Tensor, float]:
    """Returns inv_freq [rotary_dim // 2] f32 and the factor on cosines and sines.

    `num_positions` is the longest sequence, which chooses between the factors of "longrope".
    """
    head_dim = rotary_dim(rope, head_dim)
    inv_freq = 1.0 / (
        rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    )
    match rope["rope_type"]:
        case "linear":
            return inv_freq / rope["factor"], 1.0
        case "llama3":
            return _llama3(inv_freq, rope), 1.0
        case "factors":
            return inv_freq / torch.tensor(rope["factors"]), 1.0
        case "proportional":
            num_rotated = int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2)
            inv_freq[num_rotated:] = 0
            return inv_freq / rope.get("factor", 1.0), 1.0
        case "longrope":
            return _longrope(rope, head_dim, num_positions)
        case "yarn":
            return _yarn(rope, head_dim)
    return inv_freq, 1.0


def _llama3(inv_freq: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1 stretches long wavelengths by `factor`, keeps short ones, blends those between."""
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelength = 2 * math.pi / inv_freq
    stretched = inv_freq / rope["factor"]
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv_freq / rope["factor"] + smooth * inv_freq
    return torch.where(
        wavelength > original / low,
        stretched,
        torch.where(wavelength < original / high, inv_freq, blended),
    )


def _longrope(
    rope: dict[str, Any], head_dim: int, num_positions: int
) -> tuple[torch.Tensor, float]:
    """LongRoPE (arXiv 2402.13753): divides each frequency by a factor of its own.

    transformers chooses the factors by the current length of a sequence, which would make cached
    keys wrong. Quire chooses them by the longest sequence that the engine accepts, as vLLM does.
    """
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    factors = rope["long_factor" if num_positions > original else "short_factor"]
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        longer = math.log(factor) / math.log(original) if factor > 1 else 0.0
        attention_factor = math.sqrt(1 + longer)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope["rope_theta"] ** exponents)
    return inv_freq, attention_factor


def _yarn(rope: dict[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071, sections 3.2 and 3.4): keeps dimensions of high frequency and
    stretches those of low frequency.
    """
    theta, factor = rope["rope_theta"], rope["factor"]
    original = rope["original_max_position_embeddings"]

    def dimension_turning(num_rotations: float) -> float:
        return head_dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_turning(rope.get("beta_fast") or 32)
    high = dimension_turning(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2).float() - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    frequencies = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    inv_freq = 1.0 / (factor * frequencies) * (1 - kept) + 1.0 / frequencies * kept
    return inv_freq, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: dict[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
    return mscale(1.0)


def make_cos_sin_cache(rope: dict[str, Any], head_dim: int, num_positions: int) -> torch.Tensor:
    """[num_positions, rotary_dim] f32: the cosines of all angles, then their sines.

    Rope type "dynamic" uses the default's angles: ipc/rope_config.model_context keeps num_positions
    below the length at which they change.
    """
    inv_freq, factor = inverse_frequencies(rope, head_dim, num_positions)
    angles = torch.arange(num_positions).float()[:, None] * inv_freq
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)


def query_scales(rope: dict[str, Any], num_positions: int) -> torch.Tensor | None:
    """[num_positions] f32: the factors of queries, which grow with the position beyond the original
    length (Ministral 3, Llama 4); None where all are 1.
    """
    beta = rope.get("llama_4_scaling_beta")
    if beta is None or num_positions <= rope["original_max_position_embeddings"]:
        return None
    lengths = torch.arange(num_positions) / rope["original_max_position_embeddings"]
    return 1 + beta * torch.log(1 + lengths.floor())
