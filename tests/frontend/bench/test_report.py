"""The table and the JSON: failures, missing counts, interruption, and a client that was
too slow.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from quire import InvalidParameterError
from quire.frontend.bench.load import LoadReport
from quire.frontend.bench.openai_client import Outcome
from quire.frontend.bench.report import (
    client_figures,
    client_warning,
    format_results,
    results_as_json,
    write_json,
)
from quire.frontend.bench.statistics import summarize_run

TIMES = [100.1, 100.12, 100.16]
GOOD = Outcome(
    start=100.0,
    num_prompt_tokens=4,
    num_output_tokens=3,
    counted_by="usage",
    token_times=TIMES,
    end=100.16,
    finish_reason="length",
)
BAD = Outcome(start=100.5, end=100.6, failure="HTTP 429", failure_text="queue\nis full")
REPORT = LoadReport(
    [GOOD, BAD],
    start=100.0,
    duration_s=2.0,
    peak_concurrency=2,
    client_cpu_s=0.1,
    lags=[0.001] * 99,
    send_delays=[0.0, 0.002],
)


def formatted(report: LoadReport = REPORT, limits: dict[str, float] | None = None) -> str:
    outcomes = [outcome for outcome in report.outcomes if outcome is not None]
    return format_results(
        report, summarize_run(outcomes, report.duration_s, limits or {}), limits or {}
    )


def test_the_table() -> None:
    text = formatted(limits={"ttft": 0.2, "tpot": 0.05})
    lines = {line[:24].strip(): line[24:].split() for line in text.splitlines()}
    assert lines["successful requests"] == ["1", "0.50", "requests/s"]
    assert (
        lines["failed requests"] == ["1"]
        and "  1 HTTP 429; the first: queue is full" in text.splitlines()
    )
    assert lines["input tokens"] == ["4", "2.00", "tokens/s"] and lines["output tokens"] == [
        "3",
        "1.50",
        "tokens/s",
    ]
    assert lines["peak concurrency"] == ["2"]
    assert "0.50 requests/s with ttft <= 200 ms, tpot <= 50 ms" in text
    ttft = next(line for line in text.splitlines() if line.startswith("TTFT"))
    assert ttft.split()[-6:] == ["100.00"] * 6
    itl = next(line for line in text.splitlines() if line.startswith("ITL"))
    assert itl.split()[-6:] == ["30.00", "30.00", "38.00", "39.00", "39.80", "40.00"]
    assert "WARNING" not in text and "interrupted" not in text and "chunks were counted" not in text


def test_unknown_values_are_marked() -> None:
    uncounted = replace(GOOD, num_prompt_tokens=None, counted_by="chunks")
    text = formatted(replace(REPORT, outcomes=[uncounted]))
    assert (
        "input tokens                 unknown\n" in text
        and "chunks were counted; --tokenizer counts tokens" in text
    )


def test_an_interrupted_run_lists_what_is_missing() -> None:
    text = formatted(replace(REPORT, outcomes=[GOOD, None, None], was_interrupted=True))
    assert text.startswith("interrupted: 2 requests had not ended and are not counted below\n")


def test_only_failures() -> None:
    text = formatted(replace(REPORT, outcomes=[BAD]))
    assert "TTFT" not in text and "HTTP 429" in text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"client_cpu_s": 1.8}, "it used 90 % of a core"),
        ({"lags": [0.001] * 50 + [0.1] * 50}, "its event loop was up to 100 ms late"),
        ({"send_delays": [0.05] * 10}, "its event loop was up to 50 ms late"),
    ],
)
def test_a_client_that_was_too_slow_is_reported(changes: dict, sentence: str) -> None:
    assert "WARNING: this client was saturated: " + sentence in formatted(
        replace(REPORT, **changes)
    )


def test_a_client_that_kept_up_is_not_reported() -> None:
    figures = client_figures(REPORT, summarize_run([GOOD], 2.0, {}))
    assert client_warning(figures) is None
    assert figures["cpu_share"] == 0.05 and figures["cpu_us_per_chunk"] == pytest.approx(1e5 / 3)


def test_json_holds_everything(tmp_path: Path) -> None:
    results = summarize_run([GOOD, BAD], 2.0, {"ttft": 0.2})
    path = tmp_path / "result.json"
    write_json(
        str(path),
        {"seed": 3},
        results_as_json(replace(REPORT, outcomes=[GOOD, BAD, None]), results),
    )
    found = json.loads(
        path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
    )
    assert (
        found["settings"] == {"seed": 3}
        and found["machine"]["num_cores"] >= 1
        and found["machine"]["processor"]
    )
    assert (found["requests_per_s"], found["output_tokens_per_s"], found["goodput"]) == (
        0.5,
        1.5,
        0.5,
    )
    assert found["failures"] == {"HTTP 429": {"count": 1, "first": "queue\nis full"}}
    assert found["metrics"]["ttft"]["percentiles"]["99"] == pytest.approx(0.1)
    assert [row["start_s"] for row in found["requests"]] == [0.0, 0.5] and found["requests"][1][
        "failure"
    ] == "HTTP 429"
    assert found["client_warning"] is None


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="--json: cannot write"):
        write_json(str(tmp_path / "none" / "x.json"), {}, {})
