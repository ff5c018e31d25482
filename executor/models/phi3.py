"""Phi-3 and Phi-4: Llama whose checkpoint merges projections; part of a head may rotate, with
LongRoPE in the long versions.

Must not know: files, requests, devices.
"""

from __future__ import annotations

from ...ipc.models.architectures import ARCHITECTURES
from ...ipc.models.decoder_config import DecoderConfig
from .blocks import Attention, GatedMLP
from .decoder import Decoder
from .layers import LayerFactory


class Phi3ForCausalLM(Decoder):
    parse_config = staticmethod(ARCHITECTURES["Phi3ForCausalLM"].parse)

    def __init__(self, config: DecoderConfig, make: LayerFactory, max_model_len: int):
        ropes = make.ropes(config, max_model_len)
        super().__init__(
            make,
            config,
            make_attention=lambda layer: make.block(
                Attention,
                config,
                layer,
                ropes,
                qkv_bias=False,
                o_bias=False,
                qk_norm=False,
                is_merged=True,
            ),
            make_mlp=lambda layer: make.block(GatedMLP, config, layer, bias=False, is_merged=True),
        )
