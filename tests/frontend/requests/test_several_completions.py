"""n > 1: one request, several rows. Each kind of output, and an end, abort or failure of a single
completion.
"""

from __future__ import annotations

import pytest
from quire import RequestOutputKind, SamplingParams
from quire.frontend.requests.input_processor import ProcessedRequest
from quire.frontend.requests.output_processor import OutputProcessor
from quire.ipc.messages import EngineCoreRequest, FinishReason, child_request_id
from quire.tests.frontend.scripted_client import joined, row
from quire.tests.frontend.tiny_tokenizers import tiny_tokenizer

HELLO = tiny_tokenizer().encode("hello")
DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def started(n: int = 3, **params) -> tuple[OutputProcessor, list[str]]:
    """Return a processor with request "r" of n completions ("e" in the engine), and the engine's
    ids of the completions.
    """
    processor = OutputProcessor(tiny_tokenizer())
    sampling_params = SamplingParams(**{"n": n, "seed": 2**63 - 2, "max_tokens": 50, **params})
    processor.add_request(
        ProcessedRequest("r", "a prompt", EngineCoreRequest("e", [1, 2, 3], sampling_params))
    )
    return processor, [child_request_id("e", i) for i in range(n)]


def run(processor: OutputProcessor, *rows):
    return processor.process_outputs(joined(list(rows)))


def seen(output) -> list[tuple]:
    return [(c.index, c.text, c.finish_reason) for c in output.outputs]


def test_cumulative_outputs_hold_all_completions_in_order() -> None:
    processor, [a, b, c] = started()
    [output] = run(
        processor, row(c, 0, HELLO, num_cached_tokens=2), row(a, 0, HELLO[:1])
    ).request_outputs
    assert seen(output) == [(0, "he", None), (1, "", None), (2, "hello", None)]
    assert (output.request_id, output.finished, output.num_cached_tokens, output.prompt) == (
        "r",
        False,
        2,
        "a prompt",
    )
    [output] = run(
        processor, row(b, 0, HELLO, FinishReason.LENGTH), row(c, len(HELLO), [7], FinishReason.STOP)
    ).request_outputs
    assert (
        seen(output) == [(0, "he", None), (1, "hello", "length"), (2, "hello", "stop")]
        and not output.finished
    )
    [output] = run(processor, row(a, 1, [], FinishReason.LENGTH)).request_outputs
    assert (
        seen(output) == [(0, "he", "length"), (1, "hello", "length"), (2, "hello", "stop")]
        and output.finished
    )
    assert not processor.has_unfinished_requests() and processor._by_engine_id == {}


def test_deltas_contain_only_completions_with_new_tokens() -> None:
    processor, [a, b, c] = started(output_kind=DELTA)
    [first] = run(processor, row(c, 0, HELLO[:1]), row(a, 0, HELLO)).request_outputs
    [second] = run(processor, row(c, 1, HELLO[1:], FinishReason.LENGTH)).request_outputs
    [third] = run(
        processor, row(a, len(HELLO), HELLO), row(b, 0, [], FinishReason.LENGTH)
    ).request_outputs
    assert [seen(o) for o in (first, second, third)] == [
        [(0, "hello", None), (2, "he", None)],
        [(2, "llo", "length")],
        [(0, "hello", None), (1, "", "length")],
    ]
    [last] = run(processor, row(a, 2 * len(HELLO), [], FinishReason.LENGTH)).request_outputs
    assert seen(last) == [(0, "", "length")] and [
        o.finished for o in (first, second, third, last)
    ] == [False] * 3 + [True]


def test_final_only_waits_for_all_of_them() -> None:
    processor, ids = started(output_kind=FINAL_ONLY, logprobs=0)
    for i in ids[:2]:
        assert (
            run(processor, row(i, 0, HELLO, FinishReason.LENGTH, num_logprobs=0)).request_outputs
            == []
        )
    [output] = run(
        processor, row(ids[2], 0, HELLO[:2], FinishReason.LENGTH, num_logprobs=0)
    ).request_outputs
    assert output.finished and [c.index for c in output.outputs] == [0, 1, 2]
    assert [c.token_ids for c in output.outputs] == [HELLO, HELLO, HELLO[:2]]
    assert [len(c.logprobs) for c in output.outputs] == [len(HELLO), len(HELLO), 2]
    assert (
        output.outputs[2].cumulative_logprob
        == pytest.approx(-sum(HELLO[:2]) / 8)
        != output.outputs[0].cumulative_logprob
    )


