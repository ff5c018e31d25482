"""gpt-oss: a mixture of experts with biases and clamped gates, and attention with a sink per head,
in a window in every other layer (OpenAI 2025, arXiv 2508.10925).

Must not know: files, requests, devices.
"""

from __future__ import annotations

from ...ipc.models.architectures import ARCHITECTURES
from ...ipc.models.decoder_config import DecoderConfig
from .blocks import Attention
from .decoder import Decoder
from .experts import MixtureOfExperts
from .layers import LayerFactory


class GptOssForCausalLM(Decoder):
    parse_config = staticmethod(ARCHITECTURES["GptOssForCausalLM"].parse)

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
                qk_norm=False,
                has_sinks=True,
            ),
            make_mlp=lambda layer: make.block(MixtureOfExperts, config, layer),
        )
