"""DistilBERT: BERT without token types.

Must not know: files, requests, devices.

Sanh et al. 2019.
"""

from __future__ import annotations

from ...ipc.models.encoders import ENCODERS
from .encoder import Encoder


class DistilBertModel(Encoder):
    built = ENCODERS["DistilBertModel"]
    parse_config = staticmethod(built.parse)
