"""Tiny random models that read images, and what transformers makes of an image with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from quire.ipc.models.vision_config import VisionConfig
from quire.ipc.models.vision_families import OF_CLIP, OF_IMAGENET
from quire.tests.tiny_models import GEMMA4_EXPERTS, make_tiny_config, save_tiny_tokenizer

HIDDEN = 64  # of the text model
IMAGE_TOKEN = 250  # the placeholder


def _mrope(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections]}


_QWEN: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 3,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": 4,
}
_VIT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
}
# keys of vision_config
_TOWER: dict[str, dict[str, Any]] = {
    "qwen3_5": _QWEN | {"model_type": "qwen3_5_vision", "num_position_embeddings": 36},
    "qwen3_vl": _QWEN
    | {
        "model_type": "qwen3_vl_vision",
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1],
    },
    "qwen3_vl_moe": _QWEN
    | {
        "model_type": "qwen3_vl_moe_vision",
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1],
    },
    "qwen2_5_vl": _QWEN
    | {"model_type": "qwen2_5_vl_vision", "window_size": 24, "fullatt_block_indexes": [1]},
    "gemma3": _VIT
    | {"model_type": "siglip_vision_model", "image_size": 24, "vision_use_head": False},
    "gemma4": _VIT
    | {
        "model_type": "gemma4_vision",
        "head_dim": 16,
        "num_key_value_heads": 2,
        "position_embedding_size": 64,
        "use_clipped_linears": True,
        "standardize": True,
    },
    "gemma4_unified": {
        "model_type": "gemma4_unified_vision",
        "patch_size": 2,
        "mm_embed_dim": HIDDEN,
        "mm_posemb_size": 40,
        "output_proj_dims": HIDDEN,
    },
    "mistral3": _VIT | {"model_type": "pixtral", "head_dim": 16, "image_size": 64},
    "llava": _VIT | {"model_type": "pixtral", "head_dim": 16, "image_size": 64},
    "idefics3": _VIT | {"model_type": "idefics3_vision", "image_size": 24},
    "smolvlm": _VIT | {"model_type": "smolvlm_vision", "image_size": 24},
    "internvl": _VIT
    | {
        "model_type": "internvl_vision",
        "image_size": [24, 24],
        "patch_size": [4, 4],
        "num_hidden_layers": 4,
        "attention_bias": True,
    },
    "internvl_normed": _VIT
    | {
        "model_type": "internvl_vision",
        "image_size": [24, 24],
        "patch_size": [4, 4],
        "use_qk_norm": True,
        "norm_type": "rms_norm",
        "use_mean_pooling": False,
    },
    "lfm2_vl": _VIT
    | {
        "model_type": "siglip2_vision_model",
        "num_patches": 16,
        "patch_size": 16,
        "vision_use_head": False,
    },
}
# keys of config.json beside its parts
_WHOLE: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "llava": {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    "lfm2_vl": {"projector_hidden_size": 40},
    "idefics3": {"scale_factor": 3},
}
_TEXT = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen2_5_vl": "qwen2",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_whole": "gemma4_text",
    "gemma4_unified": "gemma4_text",
    "mistral3": "ministral3",
    "llava": "mistral",
    "idefics3": "llama",
    "smolvlm": "llama",
    "internvl": "qwen2",
    "internvl_normed": "qwen3",
    "lfm2_vl": "lfm2",
}
# keys of text_config in place of those of a tiny model without an encoder
_TEXT_KEYS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"model_type": "qwen3_vl_text", "head_dim": 16, "rope_parameters": _mrope(4, 2, 2)},
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe_text",
        "head_dim": 16,
        "rope_parameters": _mrope(4, 2, 2),
    },
    "qwen2_5_vl": {"model_type": "qwen2_5_vl_text", "rope_parameters": _mrope(2, 3, 3)},
    "gemma4_whole": GEMMA4_EXPERTS
    | {"use_bidirectional_attention": "vision", "use_double_wide_mlp": False},
    "gemma4_unified": {
        "model_type": "gemma4_unified_text",
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
    },
}
_QWEN_SIZES = [(40, 24), (8, 8), (64, 96)]
# (height, width) of images that a model takes
SIZES: dict[str, list[tuple[int, int]]] = {
    "gemma3": [(24, 24)],
    "mistral3": [(40, 24), (8, 16)],
    "llava": [(20, 16), (8, 8), (24, 32)],
    "gemma4": [(24, 36), (12, 12)],
    "gemma4_whole": [(24, 36), (12, 12)],
    "gemma4_unified": [(24, 36), (6, 6)],
    "idefics3": [(24, 24), (12, 12)],
    "smolvlm": [(24, 24), (16, 16)],
    "internvl": [(24, 24)],
    "internvl_normed": [(24, 24)],
    "lfm2_vl": [(64, 64), (128, 32), (32, 96)],
}
KINDS = tuple(_TOWER)
# tokens of an image see each other, as in 26B-A4B; the encoder is that of others
_TOWER["gemma4_whole"] = _TOWER["gemma4"] | {"use_clipped_linears": False}


_FAMILIES = {
    "qwen3_vl_moe": "qwen3_vl",
    "llava": "pixtral",
    "smolvlm": "idefics3",
    "internvl_normed": "internvl",
}


def tiny_vision_config(kind: str) -> VisionConfig:
    """What describes the kind's encoder, without files."""
    return VisionConfig(
        family=_FAMILIES.get(kind, kind),
        hidden_size=HIDDEN,
        tower=_TOWER[kind],
        whole=_WHOLE.get(kind, {}),
        image_token_id=IMAGE_TOKEN,
        unit=1,
    )


