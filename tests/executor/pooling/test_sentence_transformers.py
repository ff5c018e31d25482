"""Folders as sentence-transformers writes them, from files to embeddings: Dense modules, prompts
that are left out, shorter embeddings, other weights.
"""

from __future__ import annotations

import json
import random
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from quire.ipc.errors import ModelLoadError
from quire.tests.executor.pooling_core import pool, raw_rows, start_core
from quire.tests.ipc.models.test_sentence_transformers import NORMALIZE, OLD, chain, write
from quire.tests.tiny_encoders import EMBEDDING_GEMMA, save_tiny_encoder
from safetensors.torch import save_file

TEXTS = [random.Random(i).choices(range(5, 300), k=k) for i, k in enumerate((12, 40, 7, 100))]
WIDTHS = (64, 96, 32)


def add_dense(directory: Path, seed: int) -> list[torch.Tensor]:
    """EmbeddingGemma's two layers, without biases and activations."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(b, a, generator=generator) / 8 for a, b in pairwise(WIDTHS)]
    for index, weight in enumerate(weights, start=2):
        folder = directory / f"{index}_Dense"
        folder.mkdir(exist_ok=True)
        save_file({"linear.weight": weight}, folder / "model.safetensors")
    return weights


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> tuple[Path, list[torch.Tensor]]:
    """As EmbeddingGemma's folder."""
    directory = save_tiny_encoder(tmp_path_factory.mktemp("st"), "gemma3_text", **EMBEDDING_GEMMA)
    path = directory / "config.json"
    lengths = {"matryoshka_dimensions": [8, 16]}
    path.write_text(json.dumps(json.loads(path.read_text()) | lengths))
    identity = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    dense = [
        (f"{OLD}Dense", f"{i}_Dense", {**identity, "in_features": a, "out_features": b})
        for i, (a, b) in enumerate(pairwise(WIDTHS), start=2)
    ]
    pooling = {"pooling_mode_mean_tokens": True, "include_prompt": False}
    limits = {"max_seq_length": 200}
    write(directory, chain(pooling, *dense, NORMALIZE), sentence_bert_config=limits)
    return directory, add_dense(directory, 0)


def through(rows: np.ndarray, weights: list[torch.Tensor], size: int = WIDTHS[-1]) -> np.ndarray:
    """A row [64] or rows behind the Dense modules, cut and normalised."""
    x = torch.from_numpy(rows)
    for weight in weights:
        x = F.linear(x, weight)
    return F.normalize(x[..., :size], dim=-1).numpy()


def test_rows_pass_the_dense_modules(gemma):
    directory, weights = gemma
    plain = save_tiny_encoder(directory.parent / "plain", "gemma3_text", **EMBEDDING_GEMMA)
    bare, core = start_core(plain), start_core(directory, max_model_len=None)
    rows = raw_rows(bare, TEXTS)
    assert core.config.model_config.max_model_len == 200
    together = pool(core, TEXTS)
    for text, row, own in zip(TEXTS, rows, together):
        assert abs(own - through(row.mean(0), weights)).max() < 1e-5
        assert pool(core, [text])[0].tobytes() == own.tobytes()
    for row, own in zip(rows, pool(core, TEXTS, dimensions=8)):
        assert abs(own - through(row.mean(0), weights, 8)).max() < 1e-5
    for row, own in zip(rows, pool(core, TEXTS, "token_embed")):
        assert abs(own - through(row, weights)).max() < 1e-5
    for row, own in zip(rows, pool(core, TEXTS, instruction_length=5)):
        assert abs(own - through(row[5:].mean(0), weights)).max() < 1e-5
    (error,) = pool(core, TEXTS[:1], instruction_length=12)
    assert error.startswith("instruction_length: must be less than the prompt")
    bare.shutdown(), core.shutdown()


def test_other_weights_bring_their_dense_modules(gemma, tmp_path):
    directory, weights = gemma
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    others = add_dense(tmp_path, 1)
    core = start_core(directory)
    before = pool(core, TEXTS)
    core.call_utility("load_weights", [str(tmp_path)])
    raw = pool(core, TEXTS)
    assert not np.allclose(raw[0], before[0], atol=1e-3)
    assert weights[0].shape == others[0].shape
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"2_Dense has no model\.safetensors"):
        core.executor.load_weights(str(tmp_path))
    assert [x.tobytes() for x in pool(core, TEXTS)] == [x.tobytes() for x in raw]
    core.shutdown()


def test_lengths_that_the_model_has_not_are_refused(gemma):
    with pytest.raises(Exception, match="dimensions: must be one of 8, 16, got 12"):
        start_core(gemma[0], pooler_config={"dimensions": 12})
    core = start_core(gemma[0], pooler_config={"dimensions": 16})
    assert pool(core, TEXTS)[0].shape == (16,)
    core.shutdown()