def test_a_stop_string_aborts_only_its_completion() -> None:
    processor, [a, b, c] = started(stop="el", output_kind=DELTA)
    processed = run(processor, row(a, 0, HELLO[:1]), row(b, 0, HELLO))
    assert processed.requests_to_abort == [b] and seen(processed.request_outputs[0]) == [
        (0, "h", None),
        (1, "h", "stop"),
    ]
    assert (
        run(processor, row(b, len(HELLO), HELLO), row(b, 9, [], FinishReason.ABORT)).request_outputs
        == []
    )
    processed = run(
        processor, row(a, 1, HELLO[1:], FinishReason.LENGTH), row(c, 0, [9], FinishReason.LENGTH)
    )
    assert processed.requests_to_abort == [] and processed.request_outputs[0].finished


def test_aborting_the_request_ends_all_running_completions() -> None:
    processor, [a, b, c] = started()
    run(processor, row(a, 0, HELLO, FinishReason.LENGTH), row(b, 0, HELLO[:1]))
    processed = processor.abort_requests(["r"])
    assert processed.requests_to_abort == ["e"]  # the engine's id of the whole request
    [output] = processed.request_outputs
    assert (
        seen(output) == [(0, "hello", "length"), (1, "he", "abort"), (2, "", "abort")]
        and output.finished
    )
    assert (
        run(
            processor, row(b, 1, [], FinishReason.ABORT), row(c, 0, [], FinishReason.ABORT)
        ).request_outputs
        == []
    )


def test_an_abort_of_one_leaves_the_others() -> None:
    processor, [a, b, c] = started()
    [output] = run(processor, row(b, 0, [], FinishReason.ABORT), row(a, 0, HELLO)).request_outputs
    assert (
        seen(output) == [(0, "hello", None), (1, "", "abort"), (2, "", None)]
        and not output.finished
    )


def test_a_failure_of_one_leaves_the_others() -> None:
    processor, [a, b, c] = started()
    processed = run(
        processor, row(b, 0, [], FinishReason.ERROR, error="NaN in the logits"), row(a, 0, HELLO)
    )
    [output] = processed.request_outputs
    assert seen(output) == [(0, "hello", None), (1, "", "error"), (2, "", None)]
    assert (output.error, output.error_parameter, output.finished) == (
        "NaN in the logits",
        None,
        False,
    )
    # a gap in one completion
    processed = run(processor, row(a, 9, [5]), row(c, 0, HELLO, FinishReason.LENGTH))
    [output] = processed.request_outputs
    assert [c.finish_reason for c in output.outputs] == [
        "error",
        "error",
        "length",
    ] and output.finished
    # the first failure
    assert processed.requests_to_abort == [a] and output.error == "NaN in the logits"


def test_a_refusal_of_the_whole_request_ends_all() -> None:
    processor, _ = started(output_kind=DELTA)
    processed = run(
        processor, row("e", 0, [], FinishReason.ERROR, error="n: too many", parameter="n")
    )
    [output] = processed.request_outputs
    assert seen(output) == [(i, "", "error") for i in range(3)] and output.finished
    assert (output.error, output.error_parameter) == ("n: too many", "n")
    assert processed.requests_to_abort == [] and not processor.has_unfinished_requests()


def test_the_journal_has_an_entry_for_each_running_completion() -> None:
    processor, [a, b, c] = started(temperature=0.5)
    run(processor, row(a, 0, HELLO), row(b, 0, HELLO, FinishReason.LENGTH))
    (first, first_tokens), (third, third_tokens) = processor._requests["r"].entries()
    assert (first.request_id, first_tokens, third.request_id, third_tokens) == (a, HELLO, c, [])
    params = first.sampling_params, third.sampling_params
    # seed + index, within 63 bits
    assert [p.n for p in params] == [1, 1] and [p.seed for p in params] == [2**63 - 2, 0]
    assert first.prompt_token_ids == [1, 2, 3] and params[0].temperature == 0.5


@pytest.mark.parametrize("kind", [DELTA, RequestOutputKind.CUMULATIVE])
def test_stream_interval_counts_the_unsent_tokens_of_each_completion(kind) -> None:
    processor, [a, b] = started(n=2, stream_interval=3, output_kind=kind)
    steps = [run(processor, row(a, 0, HELLO[:1])).request_outputs]  # the first token of a
    steps += [
        run(processor, row(a, i, [40]), row(b, i - 1, [41])).request_outputs for i in range(1, 5)
    ]
    shown = [[c.index for c in outputs[0].outputs] if outputs else None for outputs in steps]
    # b's first token arrives with a's second. A delta contains one of them, a cumulative output
    # both.
    assert shown == (
        [[0], [1], None, [0], [1]] if kind == DELTA else [[0, 1], [0, 1], None, None, [0, 1]]
    )
    [last] = run(
        processor, row(a, 5, [40], FinishReason.LENGTH), row(b, 4, [41], FinishReason.LENGTH)
    ).request_outputs
    total = [
        len(c.token_ids)
        for outputs in [*steps, [last]]
        for o in outputs
        for c in o.outputs
        if c.index == 0
    ]
    assert last.finished and (sum(total) if kind == DELTA else total[-1]) == 6
