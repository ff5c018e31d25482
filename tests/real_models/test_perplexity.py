"""Perplexity on blocks of GGUF files beside that of the dequantized weights in fp32, on real
weights and about 20,000 tokens of English: Python's own documentation.

    python tests/real_models/fetch.py smollm2 && pytest -m real_models tests/real_models
"""

from __future__ import annotations

from pydoc_data.topics import topics

import pytest
from quire import LLM
from quire.tests.bench.bench_quantization import perplexity
from quire.tests.real_models.fetch import fetch

pytestmark = [pytest.mark.real_models, pytest.mark.timeout(1800)]

TEXT = "\n".join(topics[name] for name in sorted(topics))[:80_000]
PIECES = [TEXT[i : i + 4000] for i in range(0, len(TEXT), 4000)]


def measure(model: str, **settings) -> float:
    path = str(fetch(model))
    settings = {
        "engine": "inproc",
        "max_model_len": 4096,
        "enable_prefix_caching": False,
    } | settings
    with LLM(path, **settings) as llm:
        return perplexity(llm, PIECES)


def test_blocks_are_within_half_a_per_cent_of_the_dequantized_weights():
    """0.3 % with a scale of x per 32 numbers, 2 % with one per 256"""
    dequantized, blocks = (measure("smollm2", dtype=dtype) for dtype in ("float32", "bfloat16"))
    print(f"perplexity {dequantized:.3f} dequantized, {blocks:.3f} on blocks")
    assert abs(blocks / dequantized - 1) < 0.005
