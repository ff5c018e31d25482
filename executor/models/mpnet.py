"""MPNet: positions also as a bias of attention, which all layers share.

Must not know: files, requests, devices.

Song et al. 2020.
"""

from __future__ import annotations

from ...ipc.models.encoders import ENCODERS
from .encoder import Encoder


class MPNetModel(Encoder):
    built = ENCODERS["MPNetModel"]
    parse_config = staticmethod(built.parse)
