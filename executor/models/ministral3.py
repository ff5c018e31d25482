"""Ministral 3, text: Mistral with YaRN, and queries that grow with their position beyond the
original length.

Must not know: files, requests, devices.
"""

from __future__ import annotations

from ...ipc.architectures import ARCHITECTURES
from .llama import LlamaForCausalLM


class Ministral3ForCausalLM(LlamaForCausalLM):
    parse_config = staticmethod(ARCHITECTURES["Ministral3ForCausalLM"].parse)
