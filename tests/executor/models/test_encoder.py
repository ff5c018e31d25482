"""Text encoders against transformers with the same weights, alone and in a batch, with and without
the base's prefix, and in int8.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from quire.ipc.errors import InvalidParameterError
from quire.kernels import registry
from quire.tests.executor.on_device import LateCopies, keep_on_device
from quire.tests.executor.pooling_core import pool, raw_rows, start_core
from quire.tests.tiny_encoders import EMBEDDING_GEMMA, ENCODERS, save_tiny_encoder
from quire.tests.tiny_models import save_tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel

KINDS = {
    **dict.fromkeys(ENCODERS, {}),
    "gemma3_text": EMBEDDING_GEMMA,
    "qwen2": {"is_causal": False},
}
LENGTHS = (1, 7, 33, 64, 150, 20, 2, 100)


needs_native = pytest.mark.skipif(
    registry.select("cpu", torch.bfloat16).chosen["layer_norm"] != "native",
    reason="torch's kernels round a row by its place in the batch",
)


def texts_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(5)
    return [rng.choices(range(5, 300), k=length) for length in lengths]


TEXTS = texts_of(*LENGTHS)


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """encoder(kind) returns the directory of a checkpoint."""

    @cache
    def make(kind: str) -> Path:
        return save_tiny_encoder(tmp_path_factory.mktemp(kind), kind, **KINDS[kind])

    return make


def expected(directory: Path, **inputs) -> list[np.ndarray]:
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [
            model(torch.tensor([text]), **{k: v[i] for k, v in inputs.items()})
            .last_hidden_state[0]
            .numpy()
            for i, text in enumerate(TEXTS)
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_equal_those_of_transformers(encoder, kind):
    core = start_core(encoder(kind))
    together = raw_rows(core, TEXTS)
    for own, other in zip(together, expected(encoder(kind))):
        assert own.shape == other.shape and abs(own - other).max() < 1e-5
    means = pool(core, TEXTS)
    for own, rows in zip(means, together):
        mean = rows.mean(0)
        assert abs(own - mean / np.linalg.norm(mean)).max() < 1e-6
    assert core.observer.get_metrics()["prefix_cache_queries"] == 0
    core.shutdown()


YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0}
SCALED = {
    "nomic_bert": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
    "modernbert": {
        "full_attention": YARN | {"original_max_position_embeddings": 64},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_angles(kind, tmp_path):
    save_tiny_encoder(tmp_path, kind, rope_parameters=SCALED[kind])
    core = start_core(tmp_path)
    for own, other in zip(raw_rows(core, TEXTS), expected(tmp_path), strict=True):
        assert abs(own - other).max() < 1e-5
    core.shutdown()


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["bert", "mpnet", "modernbert", "nomic_bert", "gemma3_text"])
def test_a_batch_changes_no_bit(encoder, kind, dtype):
    core = start_core(encoder(kind), dtype=dtype)
    assert core.executor.runner.program is not None  # one native call per step
    for text, own in zip(TEXTS, raw_rows(core, TEXTS)):
        assert raw_rows(core, [text])[0].tobytes() == own.tobytes()
    for text, own in zip(TEXTS, pool(core, TEXTS)):
        assert pool(core, [text])[0].tobytes() == own.tobytes()
    core.shutdown()


@pytest.mark.parametrize("kind", ["bert", "nomic_bert"])
def test_the_second_text_of_a_pair_has_another_type(encoder, kind):
    starts = [0, 3, 10, 1, 60, 19, 1, 50]
    types = [
        torch.tensor([[int(0 < start <= i) for i in range(len(text))]])
        for text, start in zip(TEXTS, starts)
    ]
    core = start_core(encoder(kind))
    right = expected(encoder(kind), token_type_ids=types)
    for text, start, other in zip(TEXTS, starts, right):
        (own,) = pool(core, [text], "token_embed", use_activation=False, second_text_start=start)
        assert abs(own - other).max() < 1e-5
    core.shutdown()


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_on_a_device_the_bits_are_the_same(kind, monkeypatch, tmp_path):
    """A cross-encoder whose tables and token types are on a device, as those of a GPU are."""
    directory = save_tiny_encoder(tmp_path, kind, "AutoModelForSequenceClassification")
    found = []
    for is_on_device in (False, True):
        if is_on_device:
            keep_on_device(monkeypatch, LateCopies())
        core = start_core(directory)
        assert (core.executor.state.tables is not None) == is_on_device
        pairs = pool(core, TEXTS[2:4], "classify", second_text_start=10)
        found.append([x.tobytes() for x in pairs])
        core.shutdown()
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "mpnet", "modernbert", "qwen2"])
def test_a_base_prefix_and_heads_of_other_tasks_are_read_over(encoder, kind, tmp_path):
    """A checkpoint of the base model, and one of the model with another head."""
    import shutil

    directory = encoder(kind)
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    stored = load_file(directory / "model.safetensors")
    prefix = {"xlm-roberta": "roberta."}.get(kind, f"{kind}.")
    prefix = "model." if kind in ("modernbert", "qwen2") else prefix
    renamed = {prefix + name: tensor for name, tensor in stored.items()}
    renamed["lm_head.dense.weight"] = torch.zeros(3, 5)
    renamed[f"{prefix}embeddings.position_ids"] = torch.arange(7)[None]
    save_file(renamed, tmp_path / "model.safetensors")
    cores = start_core(directory), start_core(tmp_path)
    own, other = (pool(core, TEXTS) for core in cores)
    assert [x.tobytes() for x in own] == [x.tobytes() for x in other]
    for core in cores:
        core.shutdown()


def test_int8_weights_change_little(encoder):
    core, plain = (start_core(encoder("bert"), quantization=q) for q in ("int8", None))
    for own, other in zip(pool(core, TEXTS), pool(plain, TEXTS)):
        assert own @ other > 0.99
        assert not np.array_equal(own, other)
    core.shutdown(), plain.shutdown()


def test_packed_weights_are_restored(encoder, tmp_path):
    directory = encoder("mpnet")  # with a table that a bias is computed from
    results = []
    for _ in range(2):
        core = start_core(directory, quantization="int8", packed_weights_cache=str(tmp_path))
        results.append([x.tobytes() for x in pool(core, TEXTS)])
        core.shutdown()
    assert results[0] == results[1] and list(tmp_path.glob("*.packed"))


def test_an_encoder_generates_no_text(encoder):
    with pytest.raises(InvalidParameterError, match="runner: must be pooling"):
        start_core(encoder("bert"), runner="generate")


def test_a_decoder_without_an_output_head_pools(tmp_path):
    """Qwen3-Embedding's files: the architecture is a causal model's, the head is missing."""
    directory = save_tiny_model(tmp_path, "qwen3", tie_word_embeddings=False)
    path = directory / "model.safetensors"
    stored = load_file(path)
    bare = {n.removeprefix("model."): x for n, x in stored.items() if n != "lm_head.weight"}
    whole = start_core(directory, runner="pooling")
    right = pool(whole, TEXTS)
    save_file(bare, path)
    core = start_core(directory, runner="pooling")
    assert not core.executor.model.has_head
    assert [x.tobytes() for x in pool(core, TEXTS)] == [x.tobytes() for x in right]
    whole.shutdown(), core.shutdown()
