"""Ministral 3, text: Mistral with YaRN, and queries that grow with their position beyond the
original length.

Must not know: files, requests, devices.
"""

from __future__ import annotations

from ...ipc.models.architectures import ARCHITECTURES
from .llama import LlamaForCausalLM


class Ministral3ForCausalLM(LlamaForCausalLM):
    parse_config = staticmethod(ARCHITECTURES["Ministral3ForCausalLM"].parse)


class Mistral3ForConditionalGeneration(Ministral3ForCausalLM):
    """The text part of the versions that see images."""

    parse_config = staticmethod(ARCHITECTURES["Mistral3ForConditionalGeneration"].parse)
