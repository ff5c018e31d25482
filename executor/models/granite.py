"""Granite, dense: Llama with factors on the embedding, each block's result, attention and logits.

Must not know: files, requests, devices.
"""

from __future__ import annotations

from ...ipc.models.architectures import ARCHITECTURES
from .llama import LlamaForCausalLM


class GraniteForCausalLM(LlamaForCausalLM):
    parse_config = staticmethod(ARCHITECTURES["GraniteForCausalLM"].parse)
