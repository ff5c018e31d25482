"""The log of finished requests: its contents and limits."""

from quire.frontend.outputs import RequestMetrics
from quire.frontend.server.request_log import RequestLog


def filled(capacity: int, num_requests: int) -> RequestLog:
    log = RequestLog(capacity)
    for i in range(num_requests):
        log.add(f"r{i}", RequestMetrics(float(i)), {"finish_reason": "stop"})
    return log


def test_the_oldest_are_dropped_first() -> None:
    log = filled(3, 5)
    assert len(log) == 3 and log.get("r1") is None and log.get("r2").metrics.arrival_time == 2.0
    assert [request.request_id for request in log.recent(10)] == ["r4", "r3", "r2"]
    assert [request.request_id for request in log.recent(1)] == ["r4"] and log.recent(0) == []


def test_a_repeated_id_replaces_the_first() -> None:
    log = filled(3, 3)
    log.add("r0", RequestMetrics(9.0), {})
    assert [request.request_id for request in log.recent(10)] == ["r0", "r2", "r1"] and log.get(
        "r0"
    ).metrics.arrival_time == 9.0


def test_a_request_is_also_found_by_the_id_of_the_header() -> None:
    log = RequestLog()
    for i, header in enumerate(("req-a", "req-b", "req-b")):
        log.add(f"cmpl-{i}", RequestMetrics(0.0), {"x_request_id": header})
    assert (
        log.get("req-a").request_id == "cmpl-0"
        and log.get("req-b").request_id == "cmpl-2"
        and log.get("req-c") is None
    )


def test_logged_requests_do_not_change() -> None:
    log, metrics = RequestLog(), RequestMetrics(0.0, num_generation_tokens=2, token_ts=[1.5, 2.5])
    log.add("r", metrics, {})
    metrics.num_generation_tokens, metrics.token_ts = 3, [9.0]
    kept = log.get("r").metrics
    assert kept.num_generation_tokens == 2 and list(kept.token_ts) == [1.5, 2.5]
