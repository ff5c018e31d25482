"""Llama 2 and 3, Mistral and Mixtral: grouped-query attention, with biases where the config has
them.

Must not know: files, requests, devices.

Mistral 7B adds a sliding window (Jiang et al. 2023), Mixtral a mixture of experts (Jiang et al.
2024).
"""

from __future__ import annotations

from typing import Any

from ...ipc.models.architectures import ARCHITECTURES
from ...ipc.models.decoder_config import DecoderConfig, parse_decoder_config
from .blocks import attention_for
from .decoder import Decoder
from .experts import experts_or_mlp
from .layers import LayerFactory


class LlamaForCausalLM(Decoder):
    @staticmethod
    def parse_config(hf_config: dict[str, Any]) -> DecoderConfig:
        return parse_decoder_config(hf_config, honours=("attention_bias", "mlp_bias", "is_causal"))

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
                qk_norm=False,
            ),
            make_mlp=lambda layer: experts_or_mlp(make, config, layer, bias=config.mlp_bias),
        )


class MistralForCausalLM(LlamaForCausalLM):
    @staticmethod
    def parse_config(hf_config: dict[str, Any]) -> DecoderConfig:
        return parse_decoder_config(hf_config, honours=("sliding_window", "is_causal"))


class MixtralForCausalLM(LlamaForCausalLM):
    parse_config = staticmethod(ARCHITECTURES["MixtralForCausalLM"].parse)
