"""Every pair of features works together, or is refused in a sentence: both are seen at work, and neither changes what the other answers.
May know: tests/features.py, the public API.
Must not know: how a feature is made, or how two of them meet in the engine.

What is compared: the answers of the pair with those of the same requests, one at a time, by an engine without any of the features; and for
each feature that is the request's, the latter with those of the same requests without it.

Refused:
    two of the same option                     swap and recompute are values of preemption_mode: put together they are "swap" with little room
    n > 1 with temperature 0                   "n: must be 1 with temperature=0 (greedy), where all completions are the same, got 3"
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import pytest
from quire import EngineArgs, InvalidParameterError, LLMEngine, RequestOutput, SamplingParams
from quire.tests.features import BLOCK_SIZE, FEATURES, JOBS, PLAIN, RECOMPUTE, SWAP, Answers, Feature, Run, run
from quire.tests.workloads import Job

PAIRS = [(a, a) for a in FEATURES] + list(itertools.combinations(FEATURES, 2))
HOST_BLOCKS = 3  # of the workload's victims some are smaller and some larger
BLOCK_BYTES = 2 * 5 * BLOCK_SIZE * 2 * 64 * 4  # keys and values, layers, tokens, KV heads, head_dim, fp32 (of the bundled model)
TOGETHER = {frozenset({RECOMPUTE.name, SWAP.name}): dict(preemption_mode="swap", swap_space=HOST_BLOCKS * BLOCK_BYTES / 2**30)}


class Matrix:
    """The engines and the answers that many pairs share."""

    def __init__(self) -> None:
        self._engines: dict[str, LLMEngine] = {}
        self._alone: dict[tuple[str, ...], Answers] = {}

    def engine(self, *features: Feature) -> LLMEngine:
        settings = PLAIN | {name: value for feature in features for name, value in feature.settings.items()}
        settings |= TOGETHER.get(frozenset(feature.name for feature in features), {})
        key = repr(sorted(settings.items()))
        if key not in self._engines:
            self._engines[key] = LLMEngine.from_engine_args(EngineArgs(**settings), engine="inproc")
        return self._engines[key]

    def jobs(self, *features: Feature) -> list[Job]:
        """JOBS with the changes of those features that are the request's, each knowing what was answered before its own."""
        jobs, changed = JOBS, ()
        for feature in features:
            if feature.change is not None and feature not in changed:
                without = self.alone(*changed)
                params = [feature.change(job.params, i, without[job.request_id]) for i, job in enumerate(jobs)]
                jobs = [Job(job.request_id, job.prompt_token_ids, p, job.priority, job.arrives_at_step, None) for job, p in zip(jobs, params)]
                changed += (feature,)
        return jobs

    def alone(self, *features: Feature) -> Answers:
        """What the plain engine answers to each of these jobs when there is no other. Features of the engine do not count."""
        key = tuple(feature.name for feature in features if feature.change is not None)
        if key not in self._alone:
            engine = self.engine()
            self._alone[key] = {}
            for job in self.jobs(*features):
                self._alone[key] |= one(engine, job)
        return self._alone[key]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.shutdown()


def one(engine: LLMEngine, job: Job) -> Answers:
    engine.add_request(job.request_id, {"prompt_token_ids": job.prompt_token_ids}, job.params)
    answers: Answers = {}
    while engine.has_unfinished_requests():
        answers |= {output.request_id: output for output in engine.step()}
    return answers


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    matrix = Matrix()
    yield matrix
    matrix.close()


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=lambda feature: feature.name)
def test_pair(matrix: Matrix, a: Feature, b: Feature) -> None:
    pair = {feature.name: feature for feature in (a, b)}.values()
    jobs, alone = matrix.jobs(*pair), matrix.alone(*pair)
    disturb = next((feature.disturb for feature in pair if feature.disturb), None)
    seen: Run = run(matrix.engine(*pair), jobs, disturb)
    assert_same(seen.answers, alone)
    for feature in pair:
        feature.shows(seen)
        if feature.relates is not None:
            feature.relates(alone, matrix.alone(*[other for other in pair if other is not feature]))


def assert_same(got: Answers, expected: Answers) -> None:
    assert got.keys() == expected.keys()
    for request_id, want in expected.items():
        have = got[request_id]
        assert [in_short(c) for c in have.outputs] == [in_short(c) for c in want.outputs], request_id
        assert numbers(have) == pytest.approx(numbers(want), abs=1e-3), request_id


def in_short(completion) -> tuple:
    return completion.index, completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason


def numbers(output: RequestOutput) -> list[float]:
    """The log-probabilities of what was sampled and of the prompt, in order; the other candidates may change places where they tie."""
    positions = [(c.token_ids, c.logprobs) for c in output.outputs if c.logprobs is not None]
    if output.prompt_logprobs is not None:
        positions.append((output.prompt_token_ids[1:], output.prompt_logprobs[1:]))
    return [entries[token_id].logprob for token_ids, logprobs in positions for token_id, entries in zip(token_ids, logprobs, strict=True)]


def test_several_greedy_completions_are_refused(matrix: Matrix) -> None:
    params = msgspec.structs.replace(JOBS[0].params, n=3, temperature=0.0)
    with pytest.raises(InvalidParameterError, match=r"n: must be 1 with temperature=0 \(greedy\), where all completions are the same, got 3"):
        matrix.engine().add_request("refused", "Once", params)
    assert not matrix.engine().has_unfinished_requests() and SamplingParams(n=3).n == 3
