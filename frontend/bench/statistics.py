"""Statistics over outcomes: percentiles, rates, goodput, failures by kind.

Must not know: how outcomes were recorded, how statistics are printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum

from ...ipc.errors import InvalidParameterError
from .openai_client import Outcome

PERCENTILES = (50, 90, 95, 99)
METRICS = {
    "ttft": "time to first token",
    "tpot": "per token after the first",
    "itl": "time between chunks",
    "e2el": "time to the last token",
}


def percentile(ordered: Sequence[float], p: float) -> float:
    """Returns the p-th percentile of ascending values, with linear interpolation, as numpy does by
    default.
    """
    position = (len(ordered) - 1) * p / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True)
class Summary:
    """Statistics of one metric, in seconds."""

    count: int
    mean: float
    percentiles: dict[int, float]
    max: float


def summarize(values: Iterable[float]) -> Summary | None:
    """Returns None if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Summary(
        len(ordered),
        fsum(ordered) / len(ordered),
        {p: percentile(ordered, p) for p in PERCENTILES},
        ordered[-1],
    )


def metric_values(outcome: Outcome, metric: str) -> list[float]:
    """Returns a request's values of one of METRICS, in seconds."""
    if metric == "itl":
        return outcome.itls
    value = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.e2e}[metric]
    return [] if value is None else [value]


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """Converts ["ttft:200", "tpot:50"], in milliseconds, to {"ttft": 0.2, "tpot": 0.05}, in
    seconds.
    """
    limits = {}
    for word in words:
        metric, _, value = word.partition(":")
        metric = "e2el" if metric == "e2e" else metric
        try:
            limits[metric] = float(value) / 1000
        except ValueError:
            limits[metric] = -1.0
        if metric not in METRICS or not 0 < limits[metric] < float("inf"):
            raise InvalidParameterError(
                "--goodput",
                f"must be METRIC:MILLISECONDS with a metric of {', '.join(METRICS)}, got {word!r}",
            )
    return limits


def is_good(outcome: Outcome, limits: dict[str, float]) -> bool:
    """Returns whether a request succeeded within every limit (for itl, in the mean).

    A metric without a value counts as within its limit.
    """
    for metric, limit in limits.items():
        values = metric_values(outcome, metric)
        if values and fsum(values) / len(values) > limit:
            return False
    return outcome.failure is None


def failures_by_kind(outcomes: Iterable[Outcome]) -> dict[str, tuple[int, str]]:
    """Returns {kind: (count, text of the first)}, most frequent first."""
    found: dict[str, tuple[int, str]] = {}
    for outcome in outcomes:
        if outcome.failure is not None:
            count, text = found.get(outcome.failure, (0, outcome.failure_text))
            found[outcome.failure] = (count + 1, text)
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


@dataclass(frozen=True)
class Results:
    """The result of a run. Tokens and times are those of successful requests."""

    duration_s: float
    num_successes: int
    num_failures: int
    failures: dict[str, tuple[int, str]]
    num_input_tokens: int | None  # None: neither server nor tokenizer counted them
    num_output_tokens: int
    num_chunks: int
    counted_by: list[str]  # how output tokens were counted
    goodput: float | None  # good requests per second; None without limits
    num_good: int | None
    metrics: dict[str, Summary | None]

    def per_second(self, count: float | None) -> float | None:
        return None if count is None else count / self.duration_s if self.duration_s else 0.0


def summarize_run(outcomes: list[Outcome], duration_s: float, limits: dict[str, float]) -> Results:
    successes = [outcome for outcome in outcomes if outcome.failure is None]
    counts = [outcome.num_prompt_tokens for outcome in successes]
    num_good = sum(is_good(outcome, limits) for outcome in outcomes) if limits else None
    return Results(
        duration_s=duration_s,
        num_successes=len(successes),
        num_failures=len(outcomes) - len(successes),
        failures=failures_by_kind(outcomes),
        num_input_tokens=None if None in counts else sum(count or 0 for count in counts),
        num_output_tokens=sum(outcome.num_output_tokens for outcome in successes),
        num_chunks=sum(len(outcome.token_times) for outcome in outcomes),
        counted_by=sorted({outcome.counted_by for outcome in successes}),
        goodput=num_good / duration_s if num_good is not None and duration_s else None,
        num_good=num_good,
        metrics={
            metric: summarize(v for outcome in successes for v in metric_values(outcome, metric))
            for metric in METRICS
        },
    )
