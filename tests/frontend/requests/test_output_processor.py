"""Conversion of the engine's columns to RequestOutputs: kinds of output, ends of a request, gaps,
duplicates, log-probabilities.
"""

from __future__ import annotations

from array import array

import pytest
from msgspec.structs import replace
from quire import InvalidParameterError, RequestOutputKind, SamplingParams
from quire.frontend.requests.input_processor import InputProcessor, ProcessedRequest
from quire.frontend.requests.output_processor import OutputProcessor
from quire.ipc.messages import Array, FinishReason
from quire.tests.frontend.scripted_client import joined, row
from quire.tests.frontend.tiny_tokenizers import text_config, tiny_tokenizer

HELLO = tiny_tokenizer().encode("hello")  # spells "hello": several tokens
EOS = 302


def started(*request_ids: str, **params) -> tuple[OutputProcessor, list[str]]:
    """Return a processor with these requests, and the engine's ids of them."""
    processor = OutputProcessor(tiny_tokenizer())
    requests = [make_request(request_id, **params) for request_id in request_ids]
    for request in requests:
        processor.add_request(request)
    return processor, [request.core_request.request_id for request in requests]


def make_request(request_id: str = "r", **params) -> ProcessedRequest:
    return InputProcessor(text_config(), tiny_tokenizer(), [EOS]).process_inputs(
        request_id, "a prompt", SamplingParams(**params)
    )


def run(processor: OutputProcessor, *rows):
    return processor.process_outputs(joined(list(rows)))


def test_cumulative_outputs_hold_everything_so_far() -> None:
    processor, [i] = started("r")
    [first] = run(processor, row(i, 0, HELLO[:2], num_cached_tokens=5)).request_outputs
    [last] = run(processor, row(i, 2, [*HELLO[2:], EOS], FinishReason.STOP)).request_outputs
    assert (first.request_id, first.prompt, first.finished, first.num_cached_tokens) == (
        "r",
        "a prompt",
        False,
        5,
    )
    assert first.prompt_token_ids == tiny_tokenizer().encode("a prompt")
    assert (first.outputs[0].token_ids, first.outputs[0].finish_reason) == (HELLO[:2], None)
    assert (last.outputs[0].text, last.outputs[0].token_ids, last.outputs[0].finish_reason) == (
        "hello",
        [*HELLO, EOS],
        "stop",
    )
    assert last.finished and last.outputs[0].stop_reason is None and last.num_cached_tokens == 5
    assert first.outputs[0].token_ids == HELLO[:2]  # an output does not change afterwards
    assert not processor.has_unfinished_requests()


def test_deltas_add_up() -> None:
    processor, [i] = started("r", output_kind=RequestOutputKind.DELTA)
    outputs = [
        run(processor, row(i, n, [token])).request_outputs[0] for n, token in enumerate(HELLO)
    ]
    outputs += run(
        processor, row(i, len(HELLO), [7], FinishReason.STOP, stop_reason=7)
    ).request_outputs
    assert "".join(o.outputs[0].text for o in outputs) == "hello"
    assert [t for o in outputs for t in o.outputs[0].token_ids] == [*HELLO, 7]
    assert outputs[-1].outputs[0].stop_reason == 7 and [o.finished for o in outputs] == [
        False
    ] * len(HELLO) + [True]


def test_final_only_gives_one_output() -> None:
    processor, [i] = started("r", output_kind=RequestOutputKind.FINAL_ONLY)
    assert run(processor, row(i, 0, HELLO)).request_outputs == []
    [last] = run(processor, row(i, len(HELLO), HELLO, FinishReason.LENGTH)).request_outputs
    assert (last.outputs[0].text, last.outputs[0].finish_reason) == ("hellohello", "length")


def test_a_row_without_news_gives_no_output() -> None:
    processor, [i] = started("r")
    assert run(processor, row(i, 0, [], num_cached_tokens=3)).request_outputs == []
    assert run(processor, row(i, 0, HELLO)).request_outputs[0].num_cached_tokens == 3


def test_a_stop_string_ends_the_request_and_aborts_it_in_the_engine() -> None:
    processor, [i, j] = started("r", "s", stop=["el"])
    processed = run(processor, row(i, 0, HELLO), row(j, 0, HELLO[:1]))
    stopped, other = processed.request_outputs
    assert (
        stopped.outputs[0].text,
        stopped.outputs[0].finish_reason,
        stopped.outputs[0].stop_reason,
    ) == ("h", "stop", "el")
    assert processed.requests_to_abort == [i] and other.outputs[0].text == "h"
    # rows in flight when it was aborted
    assert run(processor, row(i, len(HELLO), HELLO)).request_outputs == []