def make_tiny_vision_model(
    kind: str,
    seed: int = 0,
    text: dict[str, Any] = {},
    vision: dict[str, Any] = {},
    whole: dict[str, Any] = {},
) -> Any:
    """A random model of transformers, with values that show each norm, bias and position.

    text, vision, whole: keys of text_config, vision_config and config.json in place of the tiny
    ones.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText, logging

    logging.disable_progress_bar()
    text_kind = text.get("model_type", _TEXT[kind])
    parts = {
        "text_config": make_tiny_config(text_kind).to_dict() | _TEXT_KEYS.get(kind, {}) | text,
        "vision_config": _TOWER[kind] | vision,
    }
    own = _WHOLE.get(kind, {}) | whole
    config = AutoConfig.for_model(
        kind.removesuffix("_normed").removesuffix("_whole"), **parts, **own
    )
    for name in ("image_token_id", "image_token_index"):
        if getattr(config, name, None) is not None:
            setattr(config, name, IMAGE_TOKEN)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("_min", "_max")):
                parameter.fill_((2.5 if "input" in name else 1.5) + 0.5 * noise.tanh())
                if name.endswith("_min"):
                    parameter.neg_()
            elif name.endswith("std_scale"):
                parameter.copy_(1.0 + 0.2 * noise)
            elif name.endswith("std_bias"):
                parameter.copy_(0.5 * noise)
            elif name not in parameters:
                continue  # a buffer that follows from config.json
            elif "norm" in name or ".ln_" in name or "lambda" in name:
                parameter.copy_(0.8 + 0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            elif "embed" in name and "patch" not in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * 1.2 / parameter[0].numel() ** 0.5)
    return model


def save_tiny_vision_model(directory: str | Path, kind: str, seed: int = 0, **parts: Any) -> Any:
    """Writes a checkpoint and returns transformers' model. parts: see make_tiny_vision_model."""
    model = make_tiny_vision_model(kind, seed, **parts)
    model.save_pretrained(directory)
    save_tiny_tokenizer(directory)
    return model


