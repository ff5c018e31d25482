"""OLMo 2 and 3: norms after each block instead of before it, and of q and k as a whole; OLMo 3 has
a sliding window in three of four layers.

Must not know: files, requests, devices.
"""

from __future__ import annotations

from ...ipc.models.architectures import ARCHITECTURES, POST_NORMS
from ...ipc.models.decoder_config import DecoderConfig
from .blocks import Attention, GatedMLP
from .decoder import Decoder
from .layers import LayerFactory


class Olmo2ForCausalLM(Decoder):
    parse_config = staticmethod(ARCHITECTURES["Olmo2ForCausalLM"].parse)

    def __init__(self, config: DecoderConfig, make: LayerFactory, max_model_len: int):
        ropes = make.ropes(config, max_model_len)
        bias = config.attention_bias
        super().__init__(
            make,
            config,
            make_attention=lambda layer: make.block(
                Attention,
                config,
                layer,
                ropes,
                qkv_bias=bias,
                o_bias=bias,
                qk_norm=True,
                qk_norm_whole=True,
            ),
            make_mlp=lambda layer: make.block(GatedMLP, config, layer, bias=False),
            norms=POST_NORMS,
        )


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    parse_config = staticmethod(ARCHITECTURES["Olmo3ForCausalLM"].parse)
