"""Tokenizing in threads: short and long texts, refusals without tokenizing, fairness between keys,
and abandoned texts.
"""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
from quire.frontend.server.admission import NUM_THREADS, Admission, in_turn
from quire.frontend.server.http.call import HttpCall
from quire.frontend.server.http.errors import ApiError
from quire.frontend.server.turns.tokenizing import (
    HUGE_TEXT,
    LONG_TEXT,
    SLICE,
    check_length,
    max_characters,
    slices,
    tokenize_all,
)
from quire.tests.frontend.tiny_tokenizers import tiny_tokenizer
from tokenizers import normalizers


def state(max_model_len: int = 10**9, tokenizer=None) -> SimpleNamespace:
    return SimpleNamespace(
        ready_engine=lambda: SimpleNamespace(tokenizer=tokenizer or tiny_tokenizer()),
        max_model_len=max_model_len,
        work_turns=Admission(NUM_THREADS, 100, 10**9),
    )


def call_of(key: str = "") -> HttpCall:
    return HttpCall("req-1", 0.0, None, tenant=key)


async def tokenized(where: SimpleNamespace, texts: list[str], must_fit: bool = False) -> list:
    return await tokenize_all(where, call_of(), texts, param="messages", must_fit=must_fit)


def test_however_long_the_ids_are_the_same() -> None:
    long = "the cat sat on it. " * (2 * LONG_TEXT // 19)
    for texts in (["the cat"], ["the cat", "sat"], [long], [long, "the cat"], [long] * 30):
        assert asyncio.run(tokenized(state(), texts)) == [
            tiny_tokenizer().encode(text) for text in texts
        ]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([1], [[1]]),
        ([SLICE, 1], [[SLICE], [1]]),
        ([1, SLICE - 1, 1, 1], [[1, SLICE - 1], [1, 1]]),
        ([1, 3 * SLICE, 1], [[1], [3 * SLICE], [1]]),
    ],
)
def test_slices(lengths: list[int], expected: list[list[int]]) -> None:
    assert [[len(t) for t in some] for some in slices(["x" * n for n in lengths])] == expected


def test_the_loop_is_not_blocked() -> None:
    async def run() -> int:
        reading = asyncio.ensure_future(tokenized(state(), ["the cat sat on it. " * 50_000]))
        num_turns = 0
        while not reading.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        return num_turns

    assert asyncio.run(run()) > 5


def test_a_far_too_long_text_is_refused_without_tokenizing() -> None:
    longest = tiny_tokenizer().max_token_length
    with pytest.raises(ApiError) as caught:
        asyncio.run(tokenized(state(64), ["x" * 30_000_000], must_fit=True))
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "messages")
    assert f"at least {-(-30_000_000 // longest)} tokens" in error.message
    check_length(tiny_tokenizer(), "x" * longest * 64, "prompt", 64)  # as long as could just fit


def test_texts_that_need_not_fit_have_a_limit() -> None:
    most = max_characters(64)
    assert (most, max_characters(10**6)) == (HUGE_TEXT, 16 * 10**6)
    unbounded = SimpleNamespace(max_token_length=None)
    for tokenizer, must_fit in ((None, False), (unbounded, True)):
        with pytest.raises(ApiError) as caught:
            asyncio.run(tokenized(state(64, tokenizer), ["x" * (most + 1)], must_fit))
        error = caught.value
        assert (error.status, error.code) == (400, "string_above_max_length")
        assert error.param == "messages" and f"at most {most} characters" in error.message


def test_decomposed_text_is_tokenized_if_it_could_fit() -> None:
    backend = SimpleNamespace(normalizer=normalizers.NFC())
    tokenizer = SimpleNamespace(max_token_length=2, backend=backend)
    check_length(tokenizer, "e\u0301" * 200, "prompt", 100)
    for text in ("x" * 400, "e\u0301" * 500):
        with pytest.raises(ApiError):
            check_length(tokenizer, text, "prompt", 100)


def test_without_a_bound_or_a_tokenizer() -> None:
    check_length(SimpleNamespace(max_token_length=None), "x" * 10_000, "prompt", 10)
    no_tokenizer = SimpleNamespace(ready_engine=lambda: SimpleNamespace(tokenizer=None))
    with pytest.raises(ApiError, match="token ids"):
        asyncio.run(tokenized(no_tokenizer, ["the"]))


def test_keys_take_turns() -> None:
    """One key has much work. The work of another key is next when a thread is free."""

    async def run() -> list[str]:
        turns, order, may_go_on = Admission(1, 100, 10**9), [], threading.Event()

        def work(name: str) -> None:
            order.append(name)
            may_go_on.wait(60)

        tasks = [
            asyncio.create_task(in_turn(turns, call_of("a"), lambda i=i: work(f"a{i}")))
            for i in range(5)
        ]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(in_turn(turns, call_of("b"), lambda: work("b"))))
        await asyncio.sleep(0)
        may_go_on.set()
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(run()) == ["a0", "a1", "b", "a2", "a3", "a4"]


def test_an_abandoned_text_gives_up_its_turn() -> None:
    async def run() -> list[str]:
        turns, order, may_go_on = Admission(1, 100, 10**9), [], threading.Event()

        def work(name: str) -> None:
            order.append(name)
            assert may_go_on.wait(60)
            raise ValueError("nobody asks")

        running = asyncio.create_task(in_turn(turns, call_of(), lambda: work("running")))
        waiting = asyncio.create_task(in_turn(turns, call_of(), lambda: work("waiting")))
        await asyncio.sleep(0)
        for task in (running, waiting):
            task.cancel()
        gone = await asyncio.gather(running, waiting, return_exceptions=True)
        assert [type(error) for error in gone] == [asyncio.CancelledError] * 2
        # its thread still runs, so its place is not free
        assert (turns.num_running, turns.num_waiting) == (1, 0)
        last = asyncio.create_task(in_turn(turns, call_of(), lambda: order.append("last")))
        await asyncio.sleep(0)
        assert turns.num_waiting == 1
        may_go_on.set()
        await last
        assert turns.num_running == 0
        return order

    assert asyncio.run(run()) == ["running", "last"]
