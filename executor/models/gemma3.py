"""Gemma 3, text: norms before and after each block with weights around zero, GELU, a scaled
embedding, and five layers with a window and rotary frequencies of their own for each one without.

Must not know: files, requests, devices.
"""

from __future__ import annotations

import torch

from ...ipc.models.architectures import ARCHITECTURES, SANDWICH_NORMS
from ...ipc.models.decoder_config import DecoderConfig
from .blocks import GatedMLP, attention_for
from .decoder import Decoder
from .layers import LayerFactory


class Gemma3ForCausalLM(Decoder):
    parse_config = staticmethod(ARCHITECTURES["Gemma3ForCausalLM"].parse)

    def __init__(self, config: DecoderConfig, make: LayerFactory, max_model_len: int):
        ropes = make.ropes(config, max_model_len)
        bias = config.attention_bias
        super().__init__(
            make,
            config,
            make_attention=lambda layer: make.block(
                attention_for(config),
                config,
                layer,
                ropes,
                qkv_bias=bias,
                o_bias=bias,
                qk_norm=True,
            ),
            make_mlp=lambda layer: make.block(GatedMLP, config, layer, bias=False),
            norms=SANDWICH_NORMS,
        )
        # transformers multiplies by a number of the model's dtype
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=make.dtype).item()


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text part of the versions that see images."""

    parse_config = staticmethod(ARCHITECTURES["Gemma3ForConditionalGeneration"].parse)
