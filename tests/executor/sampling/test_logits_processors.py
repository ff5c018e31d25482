"""A user's logits processors: loading, their arguments, and how they fail alone."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from quire.executor.sampling.logits_processors import LoadedProcessor, load_logits_processors
from quire.ipc.errors import InvalidParameterError
from quire.tests.executor.driver import generate, greedy, start_executor
from quire.tests.executor.stage_cases import (
    VOCAB_SIZE,
    StageRequest,
    append,
    make_batch,
    make_logits,
    run_stages,
)

MODULE = "quire.tests.executor.sampling.test_logits_processors"


def only(params):
    """The request's extra_args name the only token to allow. A request without extra_args is not
    changed.
    """
    token_id = (params.extra_args or {}).get("only")
    if token_id is None:
        return None

    def process(prompt_token_ids, output_token_ids, logits):
        logits[:] = float("-inf")
        logits[token_id] = 0.0
        return logits

    return process


def successor(params):
    """Force token n + 1 after n tokens of prompt and output."""

    def process(prompt_token_ids, output_token_ids, logits):
        chosen = torch.full_like(logits, float("-inf"))
        chosen[len(prompt_token_ids) + len(output_token_ids) + 1] = 0.0
        return chosen

    return process


def broken_factory(params):
    raise KeyError("no such word")


class Holder:
    nested = staticmethod(only)


NOT_A_FUNCTION = 7


def test_paths_are_resolved():
    loaded = load_logits_processors([f"{MODULE}:only", f"{MODULE}:Holder.nested"])
    assert [processor.path for processor in loaded] == [f"{MODULE}:only", f"{MODULE}:Holder.nested"]
    assert [processor.make.__name__ for processor in loaded] == ["only", "only"]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("only", 'each must be "package.module:name"'),
        (":only", 'each must be "package.module:name"'),
        ("no_such_package.here:only", "cannot be imported: ModuleNotFoundError"),
        (f"{MODULE}:missing", "cannot be imported: AttributeError"),
        ("..relative:x", "cannot be imported: TypeError"),
        (f"{MODULE}:NOT_A_FUNCTION", "must be a function of the sampling parameters, got 7"),
    ],
)
def test_a_bad_path_is_named(path, problem):
    with pytest.raises(InvalidParameterError) as caught:
        load_logits_processors([f"{MODULE}:only", path])
    assert (
        caught.value.parameter == "logits_processors"
        and path in str(caught.value)
        and problem in str(caught.value)
    )


def test_a_module_that_fails_is_named_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "failing_processors.py").write_text("import math\n\nmath.sqrt(-1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    place = rf"ValueError: .* \({tmp_path}/failing_processors\.py:3\)$"
    with pytest.raises(InvalidParameterError, match=place):
        load_logits_processors(["failing_processors:make"])


def loaded(*factories) -> list[LoadedProcessor]:
    return [LoadedProcessor(f"tests:{factory.__name__}", factory) for factory in factories]


def test_a_processor_gets_prompt_output_and_its_own_row():
    calls = []

    def watching(params):
        return lambda prompt, output, logits: (
            calls.append((prompt, output, logits.clone())) or logits
        )

    batch = make_batch(
        StageRequest(prompt=[1, 2], output=[3]),
        StageRequest(prompt=[4]),
        processors=loaded(watching),
    )
    append(batch, 1, 5, 6)
    logits = make_logits(2)
    rows, errors = run_stages(batch, logits)
    assert not errors and [(prompt, output) for prompt, output, _ in calls] == [
        ([1, 2], [3]),
        ([4], [5, 6]),
    ]
    assert all(torch.equal(row, logits[i]) for i, (_, _, row) in enumerate(calls))
    np.testing.assert_array_equal(rows, logits)


def test_several_run_in_order_and_only_for_requests_that_enable_them():
    def doubling(params):
        return lambda prompt, output, logits: logits * 2

    def adding(params):
        return (lambda prompt, output, logits: logits.add_(1)) if params.extra_args else None

    logits = make_logits(2)
    rows, _ = run_stages(
        make_batch(
            StageRequest({"extra_args": {"x": 1}}),
            StageRequest(),
            processors=loaded(doubling, adding),
        ),
        logits,
    )
    np.testing.assert_allclose(rows, np.stack((2 * logits[0] + 1, 2 * logits[1])))


def test_failures_affect_only_their_own_request():
    def failing(params):
        def process(prompt, output, logits):
            if params.extra_args["how"] == "raise":
                raise ZeroDivisionError("by nothing")
            if params.extra_args["how"] == "exit":
                sys.exit("enough")
            answers = {
                "none": None,
                "short": logits[:3],
                "ints": logits.long(),
                "sparse": logits.to_sparse(),
                "nan": logits * float("nan"),
            }
            return answers[params.extra_args["how"]]

        return process if params.extra_args else None

    ways = ["raise", "none", "short", "ints", "sparse", "nan", "exit"]
    batch = make_batch(
        StageRequest(),
        *(StageRequest({"extra_args": {"how": how}}) for how in ways),
        processors=loaded(failing),
    )
    logits = make_logits(8)
    rows, errors = run_stages(batch, logits)
    assert sorted(errors) == [1, 2, 3, 4, 5, 6, 7]
    path = "logits_processors: tests:failing"
    assert errors[1] == f"{path} failed: ZeroDivisionError: by nothing"
    assert errors[2] == f"{path} must return a tensor, got None"
    assert all(
        errors[row].startswith(f"{path} must return a floating-point tensor [{VOCAB_SIZE}], got ")
        for row in (3, 4, 5)
    )
    assert "NaN" in errors[6]
    assert errors[7] == f"{path} failed: SystemExit: enough"
    np.testing.assert_array_equal(rows[0], logits[0])


def exiting_factory(params):
    sys.exit(3)


def test_an_interrupt_is_raised_and_not_recorded_as_an_error():
    def interrupted(params):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_batch(StageRequest(), processors=loaded(interrupted))


def test_a_failing_factory_refuses_the_request():
    batch = make_batch(StageRequest(), processors=loaded(broken_factory))
    assert batch.refusals == {
        0: "logits_processors: tests:broken_factory failed on the request: KeyError: 'no such word'"
    }
    batch = make_batch(StageRequest(), processors=loaded(exiting_factory))
    assert batch.refusals == {
        0: "logits_processors: tests:exiting_factory failed on the request: SystemExit: 3"
    }


def test_processors_of_the_configuration_reach_an_executor(tiny):
    executor = start_executor(tiny("qwen2"), logits_processors=[f"{MODULE}:only"])
    prompts = [[1, 2, 3], [4, 5]]
    assert [
        row.output for row in generate(executor, prompts, 4, greedy(extra_args={"only": 17}))
    ] == [[17] * 4] * 2
    plain = start_executor(tiny("qwen2"))
    assert [row.output for row in generate(executor, prompts, 4)] == [
        row.output for row in generate(plain, prompts, 4)
    ]


def test_arguments_of_a_processor_do_not_depend_on_chunks(tiny):
    executor = start_executor(tiny("qwen2"), logits_processors=[f"{MODULE}:successor"])
    for chunk in (None, 3):
        rows = generate(
            executor, [[1] * 7, [2] * 20], 5, greedy(), chunk=chunk and (lambda row: chunk)
        )
        assert [row.output for row in rows] == [list(range(8, 13)), list(range(21, 26))]


def test_a_bad_path_fails_the_start(tiny):
    with pytest.raises(
        InvalidParameterError, match="logits_processors: nowhere:name cannot be imported"
    ):
        start_executor(tiny("qwen2"), logits_processors=["nowhere:name"])
