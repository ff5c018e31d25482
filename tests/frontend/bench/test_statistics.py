"""The statistics against numpy's, and goodput against handmade figures."""

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire import InvalidParameterError
from quire.frontend.bench.openai_client import Outcome
from quire.frontend.bench.statistics import (
    failures_by_kind,
    is_good,
    metric_values,
    parse_goodput,
    percentile,
    summarize,
    summarize_run,
)

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


@given(VALUES, st.floats(0, 100))
def test_percentiles_equal_numpys(values: list[float], p: float) -> None:
    assert percentile(sorted(values), p) == pytest.approx(
        numpy.percentile(values, p), rel=1e-9, abs=1e-9
    )


@given(VALUES)
def test_a_summary_equals_numpys(values: list[float]) -> None:
    summary = summarize(values)
    assert (summary.count, summary.max) == (len(values), max(values))
    assert summary.mean == pytest.approx(numpy.mean(values), rel=1e-9, abs=1e-9)
    expected = numpy.percentile(values, [50, 90, 95, 99])
    assert list(summary.percentiles.values()) == pytest.approx(list(expected), rel=1e-9, abs=1e-9)
    assert list(summary.percentiles) == [50, 90, 95, 99]


def test_an_empty_list_has_no_summary() -> None:
    assert summarize([]) is None


def outcome(
    ttft: float = 0.1,
    itls: tuple[float, ...] = (0.02, 0.04),
    num_tokens: int | None = None,
    failure: str | None = None,
) -> Outcome:
    times = [ttft]
    for itl in itls:
        times.append(times[-1] + itl)
    num_tokens = len(times) if num_tokens is None else num_tokens
    return Outcome(
        start=0.0,
        num_prompt_tokens=7,
        num_output_tokens=num_tokens,
        token_times=times,
        end=times[-1],
        failure=failure,
        failure_text=f"{ttft}",
    )


def test_goodput_limits_are_read() -> None:
    assert parse_goodput(["ttft:200", "tpot:12.5", "e2e:1000"]) == {
        "ttft": 0.2,
        "tpot": 0.0125,
        "e2el": 1.0,
    }
    assert parse_goodput([]) == {}


@pytest.mark.parametrize(
    "word",
    ["ttft", "ttft:", "ttft:fast", "ttft:0", "ttft:-1", "ttft:nan", "ttft:inf", "speed:3", ":3"],
)
def test_invalid_goodput_limits(word: str) -> None:
    with pytest.raises(InvalidParameterError, match="--goodput: must be METRIC:MILLISECONDS"):
        parse_goodput([word])


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 0.1}, True),
        ({"ttft": 0.099}, False),
        ({"tpot": 0.031}, True),  # (0.02 + 0.04) / 2
        ({"tpot": 0.029}, False),
        ({"itl": 0.031}, True),
        ({"e2el": 0.17}, True),
        ({"e2el": 0.15}, False),
        ({"ttft": 0.2, "tpot": 0.029}, False),
    ],
)
def test_a_good_request_stays_within_every_limit(limits: dict[str, float], good: bool) -> None:
    assert is_good(outcome(), limits) == good
    assert not is_good(outcome(failure="timeout"), limits)


def test_a_single_token_has_no_time_per_output_token() -> None:
    assert is_good(outcome(itls=()), {"tpot": 0.001, "itl": 0.001})
    assert metric_values(outcome(itls=()), "tpot") == []


def test_several_tokens_in_a_chunk_share_its_time() -> None:
    assert metric_values(outcome(num_tokens=7), "tpot") == [pytest.approx(0.01)]
    assert len(metric_values(outcome(num_tokens=7), "itl")) == 2


def test_failures_are_counted_by_kind_with_the_first_text() -> None:
    outcomes = [
        outcome(0.1, failure="timeout"),
        outcome(),
        outcome(0.2, failure="HTTP 429"),
        outcome(0.3, failure="HTTP 429"),
    ]
    assert list(failures_by_kind(outcomes).items()) == [
        ("HTTP 429", (2, "0.2")),
        ("timeout", (1, "0.1")),
    ]


def test_a_run() -> None:
    outcomes = [outcome(), outcome(0.3), outcome(0.2, failure="HTTP 429")]
    results = summarize_run(outcomes, 2.0, {"ttft": 0.25})
    assert (results.num_successes, results.num_failures, results.num_good, results.goodput) == (
        2,
        1,
        1,
        0.5,
    )
    assert (results.num_input_tokens, results.num_output_tokens, results.num_chunks) == (14, 6, 9)
    assert results.per_second(results.num_output_tokens) == 3.0
    assert results.metrics["ttft"].mean == pytest.approx(0.2) and results.metrics["itl"].count == 4


def test_a_run_of_failures_has_no_latencies() -> None:
    results = summarize_run([outcome(failure="timeout")], 1.0, {})
    assert results.metrics == {"ttft": None, "tpot": None, "itl": None, "e2el": None}
    assert (results.goodput, results.num_input_tokens, results.num_successes) == (None, 0, 0)


def test_input_tokens_that_one_request_does_not_know_are_unknown() -> None:
    unknown = outcome()
    unknown.num_prompt_tokens = None
    results = summarize_run([outcome(), unknown], 1.0, {})
    assert results.num_input_tokens is None and results.per_second(results.num_input_tokens) is None
