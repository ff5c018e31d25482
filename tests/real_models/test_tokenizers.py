"""The tokenizers of real families, rebuilt from GGUF metadata: the same ids on 10,000 strings.

python tests/real_models/fetch.py && pytest -m real_models tests/real_models/test_tokenizers.py
"""

from __future__ import annotations

import json

import pytest
import tokenizers
from quire.frontend.text.tokenizer import Tokenizer
from quire.tests.gguf_tokenizers import built, differences, metadata_of, texts
from quire.tests.real_models.fetch import fetch, fetch_tokenizer

pytestmark = [pytest.mark.real_models, pytest.mark.timeout(1200)]

# tokenizer.ggml.pre of the families' files; None: SentencePiece's kind
FAMILIES = {
    "deepseek_v3": "deepseek-v3",
    "gptoss": "gpt-4o",
    "llama2": None,
    "llama3": "llama-bpe",
    "qwen3": "qwen2",
}
NUM_TEXTS = 10_000


def added_tokens(tokenizer):
    """Of the flags, a GGUF file has only whether a token is special."""
    tokens = tokenizer.get_added_tokens_decoder().items()
    return {token_id: (token.content, token.special) for token_id, token in tokens}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name, tmp_path):
    path = fetch_tokenizer(name)
    original = tokenizers.Tokenizer.from_file(str(path))
    ours = built(tmp_path, metadata_of(json.loads(path.read_text()), FAMILIES[name]))
    assert differences(ours, original, texts(NUM_TEXTS)) == []
    assert added_tokens(ours) == added_tokens(original)


def test_gemma_from_its_own_file():
    """The metadata of the real GGUF file against the family's tokenizer.json."""
    original = tokenizers.Tokenizer.from_file(str(fetch_tokenizer("gemma3")))
    ours = Tokenizer(fetch("gemma3")).backend
    assert differences(ours, original, texts(NUM_TEXTS)) == []
    found, known = added_tokens(ours), added_tokens(original)
    del known[262144]  # of images; not in the file, which also takes unused tokens for special
    assert {i: text for i, (text, _) in found.items()} == {
        i: text for i, (text, _) in known.items()
    }
