"""Every pair of features works together with tensor ranks, with stages and with experts that two
engines divide, or is refused by name.

The outputs are those of one process: with stages and divided experts to the last bit. Tensor ranks
round the sums of quantized weights elsewhere: there the outputs are those of the same ranks with
one request at a time. In pairs, ranks are threads of this process; with each feature they are
processes, too. Engines that share experts are threads here: tests/test_expert_parallel.py has the
processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from quire import EngineArgs, InvalidParameterError, LLMEngine
from quire.executor import executor
from quire.executor.executor import make_executor
from quire.ipc.config import EngineConfig
from quire.ipc.models.ranks import num_ranks
from quire.kernels.cpu.native.library import library
from quire.tests.answers import assert_same, assert_same_beams
from quire.tests.executor.engine_threads import SharingRanks
from quire.tests.executor.rank_threads import RankThreads
from quire.tests.feature_loras import EngineWithAdapters
from quire.tests.feature_requests import relates_as_different, shows_nothing
from quire.tests.feature_run import EXPERTS_MODEL, Feature, Run, random_model, run, settings_of
from quire.tests.features import (
    FALLBACK,
    FEATURES,
    GGUF,
    HYBRID,
    KIMI,
    LOGPROBS,
    LORA,
    MULTI_STEP,
    OVERLAP,
    PENALTIES,
    QUANTIZED,
    SPECULATION,
    SWAP,
)
from quire.tests.test_feature_matrix import APART, Matrix, settings_together, tolerance

TENSOR_RANKS, STAGES = RANKS = ("tensor_parallel_size", "pipeline_parallel_size")
EXPERTS = "experts"
EXPERTS_AND = {
    f"{EXPERTS}, tensor ranks": TENSOR_RANKS,
    f"{EXPERTS}, stages": STAGES,
}
REFUSED = [
    (FALLBACK, "must be 1 with a model of type"),
]
REFUSED_WITH_EXPERTS = [
    (FALLBACK, "needs a mixture of experts on a page of Quire's own"),
    (OVERLAP, "cannot be used with async_scheduling"),
    (MULTI_STEP, "cannot be used with num_scheduler_steps > 1"),
]
INT8_CACHE = Feature(
    "int8 cache",
    shows_nothing,
    dict(kv_cache_dtype="int8"),
    relates=relates_as_different,
    changes_model=True,
)
OF_ALL = [one for one in (*FEATURES, INT8_CACHE) if one is not FALLBACK]
# GGUF, HYBRID: of models without experts; tests/test_expert_parallel.py has blocks of files
OF_EXPERTS = [one for one in OF_ALL if one not in (GGUF, HYBRID, OVERLAP, MULTI_STEP)]
REFUSED_TOGETHER = {KIMI.name, INT8_CACHE.name}  # with ranks or without
# a random model that is penalized repeats nothing, so there is nothing to draft
NOTHING_DRAFTED = (EXPERTS, {PENALTIES.name, SPECULATION.name})
# async_scheduling changes nothing with stages
SHOWN_BY = {
    TENSOR_RANKS: OF_ALL,
    STAGES: [one for one in OF_ALL if one is not OVERLAP],
    EXPERTS: OF_EXPERTS,
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
    for ranks in SHOWN_BY
    for a, b in itertools.combinations(SHOWN_BY[ranks], 2)
    if {a.name, b.name} not in (*APART, REFUSED_TOGETHER)
    and (ranks, {a.name, b.name}) != NOTHING_DRAFTED
]
WITH_EXPERTS = [
    marked((kind, one), (kind, one) == (f"{EXPERTS}, tensor ranks", LORA))
    for kind in EXPERTS_AND
    for one in OF_EXPERTS
]
PROCESSES = [marked((ranks, one), False) for ranks in RANKS for one in SHOWN_BY[ranks]]


def make_threads(config: EngineConfig) -> object:
    """Ranks as threads."""
    return RankThreads(config) if num_ranks(config) > 1 else make_executor(config)


@pytest.fixture(scope="module")
def matrices() -> Iterator[dict[str, Matrix]]:
    """What one process answers, and what tensor ranks answer to one request at a time."""
    experts = {"model": random_model(EXPERTS_MODEL)}
    found = {
        "alone": Matrix(),
        TENSOR_RANKS: Matrix(**{TENSOR_RANKS: 2}),
        EXPERTS: Matrix(**experts),
        f"{EXPERTS}, tensor ranks": Matrix(**experts, **{TENSOR_RANKS: 2}),
    }
    yield found
    for one in found.values():
        one.close()


@contextmanager
def executors_by(make: Callable[[EngineConfig], object]) -> Iterator[None]:
    """Engines that start meanwhile have the executors that `make` returns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "make_executor", make)
        yield


