"""SmolLM3: Llama, in which every fourth layer does not rotate (NoPE; Yang et al. 2025).

Must not know: files, requests, devices.
"""

from __future__ import annotations

from ...ipc.models.architectures import ARCHITECTURES
from .llama import LlamaForCausalLM


class SmolLM3ForCausalLM(LlamaForCausalLM):
    parse_config = staticmethod(ARCHITECTURES["SmolLM3ForCausalLM"].parse)
