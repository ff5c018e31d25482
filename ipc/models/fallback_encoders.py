"""The text encoders that run in transformers' modelling code, without a head of their own.

Must not know: tensors, layers, torch, transformers. tests/executor/models/fallback/test_encoder.py
compares a model of each type with transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ModelLoadError
from .encoder_config import EncoderConfig, Keys
from .forms import EMBED, form_of


@dataclass(frozen=True)
class FallbackEncoder:
    """`has_types`: tokens have types, and the second text of a pair the type 1.
    `counts_behind_padding`: positions are counted behind the padding token's, as RoBERTa's are.
    """

    architecture: str
    has_types: bool = False
    counts_behind_padding: bool = False


FALLBACK_ENCODERS = {
    "albert": FallbackEncoder("AlbertModel", has_types=True),
    "data2vec-text": FallbackEncoder("Data2VecTextModel", counts_behind_padding=True),
    "electra": FallbackEncoder("ElectraModel", has_types=True),
    "ernie": FallbackEncoder("ErnieModel", has_types=True),
    "eurobert": FallbackEncoder("EuroBertModel"),
    "gte": FallbackEncoder("GteModel", has_types=True),
    "jina_embeddings_v3": FallbackEncoder("JinaEmbeddingsV3Model"),
    "roberta-prelayernorm": FallbackEncoder("RobertaPreLayerNormModel", counts_behind_padding=True),
    "xlm-roberta-xl": FallbackEncoder("XLMRobertaXLModel", counts_behind_padding=True),
}


@dataclass(frozen=True)
class FallbackEncoderConfig(EncoderConfig):
    hf_config: Mapping[str, Any] = field(default_factory=dict)  # what transformers reads


def is_fallback_encoder(hf_config: Mapping[str, Any]) -> bool:
    """Whether it is a base model, or one with a head that is left out, of one of these types."""
    model_type, names = hf_config.get("model_type"), hf_config.get("architectures") or []
    if not isinstance(model_type, str) or model_type not in FALLBACK_ENCODERS:
        return False
    return not names or form_of(hf_config) == EMBED


def parse_fallback_encoder(hf_config: dict[str, Any]) -> FallbackEncoderConfig:
    """What plan and runner need; transformers reads the rest.

    Raises ModelLoadError, naming the key, for one that is missing or out of range.
    """
    known = FALLBACK_ENCODERS[hf_config["model_type"]]
    keys = Keys({k: v for k, v in hf_config.items() if k != "embedding_size"}, {})
    offset = keys.size("pad_token_id", 1, least=0) + 1 if known.counts_behind_padding else 0
    rows = keys.size("max_position_embeddings", 512)
    if rows <= offset:
        raise ModelLoadError(
            f"config.json: max_position_embeddings must be more than {offset}, got {rows}"
        )
    num_types = keys.size("type_vocab_size", 2, least=0) if known.has_types else 0
    return FallbackEncoderConfig(
        **keys.basic(1e-12),
        max_position_embeddings=rows - offset,
        activation="",
        type_vocab_size=num_types,
        has_pair_types=num_types > 1,
        position_offset=offset,
        hf_config=hf_config,
    )
