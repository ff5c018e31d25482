"""Timelines and Chrome traces of finished requests, from handmade metrics."""

import json
from itertools import pairwise

import pytest
from quire.frontend.outputs import RequestMetrics
from quire.frontend.server.request_log import FinishedRequest
from quire.frontend.server.time_line import chrome_trace, events, summary_of, time_line

# Queued at 100.0, two chunks of prefill, three tokens, preempted after the second and recomputed in
# one chunk.
METRICS = RequestMetrics(
    arrival_time=5000.0,
    first_token_time=5000.75,
    last_token_time=5002.0,
    finished_time=5002.25,
    queued_ts=100.0,
    scheduled_ts=100.25,
    first_token_ts=100.75,
    last_token_ts=102.0,
    num_prompt_tokens=48,
    num_generation_tokens=3,
    num_cached_tokens=16,
    num_preemptions=1,
    num_recomputed_tokens=50,
    preemption_ts=[101.25],
    prefill_chunks=[(7, 100.25, 100.5, 20), (8, 100.5, 100.75, 12), (12, 101.5, 102.0, 50)],
    token_ts=[100.75, 101.0, 102.0],
)
REQUEST = FinishedRequest("chatcmpl-1", METRICS, {"model": "m", "finish_reason": "length"})


def test_a_timeline_in_order() -> None:
    assert [
        (e["name"], e["begin_s"], e.get("end_s"), e.get("num_tokens")) for e in events(METRICS)
    ] == [
        ("queued", 0.0, 0.25, None),
        ("cached", 0.25, None, 16),
        ("prefill_chunk", 0.25, 0.5, 20),
        ("prefill_chunk", 0.5, 0.75, 12),
        ("first_token", 0.75, None, None),
        ("decode", 0.75, 2.0, None),
        ("decode_step", 0.75, 1.0, 1),
        ("decode_step", 1.0, 2.0, 1),
        ("preempted", 1.25, None, None),
        ("prefill_chunk", 1.5, 2.0, 50),
        ("finished", 2.0, None, None),
    ]
    line = time_line(REQUEST)
    assert (
        line["queued_s"],
        line["prefill_s"],
        line["decode_s"],
        line["num_recomputed_tokens"],
    ) == (0.25, 0.5, 1.25, 50)


def test_a_summary() -> None:
    assert summary_of(REQUEST) == {
        "id": "chatcmpl-1",
        "object": "request",
        "created": 5000.0,
        "model": "m",
        "finish_reason": "length",
        "prompt_tokens": 48,
        "completion_tokens": 3,
        "cached_tokens": 16,
        "ttft_s": 0.75,
        "e2e_s": 2.25,
        "num_preemptions": 1,
    }


def test_tokens_at_the_same_time_are_one_step() -> None:
    metrics = RequestMetrics(
        0.0,
        queued_ts=1.0,
        scheduled_ts=1.0,
        first_token_ts=2.0,
        last_token_ts=4.0,
        token_ts=[2.0, 2.0, 3.0, 3.0, 3.0, 4.0],
    )
    steps = [
        (e["begin_s"], e["end_s"], e["num_tokens"])
        for e in events(metrics)
        if e["name"] == "decode_step"
    ]
    assert steps == [(1.0, 2.0, 3), (2.0, 3.0, 1)]


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        (RequestMetrics(0.0), []),
        (RequestMetrics(0.0, queued_ts=1.0, last_token_ts=3.0), ["queued", "finished"]),
        (
            RequestMetrics(0.0, queued_ts=1.0, scheduled_ts=2.0, last_token_ts=3.0),
            ["queued", "finished"],
        ),
    ],
    ids=["never taken", "ended in the queue", "ended before its first token"],
)
def test_aborted_and_failed_requests(metrics: RequestMetrics, names: list[str]) -> None:
    request = FinishedRequest("r", metrics, {"finish_reason": "abort"})
    assert [e["name"] for e in time_line(request)["events"]] == names
    assert all(e.get("dur", 0) >= 0 for e in chrome_trace(request)["traceEvents"])


def test_perfetto_can_open_the_trace() -> None:
    trace = json.loads(json.dumps(chrome_trace(REQUEST)))
    assert trace["displayTimeUnit"] == "ms" and trace["otherData"]["finish_reason"] == "length"
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["ph"] for e in trace["traceEvents"]} == {"M", "X", "i"}
    for event in trace["traceEvents"]:
        assert (
            isinstance(event["name"], str) and event["pid"] == 1 and isinstance(event["tid"], int)
        )
        assert event["ph"] == "M" or event["ts"] >= 0
    phases = {e["name"]: (e["ts"], e["dur"]) for e in spans if e["tid"] == 1}
    assert phases == {
        "queued": (0.0, 250_000.0),
        "prefill": (250_000.0, 500_000.0),
        "decode": (750_000.0, 1_250_000.0),
    }
    assert [e["args"] for e in spans if e["name"] == "prefill_chunk"][0] == {
        "step": 7,
        "num_tokens": 20,
    }
    for tid in {e["tid"] for e in spans}:  # in one row spans nest or follow each other
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == tid)
        assert all(b[0] >= a[1] or b[1] <= a[1] for a, b in pairwise(row))
