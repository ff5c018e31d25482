"""BERT and the models that differ from it in their table of positions: RoBERTa, XLM-RoBERTa,
CamemBERT.

Must not know: files, requests, devices.

Devlin et al. 2019; Liu et al. 2019. MiniLM and most embedding models are BERTs by their files.
"""

from __future__ import annotations

from ...ipc.models.encoders import ENCODERS
from .encoder import Encoder


class BertModel(Encoder):
    built = ENCODERS["BertModel"]
    parse_config = staticmethod(built.parse)


class RobertaModel(Encoder):
    built = ENCODERS["RobertaModel"]
    parse_config = staticmethod(built.parse)


class XLMRobertaModel(Encoder):
    built = ENCODERS["XLMRobertaModel"]
    parse_config = staticmethod(built.parse)


class CamembertModel(Encoder):
    built = ENCODERS["CamembertModel"]
    parse_config = staticmethod(built.parse)
