"""all-MiniLM-L6-v2: 1,000 sentences against transformers and the mean of the tokens, which is what
sentence-transformers computes.

    python tests/real_models/fetch.py minilm && pytest -m real_models tests/real_models
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from quire import LLM, PoolingParams
from quire.tests.gguf_checkpoints import write_encoder_gguf
from quire.tests.gguf_tokenizers import texts
from quire.tests.real_models.fetch import fetch_folder

pytestmark = [pytest.mark.real_models, pytest.mark.timeout(1200)]

TEXT = """the of and to in is it that was for on are with as his they at be this from have or by one
had not but what all were when we there can an your which their said if do will each about how up
out them then she many some so these would other into has more her two like him see time could no
make than first been its who now people my made over did down only way find use water long little
very after word called just where most know embedding Zürich naïve 北京 42 unbelievable transformers
photosynthesis, tokenization; don't (maybe) e-mail?"""


def sentences(count: int) -> list[str]:
    """Of 1 to 400 words: some are longer than the model reads."""
    rng, words = random.Random(0), TEXT.split()
    lengths = [min(400, int(rng.expovariate(1 / 20)) + 1) for _ in range(count)]
    return [" ".join(rng.choices(words, k=length)) for length in lengths]


@pytest.fixture(scope="module")
def folder() -> Path:
    return fetch_folder("minilm")


@pytest.fixture(scope="module")
def expected(folder) -> np.ndarray:
    """[1000, 384]"""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    with torch.inference_mode():
        for text in sentences(1000):
            # max_seq_length of sentence_bert_config.json
            ids = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
            rows.append(F.normalize(model(**ids).last_hidden_state.mean(1))[0])
    return torch.stack(rows).numpy()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_embeddings_are_those_of_sentence_transformers(folder, expected, dtype, tolerance):
    with LLM(str(folder), dtype=dtype, engine="inproc") as llm:
        found = np.array([one.outputs.embedding for one in llm.embed(sentences(1000))])
    assert found.shape == expected.shape
    assert abs(found - expected).max() < tolerance
    assert (found * expected).sum(1).min() > 1 - tolerance
    assert abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-6


@pytest.mark.parametrize(
    ("type", "dtype", "tolerance"),
    [("F32", "float32", 1e-5), ("F16", "float32", 1e-3), ("Q8_0", "bfloat16", 5e-3)],
)
def test_a_gguf_file_has_the_tokens_and_embeddings(
    folder, expected, type, dtype, tolerance, tmp_path
):
    """As llama.cpp converts the model: 1,000 sentences, cut as the folder's files say."""
    from transformers import AutoTokenizer

    tokenizer, path = AutoTokenizer.from_pretrained(folder), tmp_path / "minilm.gguf"
    write_encoder_gguf(path, folder, type)
    params = PoolingParams(truncate_prompt_tokens=256)
    with LLM(str(path), dtype=dtype, engine="inproc") as llm:
        ours = llm.get_tokenizer()
        for text in [*sentences(1000), *texts(3000)]:
            assert ours.encode(text) == tokenizer(text)["input_ids"], repr(text)
        found = np.array(
            [one.outputs.embedding for one in llm.embed(sentences(1000), pooling_params=params)]
        )
    assert (found * expected).sum(1).min() > 1 - tolerance
    if type == "F32":
        assert abs(found - expected).max() < tolerance