def make_images(kind: str, seed: int = 0) -> list[torch.Tensor]:
    """u8 [height, width, 3] of each of the kind's sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(256, (*s, 3), generator=generator).byte()
        for s in SIZES.get(kind, _QWEN_SIZES)
    ]


@torch.inference_mode()
def transformers_rows(model: Any, kind: str, pixels: torch.Tensor) -> torch.Tensor:
    """[rows, vectors * hidden_size]: transformers' tower and projector of one image."""
    return _ORACLES[kind](model, pixels)


@torch.inference_mode()
def transformers_tokens(
    model: Any, kind: str, prompt: list[int], images: list[torch.Tensor], count: int
) -> list[int]:
    """The `count` tokens that transformers' whole model continues the prompt with, greedily and
    without a cache. images: u8 [height, width, 3] each, in the places of IMAGE_TOKEN.
    """
    tokens = list(prompt)
    for _ in range(count):
        inputs = transformers_inputs(model, kind, tokens, images)
        tokens.append(int(model(use_cache=False, **inputs).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.inference_mode()
def transformers_inputs(
    model: Any,
    kind: str,
    tokens: list[int],
    images: list[torch.Tensor],
    image_token: int = IMAGE_TOKEN,
) -> dict[str, Any]:
    """The arguments of transformers' whole model; see transformers_tokens."""
    ids = torch.tensor([tokens])
    types = (ids == image_token).long()
    if kind in _INPUTS:
        inputs = _INPUTS[kind](model, images, types) if images else {}
        return inputs | {"input_ids": ids}
    # rows take the places of embeddings, and nothing else is different
    inputs = {"inputs_embeds": model.get_input_embeddings()(ids)}
    if images:
        rows = torch.cat([transformers_rows(model, kind, one) for one in images])
        inputs["inputs_embeds"][types == 1] = rows
    return inputs


def _normalised(pixels: torch.Tensor, mean: Any = 0.5, std: Any = 0.5) -> torch.Tensor:
    """[1, 3, height, width]"""
    scaled = (pixels.float() / 255 - torch.tensor(mean)) / torch.tensor(std)
    return scaled.permute(2, 0, 1)[None]


def _patches(image: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """image [3, height, width] -> patches [1, P, size * size * 3] and their places [1, P, 2], x
    first
    """
    rows, columns = image.shape[1] // size, image.shape[2] // size
    cells = image.view(3, rows, size, columns, size).permute(1, 3, 2, 4, 0)
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
    return cells.reshape(1, rows * columns, -1), places[None]


def _qwen_patches(model: Any, pixels: torch.Tensor, *normal: Any) -> tuple[torch.Tensor, list[int]]:
    """[patches, numbers of a patch], and the image's grid of patches: time, rows, columns."""
    config = model.config.vision_config
    size, merge = config.patch_size, config.spatial_merge_size
    image = _normalised(pixels, *normal)[0]
    rows, columns = image.shape[1] // size, image.shape[2] // size
    cells = image.view(3, rows // merge, merge, size, columns // merge, merge, size)
    cells = cells.permute(1, 4, 2, 5, 0, 3, 6).flatten(0, 3)  # [P, 3, size, size]
    frames = cells[:, :, None].expand(-1, -1, config.temporal_patch_size, -1, -1).flatten(1)
    return frames, [1, rows, columns]


def _qwen(model: Any, pixels: torch.Tensor, *normal: Any) -> torch.Tensor:
    frames, grid = _qwen_patches(model, pixels, *normal)
    found = model.model.get_image_features(frames, torch.tensor([grid]))
    parts = [torch.cat(list(found.pooler_output))]
    for deep in getattr(found, "deepstack_features", None) or []:
        parts.append(torch.cat(list(deep)) if isinstance(deep, (list, tuple)) else deep)
    return torch.cat(parts, 1)


def _gemma4(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    patches, places = _patches(_normalised(pixels, 0.0, 1.0)[0], 4)
    return torch.cat(list(model.model.get_image_features(patches, places).pooler_output))


def _gemma4_unified(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    patches, places = _patches(_normalised(pixels, 0.0, 1.0)[0], 6)
    return torch.cat(list(model.model.get_image_features(patches, places).pooler_output))


def _pixtral(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    sizes = torch.tensor([pixels.shape[:2]])
    found = model.model.get_image_features(_normalised(pixels, *OF_CLIP), image_sizes=sizes)
    return torch.cat(list(found.pooler_output))


def _idefics(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    return torch.cat(model.model.get_image_features(_normalised(pixels)[None]).pooler_output)


def _lfm2(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    patches, _ = _patches(_normalised(pixels)[0], 16)
    shape = torch.tensor([[pixels.shape[0] // 16, pixels.shape[1] // 16]])
    mask = torch.ones(1, patches.shape[1], dtype=torch.int32)
    return torch.cat(model.model.get_image_features(patches, shape, mask).pooler_output)


def _pixel_values(model: Any, pixels: torch.Tensor, *normal: Any) -> torch.Tensor:
    found = model.model.get_image_features(_normalised(pixels, *normal))
    return found.pooler_output.flatten(0, 1)


def _internvl(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    return _pixel_values(model, pixels, *OF_IMAGENET)


_ORACLES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "qwen3_5": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "qwen2_5_vl": lambda model, pixels: _qwen(model, pixels, *OF_CLIP),
    "gemma3": _pixel_values,
    "gemma4": _gemma4,
    "gemma4_whole": _gemma4,
    "gemma4_unified": _gemma4_unified,
    "mistral3": _pixtral,
    "llava": _pixtral,
    "idefics3": _idefics,
    "smolvlm": _idefics,
    "internvl": _internvl,
    "internvl_normed": _internvl,
    "lfm2_vl": _lfm2,
}


def _qwen_inputs(
    model: Any, images: list[torch.Tensor], types: torch.Tensor, *normal: Any
) -> dict[str, Any]:
    patches, grids = zip(*(_qwen_patches(model, pixels, *normal) for pixels in images))
    return {
        "pixel_values": torch.cat(patches),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": types,
    }


def _gemma3_inputs(model: Any, images: list[torch.Tensor], types: torch.Tensor) -> dict[str, Any]:
    return {"pixel_values": torch.cat([*map(_normalised, images)]), "token_type_ids": types}


def _gemma4_inputs(
    model: Any, images: list[torch.Tensor], types: torch.Tensor, size: int
) -> dict[str, Any]:
    parts = [_patches(_normalised(pixels, 0.0, 1.0)[0], size) for pixels in images]
    most = max(places.shape[1] for _, places in parts)
    patches = torch.zeros(len(parts), most, 3 * size * size)
    places = torch.full((len(parts), most, 2), -1)  # of padding
    for i, (own, there) in enumerate(parts):
        patches[i, : own.shape[1]], places[i, : own.shape[1]] = own[0], there[0]
    return {
        "pixel_values": patches,
        "image_position_ids": places,
        "mm_token_type_ids": types,
    }


def _internvl_inputs(model: Any, images: list[torch.Tensor], types: torch.Tensor) -> dict[str, Any]:
    return {"pixel_values": torch.cat([_normalised(one, *OF_IMAGENET) for one in images])}


# the arguments of transformers' whole model for images; types: 1 in the places of images
_INPUTS: dict[str, Callable[..., dict[str, Any]]] = {
    "qwen3_5": _qwen_inputs,
    "qwen3_vl": _qwen_inputs,
    "qwen2_5_vl": lambda *step: _qwen_inputs(*step, *OF_CLIP),
    "gemma3": _gemma3_inputs,
    "internvl": _internvl_inputs,
}
WHOLE_KINDS = tuple(_INPUTS)  # of each kind of positions and masks one
_INPUTS |= {
    "qwen3_vl_moe": _qwen_inputs,
    "gemma4": lambda *step: _gemma4_inputs(*step, 4),
    "gemma4_whole": lambda *step: _gemma4_inputs(*step, 4),
    "gemma4_unified": lambda *step: _gemma4_inputs(*step, 6),
}
OTHER_KINDS = tuple(kind for kind in _TOWER if kind not in WHOLE_KINDS)
