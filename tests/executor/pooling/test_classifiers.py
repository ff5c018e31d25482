"""Classifiers, cross-encoders and rerankers against transformers, alone and in a batch."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from quire.ipc.errors import InvalidParameterError
from quire.kernels import registry
from quire.tests.executor.pooling_core import pool, start_core
from quire.tests.tiny_encoders import ENCODERS, save_tiny_encoder
from quire.tests.tiny_models import save_tiny_model

SEQUENCE, TOKENS = "AutoModelForSequenceClassification", "AutoModelForTokenClassification"
LABELS = {"num_labels": 3}
# torch's kernels round a row by its place in the batch
HAS_NATIVE = registry.select("cpu", torch.bfloat16).chosen["layer_norm"] == "native"
CASES = [
    *((kind, SEQUENCE, LABELS) for kind in ENCODERS),
    ("bert", SEQUENCE, {"num_labels": 1}),
    ("modernbert", SEQUENCE, {**LABELS, "classifier_pooling": "mean", "classifier_bias": True}),
    ("qwen3", SEQUENCE, LABELS),
    ("qwen2", SEQUENCE, {"num_labels": 1}),
    ("llama", SEQUENCE, LABELS),
    ("gemma3_text", SEQUENCE, LABELS),
    *((kind, TOKENS, LABELS) for kind in ("bert", "distilbert", "modernbert", "qwen3")),
]


def texts_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(9)
    return [rng.choices(range(5, 300), k=length) for length in lengths]


TEXTS = texts_of(1, 40, 7, 100, 33)


def logits(directory: Path, auto: str) -> list[np.ndarray]:
    model = getattr(transformers, auto).from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([text])).logits[0].numpy() for text in TEXTS]


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(("kind", "auto", "changes"), CASES)
def test_logits_equal_those_of_transformers(tmp_path, kind, auto, changes):
    directory = save_tiny_encoder(tmp_path, kind, auto, pad_token_id=0, **changes)
    right = logits(directory, auto)
    task = "classify" if auto == SEQUENCE else "token_classify"
    core = start_core(directory)
    raw = {"use_activation": False, "skip_reading_prefix_cache": True}
    together = pool(core, TEXTS, task, **raw)
    for own, other in zip(together, right):
        assert own.shape == other.shape and abs(own - other).max() < 1e-5
    for text, own in zip(TEXTS, together if HAS_NATIVE or kind != "modernbert" else []):
        assert pool(core, [text], task, **raw)[0].tobytes() == own.tobytes()
    active = pool(core, TEXTS, task, skip_reading_prefix_cache=True)
    for own, other in zip(active, map(torch.tensor, right)):
        wanted = other.sigmoid() if changes["num_labels"] == 1 else other.softmax(-1)
        assert abs(own - wanted.numpy()).max() < 1e-6
    core.shutdown()


def test_chunks_and_a_cached_prefix_change_no_bit(tmp_path):
    directory = save_tiny_encoder(tmp_path, "qwen3", SEQUENCE, pad_token_id=0, **LABELS)
    whole, chunked = start_core(directory), start_core(directory, max_num_batched_tokens=16)
    first = pool(whole, TEXTS, "classify")
    for core in (whole, chunked):
        assert [x.tobytes() for x in pool(core, TEXTS, "classify")] == [x.tobytes() for x in first]
    assert whole.observer.get_metrics()["prefix_cache_hits"] > 0
    whole.shutdown(), chunked.shutdown()


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_is_made_of_two_tokens(tmp_path, tied):
    """Qwen3-Reranker: the softmax of the logits of "no" and "yes" behind the last token."""
    directory = save_tiny_model(tmp_path, "qwen3", tie_word_embeddings=tied)
    vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = [vocabulary["a"], vocabulary["he"]]
    with torch.inference_mode():
        pairs = [model(torch.tensor([text])).logits[0, -1, ids] for text in TEXTS]
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["a", "he"],
        "is_original_qwen3_reranker": True,
    }
    core = start_core(directory, hf_overrides=overrides)
    for own, pair in zip(pool(core, TEXTS, "classify"), pairs):
        assert own.shape == (1,) and abs(own - pair.softmax(-1)[1].numpy()).max() < 1e-5
    for own, pair in zip(pool(core, TEXTS, "classify", use_activation=False), pairs):
        assert abs(own - (pair[1] - pair[0]).numpy()).max() < 1e-5
    core.shutdown()
    one = {**overrides, "classifier_from_token": ["he"], "method": "no_post_processing"}
    core = start_core(directory, hf_overrides={**one, "is_original_qwen3_reranker": False})
    for own, pair in zip(pool(core, TEXTS, "classify", use_activation=False), pairs):
        assert abs(own - pair[1].numpy()).max() < 1e-5
    core.shutdown()


@pytest.mark.parametrize(
    ("kind", "auto", "tp", "pp"),
    [
        ("qwen3", SEQUENCE, 1, 2),
        ("reranker", "", 2, 2),
        pytest.param("qwen3", TOKENS, 2, 1, marks=pytest.mark.slow),
        pytest.param("gemma3_text", SEQUENCE, 1, 3, marks=pytest.mark.slow),
        pytest.param("embed", "", 2, 2, marks=pytest.mark.slow),
        pytest.param("untied", "", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_the_last_stage_pools(tmp_path, kind, auto, tp, pp):
    """Stages change no bit, tensor ranks only the last ones of sums."""
    task, settings = "classify", {"disable_hybrid_kv_cache_manager": True}
    if auto:
        directory = save_tiny_encoder(tmp_path, kind, auto, pad_token_id=0, **LABELS)
        task = "classify" if auto == SEQUENCE else "token_classify"
    else:
        directory = save_tiny_model(tmp_path, "qwen3", tie_word_embeddings=kind != "untied")
        overrides = {
            "architectures": ["Qwen3ForSequenceClassification"],
            "classifier_from_token": ["a", "he"],
            "is_original_qwen3_reranker": True,
        }
        settings |= {"convert": "embed"} if kind == "embed" else {"hf_overrides": overrides}
        task = "embed" if kind == "embed" else "classify"
    parallel = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    found = []
    for ranks in ({}, parallel):
        core = start_core(directory, max_num_batched_tokens=64, **settings, **ranks)
        core.scheduler.limits.least_samples = 1
        found.append(pool(core, TEXTS, task))
        core.shutdown()
    for one, several in zip(*found, strict=True):
        if tp == 1:
            assert one.tobytes() == several.tobytes()
        assert one.shape == several.shape and abs(one - several).max() < 1e-5


def test_logits_are_shifted_and_scaled_before_the_activation(tmp_path):
    directory = save_tiny_encoder(tmp_path, "bert", SEQUENCE, num_labels=1)
    wanted = {"logit_mean": 0.5, "logit_sigma": 2.0}
    core = start_core(directory, pooler_config=wanted)
    right = logits(directory, SEQUENCE)
    for own, other in zip(pool(core, TEXTS, "classify"), right):
        assert abs(own - torch.tensor((other - 0.5) / 2).sigmoid().numpy()).max() < 1e-6
    assert "task: must be one of classify for this model" in pool(core, TEXTS[:1], "embed")[0]
    core.shutdown()


def test_a_decoder_without_a_classifiers_weights_is_refused(tmp_path):
    directory = save_tiny_model(tmp_path, "qwen3")
    with pytest.raises(Exception, match=r"no file has the tensor score\.weight"):
        start_core(directory, convert="classify")
    with pytest.raises(InvalidParameterError, match="convert: must be none"):
        start_core(directory, runner="generate", convert="classify")
