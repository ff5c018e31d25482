"""Which encoders run in transformers' code, and what is read of their config.json."""

from __future__ import annotations

import pytest
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.encoders import (
    ENCODERS,
    FALLBACK_ENCODERS,
    is_fallback_encoder,
    parse_fallback_encoder,
)
from quire.ipc.models.fallback_architectures import (
    FALLBACKS,
    TRANSFORMERS,
    choose_implementation,
)
from quire.ipc.models.resolve_pooling import positions_of

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 200,
    "pad_token_id": 3,
}


@pytest.mark.parametrize("model_type", FALLBACK_ENCODERS)
def test_base_models_run_and_classifiers_are_refused(model_type):
    name = FALLBACK_ENCODERS[model_type].architecture
    family = name.removesuffix("Model")
    config = {**SIZES, "model_type": model_type}
    for names in ([name], None, [f"{family}ForMaskedLM"]):
        own = {**config, "architectures": names}
        assert is_fallback_encoder(own)
        assert choose_implementation(own, "auto") == (TRANSFORMERS, model_type)
    own = {**config, "architectures": [f"{family}ForSequenceClassification"]}
    with pytest.raises(ModelLoadError, match=f"{family}ForSequenceClassification|{model_type}"):
        choose_implementation(own, "auto")


def test_a_type_is_in_one_table():
    pages = {page.model_type for page in ENCODERS.values()}
    assert FALLBACK_ENCODERS.keys().isdisjoint(pages | FALLBACKS.keys())


def test_what_plan_and_runner_need_is_read():
    config = {**SIZES, "model_type": "data2vec-text", "architectures": ["Data2VecTextModel"]}
    parsed = parse_fallback_encoder(config)
    assert (parsed.max_position_embeddings, parsed.position_offset) == (196, 4)
    assert positions_of(config) == 196 and not parsed.has_pair_types
    electra = parse_fallback_encoder({**SIZES, "model_type": "electra", "embedding_size": 8})
    assert electra.has_pair_types and electra.max_position_embeddings == 200
    with pytest.raises(ModelLoadError, match="lacks hidden_size"):
        parse_fallback_encoder({"model_type": "electra"})
    with pytest.raises(ModelLoadError, match="must be more than 4, got 4"):
        parse_fallback_encoder({**config, "max_position_embeddings": 4})
