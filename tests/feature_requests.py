"""Request features: how each changes the parameters, its evidence, and its effect on outputs."""

from __future__ import annotations

import json
import re

import pytest
from quire import RequestOutput, SamplingParams, StructuredOutputsParams
from quire.tests.answers import Answers
from quire.tests.feature_run import JOBS, Run, replace


def with_n(params: SamplingParams, index: int, without: RequestOutput | None) -> SamplingParams:
    """Greedy requests become sampled: n > 1 is refused with temperature=0."""
    return replace(params, n=3, temperature=params.temperature or 0.7)


def shows_n(seen: Run) -> None:
    assert all([c.index for c in answer.outputs] == [0, 1, 2] for answer in seen.answers.values())
    assert any(
        len({tuple(c.token_ids) for c in answer.outputs}) == 3 for answer in seen.answers.values()
    )


def shows_logprobs(seen: Run) -> None:
    for answer in seen.answers.values():
        for c in answer.outputs:
            assert len(c.logprobs) == len(c.token_ids) and all(
                len(entries) in (3, 4) for entries in c.logprobs
            )
            chosen = [
                entries[token_id].logprob for entries, token_id in zip(c.logprobs, c.token_ids)
            ]
            assert (
                c.cumulative_logprob == pytest.approx(sum(chosen))
                and max(chosen, default=0.0) <= 0.0
            )


def with_prompt_logprobs(
    params: SamplingParams, index: int, without: RequestOutput | None
) -> SamplingParams:
    """Every third request goes without: prompt log-probabilities bypass the prefix cache."""
    return params if index % 3 == 1 else replace(params, prompt_logprobs=2)


def shows_prompt_logprobs(seen: Run) -> None:
    for index, job in enumerate(JOBS):
        answer = seen.answers[job.request_id]
        if index % 3 == 1:
            assert answer.prompt_logprobs is None
            continue
        first, *rest = answer.prompt_logprobs
        assert first is None and len(rest) == len(job.prompt_token_ids) - 1
        assert all(token_id in entries for token_id, entries in zip(job.prompt_token_ids[1:], rest))


SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "name": {"type": "string", "minLength": 9, "maxLength": 12},
    },
    "required": ["age", "name"],
    "additionalProperties": False,
}
STRUCTURES = (
    StructuredOutputsParams(regex=r"[a-z]{3}( [a-z]{3}){5}"),
    StructuredOutputsParams(
        choice=["the red fox sleeps under the tree", "the old owl watches over the river", "a fish"]
    ),
    StructuredOutputsParams(json=json.dumps(SCHEMA), disable_any_whitespace=True),
)


def with_structure(
    params: SamplingParams, index: int, without: RequestOutput | None
) -> SamplingParams:
    """The output ends with an end-of-sequence token, so it needs room and must not ignore EOS."""
    return replace(
        params, structured_outputs=STRUCTURES[index % 3], ignore_eos=False, max_tokens=40
    )


def shows_structure(seen: Run) -> None:
    for index, job in enumerate(JOBS):
        for c in seen.answers[job.request_id].outputs:
            # cut: see how `relates` of stop strings compares it with the whole
            if isinstance(c.stop_reason, str):
                continue
            assert c.finish_reason == "stop", c
            structure = STRUCTURES[index % 3]
            if structure.regex is not None:
                assert re.fullmatch(structure.regex, c.text), c
            elif structure.choice is not None:
                assert c.text in structure.choice
            else:
                value = json.loads(c.text)
                assert (
                    value.keys() == {"age", "name"}
                    and 0 <= value["age"] <= 999
                    and 9 <= len(value["name"]) <= 12
                )


def with_stop(params: SamplingParams, index: int, without: RequestOutput | None) -> SamplingParams:
    """Stop at three characters from the middle of the text, so that the output is cut, but not at
    once.
    """
    text = without.outputs[0].text
    return replace(params, stop=[text[len(text) // 2 : len(text) // 2 + 3]])


def shows_stop(seen: Run) -> None:
    stopped = [
        c
        for answer in seen.answers.values()
        for c in answer.outputs
        if isinstance(c.stop_reason, str)
    ]
    assert len(stopped) >= len(JOBS) and all(
        c.finish_reason == "stop" and c.stop_reason not in c.text for c in stopped
    )


def relates_stop(stopped: Answers, without: Answers) -> None:
    for request_id, answer in stopped.items():
        for got, whole in zip(answer.outputs, without[request_id].outputs, strict=True):
            assert got.token_ids == whole.token_ids[: len(got.token_ids)] and whole.text.startswith(
                got.text
            )
            if isinstance(got.stop_reason, str):
                assert whole.text.startswith(got.text + got.stop_reason)


def relates_as_equal(answers: Answers, without: Answers) -> None:
    """The first completion of each request equals the one without the feature."""
    for request_id, answer in answers.items():
        got, expected = answer.outputs[0], without[request_id].outputs[0]
        assert (got.token_ids, got.text, got.finish_reason) == (
            expected.token_ids,
            expected.text,
            expected.finish_reason,
        ), request_id


def relates_n(answers: Answers, without: Answers) -> None:
    """The first completion has the request's seed. Greedy requests are left out: they are now
    sampled.
    """
    sampled = [job.request_id for job in JOBS if not job.params.is_greedy]
    relates_as_equal({request_id: answers[request_id] for request_id in sampled}, without)


def relates_as_different(answers: Answers, without: Answers) -> None:
    differ = [
        answer.outputs[0].token_ids != without[request_id].outputs[0].token_ids
        for request_id, answer in answers.items()
    ]
    assert sum(differ) > 1  # not all: a grammar, for one, leaves few choices


def shows_nothing(seen: Run) -> None:
    """The effect is in the tokens alone; `relates` checks it."""
