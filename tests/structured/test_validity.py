"""Outputs of the bundled model under random schemas, regexes and choices: every finished one
matches its constraint.

    pytest -m slow tests/structured/test_validity.py        # ten thousand, some minutes
"""

from __future__ import annotations

from collections import Counter

import pytest
from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.tests.structured.generator import kind_of, numbered, problem_with

# from the model's preferred tokens to anything that the grammar allows
TEMPERATURES = (0.0, 0.7, 1.0, 2.0, 5.0)
SETTINGS = dict(
    engine="inproc",
    num_threads=1,
    dtype="float32",
    max_num_seqs=128,
    max_model_len=256,
    num_gpu_blocks_override=1 + 128 * 16,
)


def check(first: int, count: int) -> Counter:
    """Requests `count` outputs; returns how many of each kind ended in which way.

    Asserts that all finished outputs are valid.
    """
    items = list(numbered(first, count))
    params = [
        SamplingParams(
            max_tokens=128,
            temperature=TEMPERATURES[seed % len(TEMPERATURES)],
            seed=seed,
            structured_outputs=structured,
        )
        for seed, structured in items
    ]
    with LLM(**SETTINGS) as llm:
        outputs = llm.generate(["Answer: "] * count, params, use_tqdm=False)
        assert llm.llm_engine.client.call_utility("check_integrity")
    ends: Counter = Counter()
    for (seed, structured), output in zip(items, outputs, strict=True):
        completion = output.outputs[0]
        ends[kind_of(structured), completion.finish_reason] += 1
        assert completion.finish_reason in ("stop", "length"), (seed, structured, output.error)
        if completion.finish_reason == "stop":
            problem = problem_with(completion.text, structured)
            assert problem is None, f"seed {seed}: {completion.text!r}: {problem}; {structured}"
    return ends


def assert_enough_finished(ends: Counter, count: int) -> None:
    """Outputs that were cut off show nothing: most must be finished, of every kind except objects
    of any length.
    """
    finished = {kind: number for (kind, reason), number in ends.items() if reason == "stop"}
    print(f"\n{sum(finished.values())} of {count} outputs finished: {dict(ends)}")
    assert sum(finished.values()) > 0.7 * count and finished.keys() >= {"json", "regex", "choice"}


def test_a_hundred_outputs_match_their_constraints() -> None:
    assert_enough_finished(check(0, 100), 100)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(1000, 11000, 1000))
def test_ten_thousand_outputs_match_their_constraints(first: int) -> None:
    assert_enough_finished(check(first, 1000), 1000)


@pytest.mark.parametrize(
    ("structured", "texts"),
    [
        (dict(regex="a+b"), ["b", "ab "]),
        (dict(choice=["a", "b|c"]), ["b", "c", ""]),
        (dict(json={"type": "integer", "maximum": 3}), ["4", "x", '"1"']),
        (dict(json='{"enum": ["x"]}'), ["x", "1"]),
        (dict(json={"type": "string", "format": "uuid"}), ['"x"']),
        (dict(json_object=True), ["[]", "{"]),
    ],
    ids=str,
)
def test_the_checks_find_errors(structured: dict, texts: list[str]) -> None:
    assert [
        text for text in texts if problem_with(text, StructuredOutputsParams(**structured)) is None
    ] == []
