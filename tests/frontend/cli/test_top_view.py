"""The screen that `quire top` draws of an observation."""

from typing import Any

import pytest
from quire.frontend.cli.top_view import rates, screen, seconds, short_id, trouble
from rich.console import Console, RenderableType

COUNTERS = {
    "num_free_blocks": 25,
    "num_blocks": 101,
    "prefix_cache_queries": 200,
    "prefix_cache_hits": 50,
    "num_preemptions": 3,
    "num_finished_stop": 4,
    "num_finished_length": 5,
}


def request(i: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "request_id": f"chatcmpl-{i:08x}aaaabbbbccccdddd-0123456789abcdef",
        "state": "running",
        "num_prompt_tokens": 100,
        "num_computed_tokens": 60,
        "num_output_tokens": 0,
        "max_tokens": 40,
        "num_blocks": 5,
        "num_cached_tokens": 32,
        "num_preemptions": 0,
        "priority": 0,
        "queued_time": 1.0,
    } | changes


def observation(*requests: dict[str, Any], steps: list[list] | None = None) -> dict[str, Any]:
    return {
        "time": 50.0,
        "step": 9,
        "steps": [[9, 49.5, 0.001, 0.006, 0.003, 20, 80, 2, 0]] if steps is None else steps,
        "requests": list(requests),
        "num_blocks": 101,
        "block_counts": {"used": 60, "shared": 15, "cached": 5, "free": 20},
        "counters": COUNTERS,
        "model": "tiny[red]",
        "max_model_len": 1000,
        "block_size": 16,
        "uptime_s": 3723.0,
        "num_queued": 2,
    }


def drawn(renderable: RenderableType, width: int = 110) -> str:
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_the_figures() -> None:
    text = drawn(
        screen(observation(request(), request(1, state="waiting")), "http://host", width=110)
    )
    for words in (
        "tiny[red]",
        "up 1 h 2 min",
        "40 output tokens/s",
        "10 prompt tokens/s",
        "1 running",
        "3 waiting",
        "3 preemptions",
        "25 % prefix hits",
        "9 finished",
        "75 % of 100 blocks in use",
        "schedule 1.0 ms",
        "execute 6.0 ms",
        "process 3.0 ms",
    ):
        assert words in text, words


def test_rates_are_computed_over_the_last_seconds() -> None:
    def step(number: int, start: float) -> list:
        return [number, start, 0, 0, 0, 3, 7, 1, 0]

    old_and_new = [step(0, 10.0), step(1, 48.5), step(2, 49.5)]
    assert rates(observation(steps=old_and_new)) == (7.0, 3.0, 1.0)
    assert (
        rates(observation(steps=[step(0, 10.0)])) == rates(observation(steps=[])) == (0.0, 0.0, 0.0)
    )
    busy = [step(i, 49.5 + i / 1000) for i in range(500)]  # the engine keeps only half a second
    assert rates(observation(steps=busy)) == (7000.0, 3000.0, 1000.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["prefill", "60/100", "0/40"]),
        ({"num_computed_tokens": 110, "num_output_tokens": 10}, ["decode", "100/100", "10/40"]),
        ({"state": "swapped"}, ["swapped out"]),
        ({"state": "held"}, ["paused"]),
        ({"state": "grammar", "max_tokens": None}, ["grammar", "0/900"]),
    ],
)
def test_a_row(changes: dict[str, Any], words: list[str]) -> None:
    line = next(
        line
        for line in drawn(screen(observation(request(7, **changes)), "u", width=110)).splitlines()
        if "00000007" in line
    )
    assert [word for word in words if word not in line] == [] and line.rstrip().endswith("5")


def test_bars_show_cached_tokens() -> None:
    console = Console(width=110, color_system="standard", force_terminal=True)
    with console.capture() as capture:
        console.print(screen(observation(request(7)), "u", width=110))
    line = next(line for line in capture.get().splitlines() if "00000007" in line)
    cached, computed = (
        line.split("\x1b[36m")[1].split("\x1b")[0],
        line.split("\x1b[34m")[1].split("\x1b")[0],
    )
    assert (len(cached), len(computed)) == (round(0.32 * 19), round(0.28 * 19)) and set(
        cached + computed
    ) == {"█"}


@pytest.mark.parametrize(("width", "height"), [(60, 14), (80, 24), (200, 50)])
def test_it_fits_the_terminal(width: int, height: int) -> None:
    text = drawn(
        screen(observation(*(request(i) for i in range(100))), "u", width=width, height=height),
        width,
    )
    assert len(text.splitlines()) <= height and max(map(len, text.splitlines())) <= width
    assert "more" in text.splitlines()[-1]


def test_an_idle_engine_without_history() -> None:
    text = drawn(
        screen(
            observation(steps=[]) | {"counters": COUNTERS | {"prefix_cache_queries": 0}},
            "u",
            width=80,
        )
    )
    assert "No requests." in text and "none yet" in text and "- prefix hits" in text


def test_an_error_is_a_sentence() -> None:
    assert "It does not answer [bold]" in drawn(trouble("u", "It does not answer [bold]"))


def test_short_ids_and_seconds() -> None:
    tail = "-0123456789abcdef"
    assert short_id("chatcmpl-0123456789abcdef01234567" + tail) == "01234567"
    assert short_id("cmpl-0123456789abcdef01234567-3" + tail) == "01234567-3"
    assert (
        short_id("mine" + tail) == "mine"
        and short_id("a-name-of-my-own-choice" + tail) == "a-name-of-my-ow…"
    )
    assert short_id("1_chatcmpl-0123456789abcdef01234567" + tail) == "01234567.1"
    assert [seconds(s) for s in (0.00005, 0.0123, 2.5)] == ["50 µs", "12.3 ms", "2.50 s"]
