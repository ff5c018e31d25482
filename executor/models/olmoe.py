"""OLMoE: a mixture of experts with norms of q and k as a whole (Muennighoff et al. 2024).

Must not know: files, requests, devices.
"""

from __future__ import annotations

from ...ipc.models.architectures import ARCHITECTURES
from ...ipc.models.decoder_config import DecoderConfig
from .blocks import Attention
from .decoder import Decoder
from .experts import experts_or_mlp
from .layers import LayerFactory


class OlmoeForCausalLM(Decoder):
    parse_config = staticmethod(ARCHITECTURES["OlmoeForCausalLM"].parse)

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
                qkv_bias=config.attention_bias,
                o_bias=config.attention_bias,
                qk_norm=True,
                qk_norm_whole=True,
            ),
            make_mlp=lambda layer: experts_or_mlp(make, config, layer),
        )
