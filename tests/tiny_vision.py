"""Tiny random models that read images, and what transformers makes of an image with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from quire.tests.tiny_models import make_tiny_config, save_tiny_tokenizer

HIDDEN = 64  # of the text model

# keys of vision_config
_TOWER: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "model_type": "qwen3_5_vision",
        "hidden_size": 32,
        "intermediate_size": 48,
        "depth": 2,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 36,
        "patch_size": 4,
    },
    "gemma3": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 24,
        "patch_size": 4,
        "vision_use_head": False,
    },
}
_WHOLE: dict[str, dict[str, Any]] = {"gemma3": {"mm_tokens_per_image": 4}}
_TEXT = {"qwen3_5": "qwen3_5_text", "gemma3": "gemma3_text"}
# (height, width) of images that a model takes
SIZES: dict[str, list[tuple[int, int]]] = {
    "qwen3_5": [(40, 24), (8, 8), (64, 96)],
    "gemma3": [(24, 24)],
}
KINDS = tuple(_TOWER)


def make_tiny_vision_model(kind: str, seed: int = 0) -> Any:
    """A random model of transformers, with values that show each norm, bias and position."""
    from transformers import AutoConfig, AutoModelForImageTextToText, logging

    logging.disable_progress_bar()
    text = make_tiny_config(_TEXT[kind]).to_dict()
    config = AutoConfig.for_model(
        kind, text_config=text, vision_config=_TOWER[kind], **_WHOLE.get(kind, {})
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or ".ln_" in name or "lambda" in name:
                parameter.copy_(0.8 + 0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            elif "embed" in name and "patch" not in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * 1.2 / parameter[0].numel() ** 0.5)
    return model


def save_tiny_vision_model(directory: str | Path, kind: str, seed: int = 0) -> Any:
    """Writes a checkpoint and returns transformers' model."""
    model = make_tiny_vision_model(kind, seed)
    model.save_pretrained(directory)
    save_tiny_tokenizer(directory)
    return model


def make_images(kind: str, seed: int = 0) -> list[torch.Tensor]:
    """u8 [height, width, 3] of each of the kind's sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (*s, 3), generator=generator).byte() for s in SIZES[kind]]


@torch.inference_mode()
def transformers_rows(model: Any, kind: str, pixels: torch.Tensor) -> torch.Tensor:
    """[rows, vectors * hidden_size]: transformers' tower and projector of one image."""
    return _ORACLES[kind](model, pixels)


def _normalised(pixels: torch.Tensor, mean: float = 0.5, std: float = 0.5) -> torch.Tensor:
    """[1, 3, height, width]"""
    return ((pixels.float() / 255 - mean) / std).permute(2, 0, 1)[None]


def _qwen(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    config = model.config.vision_config
    size, merge = config.patch_size, config.spatial_merge_size
    image = _normalised(pixels)[0]
    rows, columns = image.shape[1] // size, image.shape[2] // size
    cells = image.view(3, rows // merge, merge, size, columns // merge, merge, size)
    cells = cells.permute(1, 4, 2, 5, 0, 3, 6).flatten(0, 3)  # [P, 3, size, size]
    frames = cells[:, :, None].expand(-1, -1, config.temporal_patch_size, -1, -1).flatten(1)
    found = model.model.get_image_features(frames, torch.tensor([[1, rows, columns]]))
    parts = [torch.cat(list(found.pooler_output))]
    for deep in getattr(found, "deepstack_features", None) or []:
        parts.append(torch.cat(list(deep)) if isinstance(deep, (list, tuple)) else deep)
    return torch.cat(parts, 1)


def _pixel_values(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    return model.model.get_image_features(_normalised(pixels)).pooler_output.flatten(0, 1)


_ORACLES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "qwen3_5": _qwen,
    "gemma3": _pixel_values,
}
