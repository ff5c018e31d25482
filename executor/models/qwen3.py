"""Qwen3: as Qwen2, with q/k norms instead of biases and an independent head size.
Qwen3-MoE has a mixture of experts in all layers, or in some.

Must not know: files, requests, devices.
"""

from __future__ import annotations

from typing import Any

from ...ipc.models.architectures import ARCHITECTURES
from ...ipc.models.decoder_config import DecoderConfig, parse_decoder_config
from .blocks import attention_for
from .decoder import Decoder
from .experts import experts_or_mlp
from .layers import LayerFactory


class Qwen3ForCausalLM(Decoder):
    @staticmethod
    def parse_config(hf_config: dict[str, Any]) -> DecoderConfig:
        return parse_decoder_config(
            hf_config,
            default_head_dim=128,
            honours=("attention_bias", "use_sliding_window", "is_causal"),
        )

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
            make_mlp=lambda layer: experts_or_mlp(make, config, layer),
        )


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    parse_config = staticmethod(ARCHITECTURES["Qwen3MoeForCausalLM"].parse)
