"""Collects an engine's outputs and compares them."""

from __future__ import annotations

import pytest
from quire import BeamSearchOutput, CompletionOutput, LLMEngine, RequestOutput
from quire.tests.workloads import Job

Answers = dict[str, RequestOutput]  # by request id, the last of each


def answer_alone(engine: LLMEngine, jobs: list[Job]) -> Answers:
    """Return the output of each job when the engine runs no other request."""
    answers: Answers = {}
    for job in jobs:
        engine.add_request(job.request_id, {"prompt_token_ids": job.prompt_token_ids}, job.params)
        while engine.has_unfinished_requests():
            answers |= {output.request_id: output for output in engine.step()}
    return answers


def assert_same(got: Answers, expected: Answers, within: float = 1e-3) -> None:
    """Compare two sets of outputs. Log-probabilities may differ by `within`."""
    assert got.keys() == expected.keys()
    for request_id, want in expected.items():
        have = got[request_id]
        assert [in_short(c) for c in have.outputs] == [in_short(c) for c in want.outputs], (
            request_id
        )
        assert numbers(have) == pytest.approx(numbers(want), abs=within), request_id


def assert_same_beams(got: list[BeamSearchOutput], expected: list[BeamSearchOutput]) -> None:
    for have, want in zip(got, expected, strict=True):
        assert [(s.tokens, s.text, s.finish_reason) for s in have.sequences] == [
            (s.tokens, s.text, s.finish_reason) for s in want.sequences
        ]
        assert [s.cum_logprob for s in have.sequences] == pytest.approx(
            [s.cum_logprob for s in want.sequences], abs=1e-3
        )


def in_short(completion: CompletionOutput) -> tuple:
    return (
        completion.index,
        completion.token_ids,
        completion.text,
        completion.finish_reason,
        completion.stop_reason,
    )


def numbers(output: RequestOutput) -> list[float]:
    """Return the log-probabilities of the sampled and prompt tokens, in order.

    The other candidates are left out: their order may change where they tie.
    """
    positions = [(c.token_ids, c.logprobs) for c in output.outputs if c.logprobs is not None]
    if output.prompt_logprobs is not None:
        positions.append((output.prompt_token_ids[1:], output.prompt_logprobs[1:]))
    return [
        entries[token_id].logprob
        for token_ids, logprobs in positions
        for token_id, entries in zip(token_ids, logprobs, strict=True)
    ]
