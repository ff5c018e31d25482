"""nomic-bert: BERT with rotary positions and gated MLPs, without biases.

Must not know: files, requests, devices.

Nussbaum et al. 2024.
"""

from __future__ import annotations

from ...ipc.models.encoders import ENCODERS
from .encoder import Encoder


class NomicBertModel(Encoder):
    built = ENCODERS["NomicBertModel"]
    parse_config = staticmethod(built.parse)
