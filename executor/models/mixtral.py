"""Mixtral: as Mistral, with a mixture of experts (Jiang et al. 2024).

Must not know: files, requests, devices.
"""

from __future__ import annotations

from ...ipc.models.architectures import ARCHITECTURES
from ...ipc.models.decoder_config import DecoderConfig
from .blocks import Attention
from .decoder import Decoder
from .experts import experts_or_mlp
from .layers import LayerFactory

_ARCHITECTURE = ARCHITECTURES["MixtralForCausalLM"]


class MixtralForCausalLM(Decoder):
    parse_config = staticmethod(_ARCHITECTURE.parse)

    def __init__(self, config: DecoderConfig, make: LayerFactory, max_model_len: int):
        ropes = make.ropes(config, max_model_len)
        super().__init__(
            make,
            config,
            make_attention=lambda layer: make.block(
                Attention, config, layer, ropes, qkv_bias=False, o_bias=False, qk_norm=False
            ),
            make_mlp=lambda layer: experts_or_mlp(make, config, _ARCHITECTURE.experts, layer),
        )
