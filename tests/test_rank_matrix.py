"""Every pair of features works together with tensor ranks and with stages, or is refused by name.

The outputs are those of one process: with stages to the last bit. Tensor ranks round the sums of
quantized weights elsewhere: there the outputs are those of the same ranks with one request at a
time. In pairs, ranks are threads of this process; with each feature they are processes, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from quire import EngineArgs, InvalidParameterError, LLMEngine
from quire.executor import executor
from quire.executor.executor import make_executor
from quire.ipc.config import EngineConfig
from quire.ipc.models.ranks import num_ranks
from quire.kernels.cpu.native.library import library
from quire.tests.answers import assert_same, assert_same_beams
from quire.tests.executor.rank_threads import RankThreads
from quire.tests.feature_loras import EngineWithAdapters
from quire.tests.feature_run import Feature, Run, run, settings_of
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
from quire.tests.test_feature_matrix import APART, Matrix, settings_together, tolerance

TENSOR_RANKS, STAGES = RANKS = ("tensor_parallel_size", "pipeline_parallel_size")
REFUSED = [
    (FALLBACK, "must be 1 with a model of type"),
]
# async_scheduling changes nothing with stages
SHOWN_BY = {
    TENSOR_RANKS: [one for one in FEATURES if one is not FALLBACK],
    STAGES: [one for one in FEATURES if one not in (FALLBACK, OVERLAP)],
}
FAST = [
    (STAGES, MULTI_STEP, QUANTIZED),
    (STAGES, SPECULATION, SWAP),
    (TENSOR_RANKS, OVERLAP, LOGPROBS),
    (TENSOR_RANKS, SPECULATION, SWAP),
]


def marked(case: tuple, is_fast: bool) -> object:
    name = "-".join(map(str, case))
    return pytest.param(*case, marks=() if is_fast else pytest.mark.slow, id=name)


PAIRS = [
    marked((ranks, a, b), (ranks, a, b) in FAST or (ranks, b, a) in FAST)
    for ranks in RANKS
    for a, b in itertools.combinations(SHOWN_BY[ranks], 2)
    if {a.name, b.name} not in APART
]
PROCESSES = [marked((ranks, one), False) for ranks in RANKS for one in SHOWN_BY[ranks]]


def make_threads(config: EngineConfig) -> object:
    """Ranks as threads."""
    return RankThreads(config) if num_ranks(config) > 1 else make_executor(config)


@pytest.fixture(scope="module")
def matrices() -> Iterator[dict[str, Matrix]]:
    """What one process answers, and what tensor ranks answer to one request at a time."""
    found = {"alone": Matrix(), TENSOR_RANKS: Matrix(**{TENSOR_RANKS: 2})}
    yield found
    for one in found.values():
        one.close()


def check(matrices: dict[str, Matrix], ranks: str, *features: Feature) -> None:
    """Run the features with ranks, and compare."""
    rounds_elsewhere = ranks == TENSOR_RANKS and (QUANTIZED in features or GGUF in features)
    matrix = matrices[TENSOR_RANKS if rounds_elsewhere else "alone"]
    jobs, alone = matrix.jobs(*features), matrix.alone(*features)
    settings = settings_together(*features) | {ranks: 2}
    if "swap_space" in settings:  # of a rank, which has three of five layers, or a half of all
        settings["swap_space"] *= 0.61
    args = EngineArgs(**settings)
    kind = EngineWithAdapters if args.enable_lora else LLMEngine
    engine = kind.from_engine_args(args, engine="inproc")
    try:
        seen: Run = run(engine, jobs, *features)
    finally:
        engine.shutdown()
    has_bits = library is not None and ranks == STAGES
    assert_same(seen.answers, alone, 0.0 if has_bits else tolerance(*features))
    if seen.beams:
        assert_same_beams(seen.beams, matrix.beams_alone(*features))
    for feature in features:
        feature.shows(seen)


@pytest.mark.parametrize(("ranks", "a", "b"), PAIRS)
def test_pair(matrices, monkeypatch, ranks: str, a: Feature, b: Feature) -> None:
    monkeypatch.setattr(executor, "make_executor", make_threads)
    check(matrices, ranks, a, b)


@pytest.mark.parametrize(("ranks", "feature"), PROCESSES)
def test_feature(matrices, ranks: str, feature: Feature) -> None:
    check(matrices, ranks, feature)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("feature", "words"), REFUSED, ids=str)
def test_refused(ranks: str, feature: Feature, words: str) -> None:
    args = EngineArgs(**settings_of(feature) | {ranks: 2})
    with pytest.raises(InvalidParameterError, match=f"{ranks}: {words}"):
        args.create_engine_config()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_several_features_at_once(matrices, ranks: str) -> None:
    check(matrices, ranks, SWAP, SPECULATION, LOGPROBS)
