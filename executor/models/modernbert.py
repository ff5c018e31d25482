"""ModernBERT: rotary positions, windows in two of three layers, gated MLPs, norms before blocks.

Must not know: files, requests, devices.

Warner et al. 2024.
"""

from __future__ import annotations

from ...ipc.models.encoders import ENCODERS
from .encoder import Encoder


class ModernBertModel(Encoder):
    built = ENCODERS["ModernBertModel"]
    parse_config = staticmethod(built.parse)