def test_a_stop_string_in_the_last_row_needs_no_abort() -> None:
    processor, [i] = started("r", stop=["lo"])
    processed = run(processor, row(i, 0, HELLO, FinishReason.LENGTH))
    assert processed.requests_to_abort == []
    assert (
        processed.request_outputs[0].outputs[0].text,
        processed.request_outputs[0].outputs[0].stop_reason,
    ) == ("hel", "lo")


def test_tokens_after_a_stop_string_do_not_count() -> None:
    processor, [i] = started("r", stop=["e"], logprobs=0)
    [output] = run(processor, row(i, 0, HELLO, num_logprobs=0)).request_outputs
    completion = output.outputs[0]
    assert tiny_tokenizer().decode(completion.token_ids) == "he"
    assert len(completion.logprobs) == len(completion.token_ids)


def test_an_error_ends_one_request_with_its_message() -> None:
    processor, [i, j] = started("r", "s")
    processed = run(processor, row(i, 0, HELLO[:1]), row(j, 0, HELLO))
    processed = run(
        processor,
        row(i, 1, [], FinishReason.ERROR, error="NaN in the logits"),
        row(j, len(HELLO), HELLO),
    )
    failed, other = processed.request_outputs
    assert (failed.outputs[0].finish_reason, failed.error, failed.outputs[0].text) == (
        "error",
        "NaN in the logits",
        "he",
    )
    assert (other.error, other.outputs[0].text) == (None, "hellohello")
    processor, [i] = started("r")
    assert (
        run(processor, row(i, 0, [], FinishReason.ERROR)).request_outputs[0].error
        == "the engine gave no reason"
    )


def test_a_gap_fails_only_its_request() -> None:
    processor, [i, j] = started("r", "s")
    run(processor, row(i, 0, HELLO[:2]))
    processed = run(processor, row(i, 4, [5]), row(j, 0, HELLO))
    lost, other = processed.request_outputs
    assert (
        lost.outputs[0].finish_reason == "error"
        and lost.error == "output tokens 2 to 3 did not arrive from the engine"
    )
    assert lost.outputs[0].token_ids == HELLO[:2]
    assert processed.requests_to_abort == [i]
    assert other.outputs[0].text == "hello" and not other.finished


def test_duplicates_are_dropped() -> None:
    processor, [i] = started("r", logprobs=1)
    run(processor, row(i, 0, HELLO[:2], num_logprobs=1))
    assert run(processor, row(i, 0, HELLO[:2], num_logprobs=1)).request_outputs == []
    [output] = run(
        processor, row(i, 1, HELLO[1:], FinishReason.LENGTH, num_logprobs=1)
    ).request_outputs
    assert output.outputs[0].token_ids == HELLO and output.outputs[0].text == "hello"
    assert [next(iter(position)) for position in output.outputs[0].logprobs] == HELLO


def test_rows_of_a_replaced_engine_are_dropped() -> None:
    processor, [i] = started("r")
    run(processor, row(i, 0, HELLO[:1], epoch=1))
    assert run(processor, row(i, 1, [9], epoch=0)).request_outputs == []
    assert processor.num_dropped_rows == 1
    assert (
        run(processor, row(i, 1, HELLO[1:], epoch=1)).request_outputs[0].outputs[0].token_ids
        == HELLO
    )


def test_replicas_do_not_drop_each_others_rows() -> None:
    """Engine 0 was replaced three times, engine 1 never."""
    processor, [i, j] = started("r", "s")
    process = processor.process_outputs
    process(row(i, 0, HELLO[:1], epoch=3))
    process(replace(row(j, 0, HELLO[:1], epoch=0), engine_index=1))
    [output] = process(replace(row(j, 1, HELLO[1:]), engine_index=1)).request_outputs
    assert output.outputs[0].token_ids == HELLO and processor.num_dropped_rows == 0
    process(row(i, 1, [9], epoch=2))  # from engine 0 before its replacement
    assert processor.num_dropped_rows == 1


def test_log_probabilities() -> None:
    processor, [i] = started("r", logprobs=2)
    [output] = run(
        processor, row(i, 0, [40, 41], FinishReason.LENGTH, num_logprobs=2)
    ).request_outputs
    completion = output.outputs[0]
    assert completion.cumulative_logprob == pytest.approx(-(40 + 41) / 8)
    first = completion.logprobs[0]
    assert list(first) == [40, 41, 42]
    assert (first[40].logprob, first[40].rank, first[40].decoded_token) == (
        -5.0,
        7,
        tiny_tokenizer().decode([40]),
    )
    assert [(first[t].logprob, first[t].rank) for t in (41, 42)] == [(-1.0, 1), (-2.0, 2)]
    processor, [i] = started("r")
    [output] = run(processor, row(i, 0, [40], FinishReason.LENGTH)).request_outputs
    assert output.outputs[0].logprobs is None and output.outputs[0].cumulative_logprob is None


