"""Admission with a simulated clock: bounds, order, fairness, cancellation, and the estimate of the
waiting time.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.frontend.server import request_body
from quire.frontend.server.admission import MAX_RETRY_AFTER_S, Admission
from quire.frontend.server.http.errors import ApiError
from quire.frontend.server.request_body import Gunzip
from quire.frontend.server.routes.tokenize import LONG_TOKENS
from quire.frontend.server.turns import chat_turn
from quire.frontend.server.turns.tokenizing import LONG_TEXT
from quire.tests.frontend.server.scripted import ScriptedEngine, scripted_app, talk


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@dataclass
class World:
    """Requests that stay inside until the test releases them. Every change is checked against the
    bounds.
    """

    admission: Admission
    entered: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    tasks: dict[str, asyncio.Task] = field(default_factory=dict)
    inside: dict[str, asyncio.Event] = field(default_factory=dict)

    async def _request(
        self, name: str, key: str, n: int, num_tokens: int, priority: int, group: object
    ) -> None:
        try:
            async with self.admission.slot(key, group or name, n, num_tokens, priority):
                self.entered.append(name)
                self.inside[name] = asyncio.Event()
                try:
                    await self.inside[name].wait()
                finally:
                    del self.inside[name]
        except ApiError:
            self.refused.append(name)

    async def arrive(
        self,
        name: str,
        key: str = "",
        n: int = 1,
        num_tokens: int = 0,
        priority: int = 0,
        group: object = None,
    ) -> None:
        self.tasks[name] = asyncio.create_task(
            self._request(name, key, n, num_tokens, priority, group)
        )
        await settle()
        self.check()

    async def leave(self, name: str) -> None:
        self.inside[name].set()
        await settle()
        self.check()

    def check(self) -> None:
        admission, lines = self.admission, self.admission._lines
        waiting = [slot for line in lines.values() for *_, slot in line]
        assert admission.num_running <= admission.max_running or len(self.inside) == 1
        assert (
            len({slot.group for slot in waiting}) == len(admission._groups) <= admission.max_waiting
        )
        assert (
            sum(slot.num_tokens for slot in waiting)
            == admission.num_waiting_tokens
            <= admission.max_waiting_tokens
        )
        assert len(waiting) == admission.num_waiting and all(lines.values())
        if waiting:
            assert not admission.has_room(next(iter(lines.values()))[0][-1]), (
                "there is room, and somebody waits"
            )

    async def end(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert (
            self.admission.num_running
            == self.admission.num_waiting
            == self.admission.num_waiting_tokens
            == 0
        )
        assert not self.admission._lines and not self.admission._groups


def in_world(test, *bounds: int, clock: Clock | None = None) -> None:
    async def run() -> None:
        world = World(Admission(*bounds, clock or Clock()))
        await test(world)
        await world.end()

    asyncio.run(run())


def test_first_come_first_served_within_a_key_and_keys_take_turns() -> None:
    async def test(world: World) -> None:
        await world.arrive("first")
        for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
            await world.arrive(name, name[0])
        for _ in range(6):
            await world.leave(world.entered[-1])
        assert world.entered == ["first", "a1", "b1", "c1", "a2", "b2", "a3"]

    in_world(test, 1, 10, 10)


def test_priorities_count_within_one_key_only() -> None:
    async def test(world: World) -> None:
        await world.arrive("first")
        for name, key, priority in (
            ("a1", "a", 5),
            ("b1", "b", 9),
            ("a2", "a", -1),
            ("a3", "a", 5),
        ):
            await world.arrive(name, key, priority=priority)
        for _ in range(4):
            await world.leave(world.entered[-1])
        assert world.entered == ["first", "a2", "b1", "a1", "a3"]

    in_world(test, 1, 10, 10)


def test_each_completion_counts_and_no_request_overtakes_a_heavy_one() -> None:
    async def test(world: World) -> None:
        await world.arrive("a", n=3)
        await world.arrive("heavy", n=4)
        await world.arrive("light")
        # the light request would fit, but it is not first
        assert world.entered == ["a"] and world.admission.num_running == 3
        await world.leave("a")
        assert world.entered == ["a", "heavy"]
        await world.leave("heavy")
        await world.arrive("giant", n=9)
        await world.leave("light")
        # admitted alone, since it would never fit otherwise
        assert world.entered == ["a", "heavy", "light", "giant"]

    in_world(test, 4, 10, 10)


def test_bounds() -> None:
    async def test(world: World) -> None:
        # a request that is admitted at once needs no room in the queue
        await world.arrive("in", num_tokens=1000)
        await world.arrive("a", num_tokens=6)
        await world.arrive("b", num_tokens=5)
        assert world.refused == ["b"]  # too many tokens
        await world.arrive("c", num_tokens=2)
        await world.arrive("d", num_tokens=1)
        assert world.refused == ["b", "d"]  # too many requests
        await world.arrive("c2", num_tokens=1, group="c")
        assert world.refused == ["b", "d"]  # of a call that already waits
        assert world.admission.num_refused == {"tokens": 1, "requests": 1}

    in_world(test, 1, 2, 10)


def test_a_queue_of_length_zero() -> None:
    async def test(world: World) -> None:
        await world.arrive("a")
        await world.arrive("b")
        assert world.refused == ["b"]

    in_world(test, 1, 0, 10)


def test_admitted_and_cancelled_at_the_same_time() -> None:
    async def test(world: World) -> None:
        for name in ("a", "b", "c"):
            await world.arrive(name)
        world.inside["a"].set()
        while world.admission.num_waiting != 1:
            await asyncio.sleep(0)
        world.tasks["b"].cancel()
        await settle()
        assert world.entered == ["a", "c"] and world.admission.num_running == 1
        # cancelled first; its turn comes before it handles the cancellation
        await world.arrive("d")
        await world.arrive("e")
        world.tasks["d"].cancel()
        world.inside["c"].set()
        await settle()
        world.check()
        assert world.entered == ["a", "c", "e"]

    in_world(test, 1, 10, 10)


EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("arrive"),
            st.sampled_from("abc"),
            st.integers(1, 5),
            st.integers(0, 8),
            st.integers(-1, 1),
        ),
        st.tuples(st.just("leave"), st.integers(0, 20)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.integers(1, 4), st.integers(0, 6), st.integers(1, 20))
def test_any_order_of_events(
    events: list[tuple], max_running: int, max_waiting: int, max_waiting_tokens: int
) -> None:
    """Bounds hold at any time, a cancelled waiter leaves no trace, and every other request that is
    not refused is admitted.
    """

    async def test(world: World) -> None:
        cancelled = set()
        for number, event in enumerate(events):
            if event[0] == "arrive":
                await world.arrive(f"{number}", *event[1:])
            elif event[0] == "leave" and world.inside:
                await world.leave(sorted(world.inside)[event[1] % len(world.inside)])
            elif event[0] == "cancel" and (
                names := [n for n, task in world.tasks.items() if not task.done()]
            ):
                name = names[event[1] % len(names)]
                cancelled.add(name)
                world.tasks[name].cancel()
                await settle()
                world.check()
        while world.inside:
            await world.leave(next(iter(world.inside)))
        assert (
            set(world.tasks) <= {*world.entered, *world.refused, *cancelled}
            and not world.admission.num_waiting
        )

    in_world(test, max_running, max_waiting, max_waiting_tokens)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from("aaaaab"), min_size=1, max_size=40))
def test_no_key_waits_for_more_than_one_request_of_each_other_key(keys: list[str]) -> None:
    async def test(world: World) -> None:
        await world.arrive("first", "x")
        for number, key in enumerate(keys):
            await world.arrive(f"{key}{number}", key)
        while world.inside:
            await world.leave(next(iter(world.inside)))
        order = [name[0] for name in world.entered[1:]]
        both = 2 * min(order.count("a"), order.count("b"))
        assert order[:both] in (["a", "b"] * (both // 2), ["b", "a"] * (both // 2))

    in_world(test, 1, 100, 100)


def in_shared_world(test, *bounds: int, **options) -> None:
    async def run() -> None:
        admission = Admission(*bounds, Clock(), reserves_shares=True, **options)
        world = World(admission)
        world.check = lambda: None  # limits may be exceeded by shares
        await test(world)
        await world.end()
        assert not admission._running

    asyncio.run(run())


def test_a_key_has_its_share_though_another_fills_the_engine_and_the_queue() -> None:
    async def test(world: World) -> None:
        for i in range(8):
            await world.arrive(f"a{i}", "a", num_tokens=10)
        assert world.entered == ["a0", "a1", "a2", "a3"] and world.refused == ["a6", "a7"]
        for i in range(5):
            await world.arrive(f"b{i}", "b", num_tokens=10)
        # two of four in the engine, one of two in the queue
        assert world.entered[4:] == ["b0", "b1"] and world.refused[2:] == ["b3", "b4"]
        assert world.admission.num_running == 6
        await world.leave("b0")
        assert world.entered[6:] == ["b2"]
        for name in ("a0", "a1", "a2"):  # then there is room for another
            await world.leave(name)
        assert world.entered[7:] == ["a4"]

    in_shared_world(test, 4, 2, 1000)


def test_waiting_tokens_of_a_key_are_bounded() -> None:
    async def test(world: World) -> None:
        await world.arrive("a", "a", num_tokens=500)
        await world.arrive("a1", "a", num_tokens=6)
        await world.arrive("a2", "a", num_tokens=5)
        assert world.refused == ["a2"]
        assert world.admission.num_refused == {"tokens_per_key": 1}
        await world.arrive("b", "b", num_tokens=500)
        await world.arrive("b1", "b", num_tokens=10)
        assert world.refused == ["a2"]

    in_shared_world(test, 1, 100, 1000, max_waiting_tokens_per_key=10)


@settings(max_examples=40, deadline=None)
@given(EVENTS, st.integers(1, 4), st.integers(0, 6), st.integers(1, 20))
def test_shares_leave_nobody_behind(
    events: list[tuple], max_running: int, max_waiting: int, max_waiting_tokens: int
) -> None:
    """Every request that is not refused is admitted, and a key alone is held to the limits."""

    async def test(world: World) -> None:
        for number, event in enumerate(events):
            if event[0] == "arrive":
                await world.arrive(f"{number}", *event[1:])
                keys = len({event[1], *world.admission._running, *world.admission._lines})
                assert keys > 1 or World.check(world) is None
            elif event[0] == "leave" and world.inside:
                await world.leave(sorted(world.inside)[event[1] % len(world.inside)])
        while world.inside:
            await world.leave(next(iter(world.inside)))
        assert set(world.tasks) == {*world.entered, *world.refused}
        assert not world.admission.num_waiting

    in_shared_world(test, max_running, max_waiting, max_waiting_tokens)


def test_a_request_is_refused_at_once_or_leaves_the_queue_when_its_time_is_over() -> None:
    async def test(world: World) -> None:
        admission = world.admission
        await world.arrive("a")
        with pytest.raises(ApiError, match="expected to begin after 1 s") as caught:
            async with admission.slot("", "hasty", deadline=100.5):
                raise AssertionError("it was let in")
        assert caught.value.status == 429 and admission.num_refused == {"deadline": 1}
        admission.expected_wait_s = lambda: 0.0  # wrong
        with pytest.raises(ApiError, match="time was over") as caught:
            async with admission.slot("", "late", deadline=100.05):
                raise AssertionError("it was let in")
        assert caught.value.status == 504 and not admission.num_waiting

    in_world(test, 1, 10, 10)


def test_the_estimate_follows_the_pace() -> None:
    clock = Clock()

    async def test(world: World) -> None:
        await world.arrive("0", num_tokens=10)
        for number in range(1, 101):
            await world.arrive(f"{number}", num_tokens=10)
        for number in range(20):  # two per second
            clock.now += 0.5
            await world.leave(f"{number}")
        assert world.admission.num_waiting == 80
        assert world.admission.expected_wait_s() == pytest.approx(40, rel=0.1)
        for number in range(20, 30):  # then one in five seconds
            clock.now += 5
            await world.leave(f"{number}")
        assert world.admission.expected_wait_s() == pytest.approx(70 * 5, rel=0.1)
        for number in range(30, 40):
            clock.now += 100
            await world.leave(f"{number}")
        assert world.admission.expected_wait_s() == MAX_RETRY_AFTER_S

    in_world(test, 1, 200, 10_000, clock=clock)


def test_a_refusal_has_a_retry_after() -> None:
    clock = Clock()

    async def test(world: World) -> None:
        for name in ("a", "b", "c"):
            await world.arrive(name)
        clock.now += 10
        with pytest.raises(ApiError) as caught:
            async with world.admission.slot("", "d"):
                raise AssertionError("it was let in")
        error = caught.value
        assert (error.status, error.type, error.code) == (
            429,
            "rate_limit_error",
            "rate_limit_exceeded",
        )
        # Two requests wait, and the running one has taken ten seconds so far.
        assert (
            error.headers() == {"retry-after": "30"}
            and "30 s" in error.message
            and "2 requests" in error.message
        )

    in_world(test, 1, 2, 100, clock=clock)


ALL_HAVE_ARRIVED = threading.Event()


def slowly(function):
    def run(*args, **options):
        ALL_HAVE_ARRIVED.wait(60)
        time.sleep(0.01)
        return function(*args, **options)

    return run


def large_body(monkeypatch, engine) -> dict[str, Any]:
    monkeypatch.setattr(request_body, "decode_body", slowly(request_body.decode_body))
    body = json.dumps({"prompt": "Hi."}) + " " * request_body.LARGE_BODY
    return {"url": "/v1/completions", "content": body}


def compressed_body(monkeypatch, engine) -> dict[str, Any]:
    unpack = Gunzip.feed
    monkeypatch.setattr(Gunzip, "feed", slowly(unpack))
    user = random.Random(0).randbytes(2 * request_body.SMALL_CHUNK).hex()
    body = gzip.compress(json.dumps({"prompt": "Hi.", "user": user}).encode())
    headers = {"content-encoding": "gzip"}
    return {"url": "/v1/completions", "content": body, "headers": headers}


def slow_template(monkeypatch, engine) -> dict[str, Any]:
    monkeypatch.setattr(chat_turn, "_render_at_once", lambda render: None)
    tokenizer = engine.tokenizer
    render = slowly(tokenizer.render_chat)
    monkeypatch.setattr(tokenizer, "render_chat", render)
    return {"url": "/v1/chat/completions", "json": {"messages": [{"role": "user", "content": "H"}]}}


def long_text(monkeypatch, engine) -> dict[str, Any]:
    tokenizer = engine.tokenizer
    monkeypatch.setattr(tokenizer, "encode_batch", slowly(tokenizer.encode_batch))
    return {"url": "/tokenize", "json": {"prompt": "a " * LONG_TEXT}}


def many_tokens(monkeypatch, engine) -> dict[str, Any]:
    tokenizer = engine.tokenizer
    monkeypatch.setattr(tokenizer, "decode_batch", slowly(tokenizer.decode_batch))
    return {"url": "/detokenize", "json": {"tokens": [5] * LONG_TOKENS}}


@pytest.mark.parametrize(
    "work", [large_body, compressed_body, slow_template, long_text, many_tokens]
)
def test_the_work_of_one_key_delays_no_other_at_any_shared_queue(work, monkeypatch) -> None:
    """Sixteen requests of one key come before one of another. Grammars have a queue of their own
    (tests/executor/sampling/test_grammar_queue.py), and so does the engine.
    """
    engine = ScriptedEngine(["hi"])
    asked = work(monkeypatch, engine)
    ALL_HAVE_ARRIVED.clear()
    app, ended = scripted_app(engine, api_key=["one", "two"]), []

    async def send(client: httpx.AsyncClient, key: str) -> None:
        headers = asked.get("headers", {}) | {"authorization": f"Bearer {key}"}
        answer = await client.post(**asked | {"headers": headers})
        assert answer.status_code == 200, answer.text
        ended.append(key)

    async def send_all(client: httpx.AsyncClient) -> None:
        tasks = []
        for key in ["one"] * 16 + ["two"]:
            tasks.append(asyncio.create_task(send(client, key)))
            await asyncio.sleep(0)
        turns = app.state.work_turns
        async with asyncio.timeout(60):
            while turns.num_running + turns.num_waiting < len(tasks):
                await asyncio.sleep(0.01)
        ALL_HAVE_ARRIVED.set()
        await asyncio.gather(*tasks)

    talk(app, send_all)
    assert len(ended) == 17 and ended.index("two") < 8, ended
