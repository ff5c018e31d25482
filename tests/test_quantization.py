"""Quantized weights and caches in the whole engine: their loss on the bundled model, refusal where
no fast kernel exists, and bad values.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from quire import LLM, EngineArgs, InvalidParameterError
from quire.executor.kernel_choice import check_quantization
from quire.kernels.cpu.native.library import library
from quire.tests.bench.bench_quantization import make_texts, perplexity

OP = "pack_quantized_linear"


def measure(**settings) -> float:
    with LLM(engine="inproc", dtype="float32", **settings) as llm:
        return perplexity(llm, make_texts(42))


@pytest.mark.skipif(library is None, reason="native kernels are not built here")
def test_perplexity():
    plain = measure()
    losses = {
        quantization: measure(quantization=quantization) / plain - 1
        for quantization in ("int8", "int4")
    }
    # 0.0006 and 0.0010 over 150 texts
    assert abs(losses["int8"]) < 0.005 and abs(losses["int4"]) < 0.02, losses


@pytest.mark.skipif(library is None, reason="native kernels are not built here")
def test_perplexity_with_a_cache_in_int8():
    assert abs(measure(kv_cache_dtype="int8") / measure() - 1) < 0.002  # 0.0002 over 150 texts


def test_refused_if_only_the_reference_supports_it():
    ops = SimpleNamespace(chosen={OP: "reference"})
    with pytest.raises(
        InvalidParameterError,
        match="quantization: int4 needs the native CPU kernels with dtype bfloat16 or float32",
    ):
        check_quantization("int4", ops, {})
    check_quantization("int4", ops, {OP: "reference"})
    check_quantization(None, ops, {})
    check_quantization("int8", SimpleNamespace(chosen={OP: "native"}), {})


def test_reference_and_native_kernels_agree():
    if library is None:
        pytest.skip("native kernels are not built here")
    answers = []
    for kernels in ({}, {OP: "reference"}):
        with LLM(engine="inproc", dtype="float32", quantization="int4", kernels=kernels) as llm:
            answers.append(perplexity(llm, make_texts(3)))
    assert answers[0] == pytest.approx(answers[1], rel=1e-4)


def test_an_unknown_value():
    with pytest.raises(
        InvalidParameterError,
        match="quantization: must be one of 'int4', 'int8', or None, got 'fp8'",
    ):
        EngineArgs(quantization="fp8")
