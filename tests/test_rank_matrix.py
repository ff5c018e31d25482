"""Every feature works together with tensor ranks and with stages, or is refused by name.

The answers are those of one process: with stages to the last bit. Ranks are threads of this process
in the pairs that always run, else processes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from quire import EngineArgs, InvalidParameterError, LLMEngine
from quire.executor import executor
from quire.kernels.cpu.native.library import library
from quire.tests.answers import answer_alone, assert_same, assert_same_beams
from quire.tests.executor.rank_threads import RankThreads
from quire.tests.feature_loras import EngineWithAdapters
from quire.tests.feature_run import Feature, run, settings_of
from quire.tests.features import (
    FALLBACK,
    FEATURES,
    GGUF,
    LOGPROBS,
    MULTI_STEP,
    OVERLAP,
    QUANTIZED,
    SPECULATION,
    SWAP,
)
from quire.tests.test_feature_matrix import Matrix, tolerance

TENSOR_RANKS, STAGES = RANKS = ("tensor_parallel_size", "pipeline_parallel_size")
FAST = [(STAGES, MULTI_STEP), (STAGES, QUANTIZED), (TENSOR_RANKS, SPECULATION)]
REFUSED = [
    (FALLBACK, "must be 1 with a model of type"),
]
PAIRS = [
    pytest.param(*pair, marks=() if pair in FAST else pytest.mark.slow, id=f"{pair[0]}-{pair[1]}")
    for pair in ((ranks, feature) for ranks in RANKS for feature in FEATURES)
    if pair[1] not in [feature for feature, _ in REFUSED]
    and pair != (STAGES, OVERLAP)  # async_scheduling changes nothing with stages
]


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    matrix = Matrix()
    yield matrix
    matrix.close()


@pytest.mark.parametrize(("ranks", "feature"), PAIRS)
def test_pair(matrix: Matrix, monkeypatch, ranks: str, feature: Feature) -> None:
    if (ranks, feature) in FAST:
        monkeypatch.setattr(executor, "make_executor", RankThreads)
    jobs, alone = matrix.jobs(feature), matrix.alone(feature)
    args = EngineArgs(**settings_of(feature) | {ranks: 2})
    kind = EngineWithAdapters if args.enable_lora else LLMEngine
    engine = kind.from_engine_args(args, engine="inproc")
    try:
        seen = run(engine, jobs, feature)
        within = 0.0 if library is not None and ranks == STAGES else tolerance(feature)
        if ranks == TENSOR_RANKS and feature in (QUANTIZED, GGUF):  # its sums are rounded elsewhere
            alone = answer_alone(engine, jobs)
    finally:
        engine.shutdown()
    assert_same(seen.answers, alone, within)
    if seen.beams:
        assert_same_beams(seen.beams, matrix.beams_alone(feature))
    feature.shows(seen)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("feature", "words"), REFUSED, ids=str)
def test_refused(ranks: str, feature: Feature, words: str) -> None:
    args = EngineArgs(**settings_of(feature) | {ranks: 2})
    with pytest.raises(InvalidParameterError, match=f"{ranks}: {words}"):
        args.create_engine_config()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_several_features_at_once(matrix: Matrix, ranks: str) -> None:
    features = (SWAP, SPECULATION, LOGPROBS)
    jobs, alone = matrix.jobs(*features), matrix.alone(*features)
    args = EngineArgs(**settings_of(*features) | {ranks: 2})
    engine = LLMEngine.from_engine_args(args, engine="inproc")
    try:
        seen = run(engine, jobs, *features)
    finally:
        engine.shutdown()
    assert_same(seen.answers, alone)
    for feature in features:
        feature.shows(seen)
