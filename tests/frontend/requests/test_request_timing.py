"""The combined times of a request's completions, and the RequestMetrics computed from them."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace
from quire import SamplingParams
from quire.frontend.outputs import RequestMetrics
from quire.frontend.requests import output_processor
from quire.frontend.requests.input_processor import InputProcessor
from quire.frontend.requests.output_processor import OutputProcessor, take_timing
from quire.frontend.requests.request_state import RequestState
from quire.frontend.server.meters import Meters
from quire.ipc.messages import EngineCoreRequest, FinishReason, RequestTiming
from quire.tests.frontend.scripted_client import row
from quire.tests.frontend.tiny_tokenizers import text_config, tiny_tokenizer

HELLO = tiny_tokenizer().encode("hello")


def started(n: int = 1, **params) -> tuple[OutputProcessor, str]:
    request = InputProcessor(text_config(), tiny_tokenizer(), []).process_inputs(
        "r", "a prompt", SamplingParams(**params), arrival_time=500.0
    )
    core_request = replace(
        request.core_request, params=replace(request.core_request.sampling_params, n=n)
    )
    request = dataclasses.replace(request, core_request=core_request)
    processor = OutputProcessor(tiny_tokenizer())
    processor.add_request(request)
    return processor, request.core_request.request_id


def timed_state(*timings: RequestTiming) -> RequestState:
    """A request of several completions with these timings."""
    request = EngineCoreRequest("e", [1, 2], SamplingParams())
    state = RequestState("r", None, request, 0.0, RequestMetrics(0.0))
    for i, timing in enumerate(timings):
        take_timing(state, f"{i}_e", timing)
    return state


def timed(outputs, timing: RequestTiming, timestamp: float):
    return replace(outputs, timings=[timing], timestamp=timestamp)


def test_a_completion_that_continues_on_another_engine_keeps_its_first_times():
    state = timed_state()
    take_timing(state, "a", RequestTiming(0, 1.0, 2.0, 3.0, 3.0, prefill_chunks=[(0, 2.0, 3.0, 9)]))
    take_timing(state, "a", RequestTiming(0, 1.0, 2.0, 3.0, 4.0, 1, 7, [3.5], [(0, 2.0, 3.0, 9)]))
    for _ in range(2):  # an engine sends all of its times again and again
        take_timing(
            state, "a", RequestTiming(0, 10.0, 11.0, 12.0, 13.0, 1, 2, [12.5], [(0, 11.0, 12.0, 9)])
        )
        expected = {
            "queued_ts": 1.0,
            "scheduled_ts": 2.0,
            "first_token_ts": 3.0,
            "last_token_ts": 13.0,
            "num_preemptions": 2,
            "num_recomputed_tokens": 9,
            "prefill_chunks": [(0, 2.0, 3.0, 9), (0, 11.0, 12.0, 9)],
            "preemption_ts": [3.5, 12.5],
        }
        assert {name: getattr(state.metrics, name) for name in expected} == expected
    take_timing(state, "a", RequestTiming(0, 20.0, 0.0, 0.0, 0.0))
    assert state.metrics.first_token_ts == 3.0
    assert state.metrics.num_preemptions == 2


def test_first_of_any_last_of_all_and_sums():
    metrics = timed_state(
        RequestTiming(
            0,
            1.0,
            5.0,
            6.0,
            9.0,
            num_preemptions=1,
            num_recomputed_tokens=4,
            preemption_times=[8.0],
        ),
        RequestTiming(
            1,
            2.0,
            4.0,
            7.0,
            8.0,
            num_preemptions=2,
            num_recomputed_tokens=8,
            preemption_times=[4.5, 7.5],
        ),
        RequestTiming(2, 3.0),  # never ran
    ).metrics
    assert (
        metrics.queued_time,
        metrics.prefill_time,
        metrics.decode_time,
        metrics.inference_time,
    ) == (3.0, 2.0, 3.0, 5.0)
    assert (metrics.num_preemptions, metrics.num_recomputed_tokens, metrics.preemption_ts) == (
        3,
        12,
        [4.5, 7.5, 8.0],
    )


def test_a_missing_event_has_no_duration():
    metrics = timed_state(RequestTiming(0, 1.0)).metrics
    assert (
        metrics.queued_time
        is metrics.prefill_time
        is metrics.decode_time
        is metrics.inference_time
        is None
    )
    assert metrics.e2e_latency is metrics.time_to_first_token is None


def test_metrics_of_a_request_that_ends_in_the_engine():
    processor, i = started()
    first = processor.process_outputs(
        timed(
            row(i, 0, HELLO[:1], num_cached_tokens=2),
            RequestTiming(0, 10.0, 11.0, 13.0, 13.0),
            13.0,
        )
    )
    metrics = first.request_outputs[0].metrics
    assert (metrics.queued_time, metrics.prefill_time, metrics.decode_time) == (1.0, 2.0, 0.0)
    last = processor.process_outputs(
        timed(
            row(i, 1, HELLO[1:], FinishReason.LENGTH),
            RequestTiming(0, 10.0, 11.0, 13.0, 17.0, 1, 9, [14.0]),
            17.5,
        )
    )
    assert last.request_outputs[0].metrics is metrics
    assert (
        metrics.decode_time,
        metrics.inference_time,
        metrics.num_preemptions,
        metrics.preemption_ts,
    ) == (4.5, 6.5, 1, [14.0])
    assert (
        metrics.num_prompt_tokens,
        metrics.num_generation_tokens,
        metrics.num_cached_tokens,
    ) == (
        len(tiny_tokenizer().encode("a prompt")),
        len(HELLO),
        2,
    )
    assert metrics.e2e_latency == metrics.finished_time - 500.0 >= metrics.time_to_first_token > 0


def test_setting_the_wall_clock_changes_no_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock goes back an hour while the request runs. Latencies use the
    monotonic clock.
    """
    wall, steady = [1e9], [50.0]
    monkeypatch.setattr("time.time", lambda: wall[0])
    monkeypatch.setattr("time.monotonic", lambda: steady[0])
    ended: list[float] = []
    request = InputProcessor(text_config(), tiny_tokenizer(), []).process_inputs(
        "r", "a prompt", SamplingParams()
    )
    processor = OutputProcessor(
        tiny_tokenizer(),
        on_finished=lambda state, clock_offset: ended.append(17.0 + clock_offset),
    )
    metrics = processor.add_request(request)
    engine_id = request.core_request.request_id
    wall[0] -= 3600
    steady[0] += 2
    processor.process_outputs(replace(row(engine_id, 0, HELLO[:1]), timestamp=14.0))
    wall[0] += 7200
    steady[0] += 3
    end = replace(row(engine_id, 1, HELLO[1:], FinishReason.LENGTH), timestamp=17.0)
    processor.process_outputs(end)
    assert (metrics.arrival_time, metrics.time_to_first_token, metrics.e2e_latency) == (1e9, 2, 5)
    assert ended == [1e9 + 5]  # a trace ends at the engine's last event of the request
    meters = Meters()
    meters.request_ended(SamplingParams(), metrics, "length")
    assert meters.histograms["e2e_request_latency_seconds"].sum == 5.0


