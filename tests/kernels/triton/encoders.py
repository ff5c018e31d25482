"""Tiny encoders of texts and images with the operations of a chosen device, on tensors of any
device, with weights that need no files.
"""

from __future__ import annotations

from typing import Any

import torch
from quire.executor.models import find_model
from quire.executor.models.encoder import Encoder
from quire.executor.models.layers import LayerFactory
from quire.executor.models.vision.encoder import VisionEncoder
from quire.executor.models.vision.tower import VisionTower
from quire.executor.weights.table import stored_shape
from quire.ipc.models.vision_families import tower_of
from quire.kernels import registry
from quire.kernels.ops import AttentionMetadata
from quire.tests.kernels.encoder_cases import encoder_metadata
from quire.tests.tiny_vision import tiny_vision_config

TEXT_SIZES = {
    "vocab_size": 90,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
# what each architecture has that the others lack is token types, a bias, a window and a gate
TEXTS: dict[str, dict[str, Any]] = {
    "BertModel": {},
    "MPNetModel": {},
    "ModernBertModel": {"local_attention": 8},
}
LENGTHS = [9, 1, 6]


def make_layers(device: str, memory: torch.device, head_dim: int) -> LayerFactory:
    """device: whose operations the layers have: those of "cuda", or the reference of "cpu"."""
    chosen = {} if device == "cuda" else dict.fromkeys(registry.CONTRACTS, "reference")
    ops = registry.select(device, torch.float32, chosen, head_dim=head_dim)
    return LayerFactory(ops, torch.float32, memory)


def fill(model: Any, make: LayerFactory) -> None:
    """With random weights. Those of norms are about 1, and others keep the size of their input."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.weights():
        shape = stored_shape(tensor)
        noise = torch.randn(shape, generator=generator)
        if name.endswith(("_min", "_max")):
            values = (2 + noise.tanh()) * (-1 if name.endswith("_min") else 1)
        elif len(shape) < 2:
            values = 0.2 * noise + name.endswith("weight")
        else:
            values = noise if "embed" in name else noise / noise[0].numel() ** 0.5
        make.fill(tensor, values)


def make_tower(kind: str, device: str, memory: torch.device) -> tuple[VisionEncoder, LayerFactory]:
    """An encoder of images, not filled."""
    tower = tower_of(tiny_vision_config(kind))
    make = make_layers(device, memory, tower.layer.attention.head_dim if tower.layer else 0)
    model = VisionTower(make, tower)
    return VisionEncoder(model, model, make), make


def make_text_encoder(name: str, device: str, memory: torch.device) -> tuple[Encoder, LayerFactory]:
    """A text encoder, not filled."""
    kind = find_model({"architectures": [name], **TEXT_SIZES, **TEXTS[name]})
    config = kind.parse_config({**TEXT_SIZES, **TEXTS[name]})
    make = make_layers(device, memory, config.head_dim)
    return kind.build(config, make, 64), make


def text_inputs(model: Encoder) -> list[torch.Tensor | AttentionMetadata]:
    """The arguments of a step with texts of LENGTHS."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(90, (sum(LENGTHS),), generator=generator, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    types = [(positions > 3).int()] if model.num_token_types else []
    return [ids, positions, encoder_metadata(LENGTHS), *types]
