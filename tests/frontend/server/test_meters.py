"""Meters: the observations that one request adds to each histogram."""

import pytest
from quire.frontend.outputs import RequestMetrics
from quire.frontend.server.meters import Histogram, Meters
from quire.ipc.params import SamplingParams


def metrics_of(num_tokens: int, token_ts: list[float]) -> RequestMetrics:
    return RequestMetrics(
        arrival_time=1000.0,
        first_token_time=1000.5,
        last_token_time=1002.5,
        finished_time=1002.6,
        queued_ts=50.0,
        scheduled_ts=50.2,
        first_token_ts=50.5,
        last_token_ts=52.5,
        num_prompt_tokens=7,
        num_generation_tokens=num_tokens,
        token_ts=token_ts,
    )


def test_a_histogram() -> None:
    histogram = Histogram("", (1, 2, 5))
    for value in (0.5, 1, 1.5, 7, None):
        histogram.observe(value)
    histogram.observe(4, 3)
    assert (
        histogram.cumulative() == [("1.0", 2), ("2.0", 3), ("5.0", 6), ("+Inf", 7)]
        and histogram.sum == 22
    )


def test_many_observations_at_once() -> None:
    values = [7.0, 0.5, 1.0, 1.0, 5.0, 2.5, 1.0000001]
    one_by_one, at_once = Histogram("", (1, 2, 5)), Histogram("", (1, 2, 5))
    for value in values:
        one_by_one.observe(value)
    at_once.observe_all(values)
    at_once.observe_all([])
    assert at_once.counts == one_by_one.counts == [3, 1, 2, 1] and at_once.sum == pytest.approx(
        sum(values)
    )


def test_a_request() -> None:
    meters = Meters()
    meters.request_ended(
        SamplingParams(max_tokens=9),
        metrics_of(5, [50.5, 50.5, 51.5, 52.0, 52.5]),
        "length",
        queued_s=2.0,
    )
    sums = {
        name: histogram.sum
        for name, histogram in meters.histograms.items()
        if histogram.counts != [0] * len(histogram.counts)
    }
    assert sums == pytest.approx(
        {
            "time_to_first_token_seconds": 2.5,
            "inter_token_latency_seconds": 2.0,
            "request_time_per_output_token_seconds": 0.5,
            "e2e_request_latency_seconds": 4.6,
            "request_queue_time_seconds": 2.2,
            "request_inference_time_seconds": 2.3,
            "request_prefill_time_seconds": 0.3,
            "request_decode_time_seconds": 2.0,
            "request_prompt_tokens": 7,
            "request_prefill_kv_computed_tokens": 7,
            "request_generation_tokens": 5,
            "request_max_num_generation_tokens": 9,
            "request_params_n": 1,
            "request_params_max_tokens": 9,
        }
    )
    latency = meters.histograms["inter_token_latency_seconds"]
    assert sum(latency.counts) == 4 and latency.counts[0] == 1  # two tokens of one step
    assert meters.requests_by_reason == {"stop": 0, "length": 1, "abort": 0, "error": 0}


@pytest.mark.parametrize(
    ("n", "token_ts"), [(1, []), (2, [50.5, 50.5, 52.5, 52.5]), (1, [50.5, 51.0])]
)
def test_tokens_without_times_count_with_the_mean(n: int, token_ts: list[float]) -> None:
    meters = Meters()
    meters.request_ended(SamplingParams(n=n), metrics_of(10, token_ts), "stop")
    assert sum(meters.histograms["inter_token_latency_seconds"].counts) == 10 - n
    assert meters.histograms["request_time_per_output_token_seconds"].sum == pytest.approx(
        2.0 * n / (10 - n)
    )


def test_a_request_without_tokens() -> None:
    meters = Meters()
    meters.request_ended(
        SamplingParams(), RequestMetrics(1000.0, finished_time=1001.0, num_prompt_tokens=3), "abort"
    )
    counted = {name for name, histogram in meters.histograms.items() if sum(histogram.counts)}
    assert counted == {
        "e2e_request_latency_seconds",
        "request_prompt_tokens",
        "request_prefill_kv_computed_tokens",
        "request_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
        "request_max_num_generation_tokens",
    }
