"""A text encoder in transformers' code on Quire's linear layers and attention, without a cache.

Must not know: files, requests.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from ....ipc.errors import ModelLoadError
from ....ipc.models.encoders import FallbackEncoderConfig, parse_fallback_encoder
from ....ipc.models.stored_names import is_ignored
from ....kernels.ops import AttentionMetadata
from ...model import TextEncoder
from ...weights.converted import Conversion
from ..layers import LayerFactory, Weights
from .attention import encoding
from .faster import replace_faster
from .model import build
from .modules import replace_modules
from .names import plan_conversions

logger = logging.getLogger(__name__)


class TransformersEncoder(TextEncoder):
    """Its layers are those of transformers, with Quire's linear layers and attention."""

    IS_FALLBACK = True
    UNRECORDABLE = "its code is that of transformers"
    parse_config = staticmethod(parse_fallback_encoder)

    def __init__(self, config: FallbackEncoderConfig, make: LayerFactory, max_model_len: int):
        self.config, self.ops = config, make.ops
        hf_config = {k: v for k, v in config.hf_config.items() if k != "quantization_config"}
        hf = AutoConfig.for_model(hf_config.pop("model_type"), **hf_config)
        kind: Any = MODEL_MAPPING[type(hf)]
        has_pooler = "add_pooling_layer" in inspect.signature(kind.__init__).parameters
        options = {"add_pooling_layer": False} if has_pooler else {}
        self._model = model = build(kind, hf, make.dtype, **options)
        self._table = replace_modules(model, make, {}, None)
        self._replaced = replace_faster(model, make)
        if on_meta := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
            raise ModelLoadError(f"transformers leaves {on_meta[0]} without values")
        model.eval()
        self.num_token_types = 1 + config.has_pair_types if config.type_vocab_size else 0
        self._is_prepared = False
        logger.info("%s runs in transformers' code: Quire has no row for it", kind.__name__)

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """token_ids and token_types [T] i32, positions [T] i64 -> hidden states [T, hidden_size]"""
        named: dict[str, Any] = {}
        if token_types is not None:
            named["token_type_ids"] = token_types[None].long()
        with encoding(metadata, self.ops):
            return self._model(
                input_ids=token_ids[None],
                position_ids=positions[None] + self.config.position_offset,
                **named,
            ).last_hidden_state[0]

    def weights(self) -> Weights:
        """The tensors to fill, under transformers' names."""
        yield from self._table.items()

    def plan_conversions(self, stored: list[str]) -> list[Conversion]:
        prefix = f"{self._model.base_model_prefix}."
        needed = [
            name
            for name in stored
            if name.removeprefix(prefix) in self._table or not is_ignored(name, self.config)
        ]
        return plan_conversions(self._model, self._table, (), needed)

    def attention_layers(self) -> list[Any]:
        """Returns no layers, since none has a cache. Call it when all weights are there."""
        if not self._is_prepared:
            for module in self._replaced:
                module.prepare()
            self._is_prepared = True
        return []
