"""Qwen2 and Qwen2.5: grouped-query attention with biases on q, k and v; later layers may have a
sliding window. Qwen2-MoE and Qwen1.5-MoE have a mixture of experts beside one that all tokens
share.

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

_HONOURED = ("attention_bias", "use_sliding_window", "is_causal")


class Qwen2ForCausalLM(Decoder):
    @staticmethod
    def parse_config(hf_config: dict[str, Any]) -> DecoderConfig:
        # transformers' Qwen2 has biases whatever attention_bias says. A checkpoint without them
        # fails because their names are missing.
        return parse_decoder_config(hf_config, honours=_HONOURED)

    def __init__(self, config: DecoderConfig, make: LayerFactory, max_model_len: int):
        ropes = make.ropes(config, max_model_len)
        super().__init__(
            make,
            config,
            make_attention=lambda layer: make.block(
                attention_for(config),
                config,
                layer,
                ropes,
                qkv_bias=True,
                o_bias=False,
                qk_norm=False,
            ),
            make_mlp=lambda layer: experts_or_mlp(make, config, layer),
        )


class Qwen2MoeForCausalLM(Qwen2ForCausalLM):
    parse_config = staticmethod(ARCHITECTURES["Qwen2MoeForCausalLM"].parse)
