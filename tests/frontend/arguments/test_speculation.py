"""The configuration of a draft model follows from speculative_config and the model's."""

from __future__ import annotations

import msgspec
import pytest
from quire import EngineArgs, InvalidParameterError
from quire.ipc.models.memory_plan import QUANTIZATION_BITS
from quire.tests.tiny_models import save_tiny_model

DRAFTING = {"method": "draft_model", "model": "bundled"}


def resolve(**arguments):
    config = EngineArgs("bundled", **arguments).create_engine_config()
    return config, config.scheduler_config.speculative_config.draft_model_config


def test_what_a_draft_model_inherits():
    config, draft = resolve(
        speculative_config=DRAFTING, quantization="int8", max_model_len=300, dtype="bfloat16"
    )
    target = config.model_config
    for name in ("dtype", "quantization", "max_model_len", "runner"):
        assert getattr(draft, name) == getattr(target, name)
    for quantization in QUANTIZATION_BITS:
        _, draft = resolve(speculative_config=DRAFTING | {"quantization": quantization})
        assert draft.quantization == quantization
    assert msgspec.json.decode(msgspec.json.encode(config), type=type(config)) == config


def test_other_vocabularies_are_refused(tmp_path):
    save_tiny_model(tmp_path)
    with pytest.raises(
        InvalidParameterError, match="must have the vocabulary of the model that verifies, 2144"
    ):
        resolve(speculative_config=DRAFTING | {"model": str(tmp_path)})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "ngram"}, "model needs one of the methods"),
        ({"method": "ngram", "model": None, "quantization": "int8"}, "quantization needs one of"),
        ({"model": None}, "needs a model"),
        ({"model": "/nowhere"}, "model: "),
        ({"draft_model_config": {"model": "x"}}, "draft_model_config"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, words):
    with pytest.raises(InvalidParameterError, match=words):
        resolve(speculative_config=DRAFTING | changes)