def check(
    matrices: dict[str, Matrix],
    ranks: str,
    *features: Feature,
    make: Callable[[EngineConfig], object] = make_executor,
) -> None:
    """Run the features with ranks, whose executor `make` returns, and compare. What is compared
    with shares no experts.
    """
    kind = EXPERTS_AND.get(ranks, ranks)  # of the ranks of an engine
    base = "alone" if ranks in RANKS or KIMI in features else EXPERTS
    if kind == TENSOR_RANKS and any(one in features for one in (QUANTIZED, GGUF, INT8_CACHE)):
        base = TENSOR_RANKS if base == "alone" else f"{EXPERTS}, tensor ranks"
    matrix = matrices[base]
    with executors_by(make_threads):
        jobs, alone = matrix.jobs(*features), matrix.alone(*features)
    settings = settings_together(*features)
    if kind in RANKS:
        settings[kind] = 2
    if base.startswith(EXPERTS):
        settings["model"] = random_model(EXPERTS_MODEL)
    if "swap_space" in settings and kind in RANKS:
        settings["swap_space"] *= 0.61  # a rank has three of five layers, or a half of all
    args = EngineArgs(**settings)
    of_adapters = EngineWithAdapters if args.enable_lora else LLMEngine
    with executors_by(make):
        engine = of_adapters.from_engine_args(args, engine="inproc")
    try:
        seen: Run = run(engine, jobs, *features)
    finally:
        engine.shutdown()
    has_bits = library is not None and kind != TENSOR_RANKS
    assert_same(seen.answers, alone, 0.0 if has_bits else tolerance(*features))
    if seen.beams:
        with executors_by(make_threads):
            assert_same_beams(seen.beams, matrix.beams_alone(*features))
    for feature in features:
        feature.shows(seen)


@pytest.mark.parametrize(("ranks", "a", "b"), PAIRS)
def test_pair(matrices, ranks: str, a: Feature, b: Feature) -> None:
    check(matrices, ranks, a, b, make=SharingRanks if ranks == EXPERTS else make_threads)


@pytest.mark.parametrize(("ranks", "feature"), WITH_EXPERTS)
def test_ranks_of_engines_that_share_experts(matrices, ranks: str, feature: Feature) -> None:
    check(matrices, ranks, feature, make=SharingRanks)


@pytest.mark.parametrize(("ranks", "feature"), PROCESSES)
def test_feature(matrices, ranks: str, feature: Feature) -> None:
    check(matrices, ranks, feature)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("feature", "words"), REFUSED, ids=str)
def test_refused(ranks: str, feature: Feature, words: str) -> None:
    args = EngineArgs(**settings_of(feature) | {ranks: 2})
    with pytest.raises(InvalidParameterError, match=f"{ranks}: {words}"):
        args.create_engine_config()


@pytest.mark.parametrize(("feature", "words"), REFUSED_WITH_EXPERTS, ids=str)
def test_refused_with_experts(feature: Feature, words: str) -> None:
    model = random_model(EXPERTS_MODEL)
    sharing = {"model": model, "data_parallel_size": 2, "enable_expert_parallel": True}
    args = EngineArgs(**settings_of(feature) | sharing)
    with pytest.raises(InvalidParameterError, match=f"enable_expert_parallel: {words}"):
        args.create_engine_config()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", SHOWN_BY)
def test_a_pair_that_is_refused(monkeypatch, ranks: str) -> None:
    """The cache of latent vectors is in the model's type."""
    make = SharingRanks if ranks == EXPERTS else make_threads
    monkeypatch.setattr(executor, "make_executor", make)
    settings = settings_together(KIMI, INT8_CACHE) | ({ranks: 2} if ranks in RANKS else {})
    with pytest.raises(InvalidParameterError, match="kv_cache_dtype: int8 does not serve multi"):
        LLMEngine.from_engine_args(EngineArgs(**settings), engine="inproc")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [*RANKS, EXPERTS, *EXPERTS_AND])
def test_several_features_at_once(matrices, ranks: str) -> None:
    make = make_executor if ranks in RANKS else SharingRanks
    check(matrices, ranks, SWAP, SPECULATION, LOGPROBS, make=make)