def test_a_stop_string_ends_the_decode_at_the_time_of_its_token():
    processor, i = started(stop="lo")
    processor.process_outputs(
        timed(row(i, 0, HELLO[:1]), RequestTiming(0, 10.0, 11.0, 13.0, 13.0), 13.0)
    )
    [output] = processor.process_outputs(
        replace(row(i, 1, HELLO[1:]), timestamp=16.0)
    ).request_outputs
    assert output.finished and output.metrics.decode_time == 3.0


def test_an_abort_ends_the_decode_at_the_last_report():
    processor, i = started()
    processor.process_outputs(
        timed(row(i, 0, HELLO[:1]), RequestTiming(0, 10.0, 11.0, 13.0, 13.0), 13.0)
    )
    processor.process_outputs(replace(row(i, 1, HELLO[1:2]), timestamp=15.0))
    [output] = processor.abort_requests(["r"]).request_outputs
    assert output.metrics.decode_time == 2.0 and output.metrics.num_generation_tokens == 2


def test_completions_of_one_request_share_their_metrics():
    processor, i = started(n=2)
    processor.process_outputs(
        timed(row(f"0_{i}", 0, HELLO[:1]), RequestTiming(0, 10.0, 11.0, 13.0, 13.0), 13.0)
    )
    processor.process_outputs(
        timed(row(f"1_{i}", 0, HELLO[:1]), RequestTiming(0, 10.0, 12.0, 14.0, 14.0), 14.0)
    )
    processor.process_outputs(
        timed(
            row(f"0_{i}", 1, [], FinishReason.ABORT), RequestTiming(0, 10.0, 11.0, 13.0, 15.0), 15.0
        )
    )
    [output] = processor.process_outputs(
        timed(
            row(f"1_{i}", 1, HELLO[1:2], FinishReason.LENGTH),
            RequestTiming(0, 10.0, 12.0, 14.0, 19.0),
            19.0,
        )
    ).request_outputs
    metrics = output.metrics
    assert output.finished and (metrics.queued_time, metrics.prefill_time, metrics.decode_time) == (
        1.0,
        2.0,
        6.0,
    )
    assert metrics.num_generation_tokens == 3


def test_chunks_of_all_completions_in_order():
    processor, i = started(n=2)
    first, second = (3, 11.0, 12.0, 40), (5, 12.5, 13.0, 1)
    processor.process_outputs(
        timed(
            row(f"1_{i}", 0, HELLO[:1]),
            RequestTiming(0, 10.0, 12.0, 14.0, 14.0, prefill_chunks=[second]),
            14.0,
        )
    )
    processor.process_outputs(
        timed(
            row(f"0_{i}", 0, HELLO[:1]),
            RequestTiming(0, 10.0, 11.0, 13.0, 13.0, prefill_chunks=[first]),
            15.0,
        )
    )
    [output] = processor.abort_requests(["r"]).request_outputs
    assert output.metrics.prefill_chunks == [first, second]


@pytest.mark.parametrize("is_wanted", [False, True])
def test_token_times_are_optional_and_bounded(is_wanted, monkeypatch):
    monkeypatch.setattr(output_processor, "MAX_TOKEN_TS", 4)
    processor, i = started()
    processor.set_record_token_times(is_wanted)
    processor.process_outputs(
        timed(row(i, 0, HELLO[:1]), RequestTiming(0, 10.0, 11.0, 13.0, 13.0), 13.0)
    )
    processor.process_outputs(replace(row(i, 1, [HELLO[1]] * 2), timestamp=14.0))
    processor.process_outputs(replace(row(i, 3, [HELLO[1]] * 3), timestamp=15.0))
    [output] = processor.abort_requests(["r"]).request_outputs
    assert output.metrics.num_generation_tokens == 6
    assert output.metrics.token_ts == ([13.0, 14.0, 14.0, 15.0] if is_wanted else [])


def test_times_of_finished_requests_are_ignored():
    processor, i = started()
    processor.abort_requests(["r"])
    assert (
        processor.process_outputs(
            timed(row(i, 0, [], FinishReason.ABORT), RequestTiming(0, 1.0), 2.0)
        ).request_outputs
        == []
    )