def test_cumulative_logprob_does_not_depend_on_how_rows_split_the_tokens() -> None:
    """Each of the small terms is lost in rounding when added to -1. The sum of several of them is
    not.
    """
    token_ids, sums = list(range(40, 52)), set()
    values = [-1.0] + [-1e-16] * 11
    for size in (1, 2, 3, 5, 12):
        processor, [i] = started("r", logprobs=0)
        for start in range(0, 12, size):
            chunk = token_ids[start : start + size]
            reason = FinishReason.LENGTH if start + size >= 12 else None
            outputs = row(i, start, chunk, reason, num_logprobs=0)
            [columns] = outputs.logprobs
            data = array("f", values[start : start + size]).tobytes()
            columns = replace(columns, logprobs=Array("f4", (len(chunk), 1), data))
            processed = run(processor, replace(outputs, logprobs=[columns]))
        sums.add(processed.request_outputs[0].outputs[0].cumulative_logprob)
    assert len(sums) == 1


def test_the_sampled_token_among_the_candidates_appears_once() -> None:
    processor, [i] = started("r", logprobs=1)
    outputs = row(i, 0, [40], FinishReason.LENGTH, num_logprobs=1)
    twice = replace(
        outputs.logprobs[0], token_ids=Array("i4", (1, 2), array("i", [40, 40]).tobytes())
    )
    [output] = processor.process_outputs(replace(outputs, logprobs=[twice])).request_outputs
    assert (
        list(output.outputs[0].logprobs[0]) == [40] and output.outputs[0].logprobs[0][40].rank == 7
    )


def test_aborted_requests_return_their_partial_output() -> None:
    processor, [i, j] = started("r", "s", stop="lox")
    run(processor, row(i, 0, HELLO), row(j, 0, HELLO))
    processed = processor.abort_requests(["r", "unknown"])
    assert processed.requests_to_abort == [i]
    assert (
        processed.request_outputs[0].outputs[0].text,
        processed.request_outputs[0].outputs[0].finish_reason,
    ) == ("hello", "abort")
    assert processor.abort_requests(["r"]).requests_to_abort == []
    assert run(processor, row(i, len(HELLO), [], FinishReason.ABORT)).request_outputs == []
    assert processor.unfinished_request_ids() == ["s"] and processor.num_unfinished_requests() == 1


def test_the_id_of_a_running_request_is_refused() -> None:
    processor, _ = started("r")
    with pytest.raises(
        InvalidParameterError, match="request_id: 'r' is already used by a running request"
    ):
        processor.add_request(make_request("r"))
    processor.abort_requests(["r"])
    processor.add_request(make_request("r"))


def test_the_journal_is_sufficient_to_continue_on_another_engine() -> None:
    processor, [i] = started("r", temperature=0.5)
    run(processor, row(i, 0, HELLO[:2]))
    [(request, token_ids)] = processor._requests["r"].entries()
    assert (
        request.request_id == i
        and request.sampling_params.seed is not None
        and token_ids == HELLO[:2]
    )


def test_times_in_metrics_are_ordered() -> None:
    processor, [i] = started("r")
    run(processor, row(i, 0, HELLO[:1]))
    [output] = run(processor, row(i, 1, HELLO[1:], FinishReason.LENGTH)).request_outputs
    metrics = output.metrics
    assert (
        metrics.arrival_time
        <= metrics.first_token_time
        <= metrics.last_token_time
        <= metrics.finished_time
    )


def test_tokens_of_several_steps_have_separate_times() -> None:
    processor, [i, j] = started("r", "s", stop=["lo"])
    processor.set_record_token_times(True)
    outputs = joined([row(i, 0, HELLO), row(j, 0, [7])])
    times = {
        "timestamp": 3.0,
        "step_times": [1.0, 2.0, 3.0],
        "token_steps": [*range(len(HELLO) - 1), 2, 1],
    }
    processed = processor.process_outputs(replace(outputs, **times)).request_outputs
    metrics = {output.request_id: output.metrics for output in processed}
    assert metrics["s"].token_ts == [2.0]
    assert metrics["r"].token_ts == [1.0, 2.0, 3.0][: metrics["r"].num_generation_tokens]
    processor, [i] = started("r")
    processor.set_record_token_times(True)
    [output] = processor.process_outputs(
        replace(row(i, 0, HELLO[:2]), timestamp=4.0)
    ).request_outputs
    assert output.metrics.token_ts == [4.0, 4.0]
