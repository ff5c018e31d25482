"""Formats results of `quire bench`: tables for people, JSON for programs.

Must not know: how results were measured.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...ipc.errors import InvalidParameterError
from .load import LoadReport
from .machine import describe_machine
from .openai_client import Outcome
from .statistics import METRICS, PERCENTILES, Results, Summary, percentile

# Beyond these limits the client itself was measured: its core is busy, or its event loop reads the
# socket late.
MAX_CLIENT_CPU_SHARE = 0.8
MAX_CLIENT_LAG_S = 0.02


def client_figures(report: LoadReport, results: Results) -> dict[str, float]:
    """Returns the CPU time and the lateness of this client."""
    lags, delays = sorted(report.lags) or [0.0], sorted(report.send_delays) or [0.0]
    return {
        "cpu_share": report.client_cpu_s / report.duration_s if report.duration_s else 0.0,
        "cpu_us_per_chunk": 1e6 * report.client_cpu_s / results.num_chunks
        if results.num_chunks
        else 0.0,
        "event_loop_lag_p99_s": percentile(lags, 99),
        "send_delay_p99_s": percentile(delays, 99),
    }


def client_warning(client: dict[str, float]) -> str | None:
    """Returns a warning if the client was too slow to be trusted."""
    lag_ms = 1000 * max(client["event_loop_lag_p99_s"], client["send_delay_p99_s"])
    if client["cpu_share"] > MAX_CLIENT_CPU_SHARE:
        what = f"it used {100 * client['cpu_share']:.0f} % of a core, and it can use only one"
    elif lag_ms > 1000 * MAX_CLIENT_LAG_S:
        what = f"its event loop was up to {lag_ms:.0f} ms late (p99), because no core was free"
    else:
        return None
    return (
        f"this client was saturated: {what}. The times above include its own delays; run it on "
        f"another machine or reduce the load."
    )


def milliseconds_table(rows: list[tuple[str, Summary | None]]) -> list[str]:
    heads = ["mean", "median", *(f"p{p}" for p in PERCENTILES[1:]), "max"]
    lines = [f"{'':<36}" + "".join(f"{head:>10}" for head in heads)]
    for title, summary in rows:
        if summary is not None:
            values = [summary.mean, *(summary.percentiles[p] for p in PERCENTILES), summary.max]
            lines.append(f"{title:<36}" + "".join(f"{1000 * value:>10.2f}" for value in values))
    return lines


def format_results(report: LoadReport, results: Results, limits: dict[str, float]) -> str:
    """Returns the table for standard output."""
    lines = []

    def line(title: str, value: Any, rate: float | None = None, unit: str = "") -> None:
        shown_rate = f"   {rate:.2f} {unit}" if rate is not None else ""
        lines.append(f"{title:<24}{value:>12}{shown_rate}")

    def counted(title: str, count: int | None, unit: str) -> None:
        line(title, "unknown" if count is None else count, results.per_second(count), unit)

    if report.was_interrupted:
        num_missing = sum(outcome is None for outcome in report.outcomes)
        lines.append(f"interrupted: {num_missing} requests had not ended and are not counted below")
    counted("successful requests", results.num_successes, "requests/s")
    line("failed requests", results.num_failures)
    for kind, (count, text) in results.failures.items():
        lines.append(f"  {count} {kind}; the first: {' '.join(text.split())}")
    line("duration", f"{results.duration_s:.2f} s")
    counted("input tokens", results.num_input_tokens, "tokens/s")
    counted("output tokens", results.num_output_tokens, "tokens/s")
    if results.counted_by == ["chunks"]:
        lines.append(
            "  (the server reports no usage: chunks were counted; --tokenizer counts tokens)"
        )
    line("peak concurrency", report.peak_concurrency)
    if limits:
        wanted = ", ".join(f"{metric} <= {1000 * limit:g} ms" for metric, limit in limits.items())
        line("goodput", results.num_good, results.goodput, f"requests/s with {wanted}")
    rows = [
        (f"{metric.upper()}, {what}", results.metrics[metric]) for metric, what in METRICS.items()
    ]
    lines += ["", *milliseconds_table(rows)]
    client = client_figures(report, results)
    lines += [
        "",
        f"this client: {100 * client['cpu_share']:.0f} % of a core, "
        f"{client['cpu_us_per_chunk']:.1f} us per chunk, "
        f"event loop late by {1000 * client['event_loop_lag_p99_s']:.1f} ms, requests by "
        f"{1000 * client['send_delay_p99_s']:.1f} ms (99 %)",
    ]
    if warning := client_warning(client):
        lines.append(f"WARNING: {warning}")
    return "\n".join(lines)


def results_as_json(report: LoadReport, results: Results) -> dict[str, Any]:
    """Returns the results, and a row per request with times in seconds from the start."""
    client = client_figures(report, results)
    return {
        "was_interrupted": report.was_interrupted,
        "peak_concurrency": report.peak_concurrency,
        "requests_per_s": results.per_second(results.num_successes),
        "input_tokens_per_s": results.per_second(results.num_input_tokens),
        "output_tokens_per_s": results.per_second(results.num_output_tokens),
        **asdict(results),
        "failures": {
            kind: {"count": count, "first": text}
            for kind, (count, text) in results.failures.items()
        },
        "client": client,
        "client_warning": client_warning(client),
        "requests": [
            _request_row(outcome, report.start)
            for outcome in report.outcomes
            if outcome is not None
        ],
    }


def _request_row(outcome: Outcome, start: float) -> dict[str, Any]:
    return {
        "start_s": outcome.start - start,
        "ttft_s": outcome.ttft,
        "tpot_s": outcome.tpot,
        "e2el_s": outcome.e2e,
        "num_prompt_tokens": outcome.num_prompt_tokens,
        "num_output_tokens": outcome.num_output_tokens,
        "finish_reason": outcome.finish_reason,
        "failure": outcome.failure,
    }


def write_json(path: str, settings: dict[str, Any], result: dict[str, Any]) -> None:
    """Writes the date, the machine, the settings and the results of a benchmark."""
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    content = {"date": date, "machine": describe_machine(), "settings": settings, **result}
    try:
        Path(path).write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise InvalidParameterError("--json", f"cannot write {path}: {error.strerror}") from None
