"""Which of several models are in memory: order of eviction, waiting, failures, races, the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from quire.frontend.server.http.errors import ApiError
from quire.frontend.server.model_slot import ModelSlot
from quire.frontend.server.models import Models
from quire.tests.frontend.server.slots import MIB, bad_files, make_slots

THREE = {"a": 100, "b": 100, "c": 100}


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await work()

    return asyncio.run(bounded())


async def use(models: Models, name: str, hold_s: float = 0.0) -> ModelSlot:
    slot = models.find(name)
    await models.acquire(slot)
    try:
        engine: Any = slot.state.engine
        assert slot.phase == "ready" and engine.name == name
        await asyncio.sleep(hold_s)
        assert engine.is_running and not engine.is_asleep
    finally:
        models.release(slot)
    return slot


async def settled(models: Models) -> None:
    while any(s.leaving is not None or s.coming is not None for s in models.slots.values()):
        await asyncio.sleep(0.001)


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(0.001)


def test_the_least_recently_used_leaves() -> None:
    models, log, _ = make_slots(THREE, limit=200)

    async def work() -> None:
        for name in "abac":  # b was used before a
            await use(models, name)
        assert log == ["start a", "start b", "end b", "start c"]
        assert [s.phase for s in models.slots.values()] == ["ready", "unloaded", "ready"]

    run(work)


def test_it_sleeps_if_that_is_enough() -> None:
    models, log, _ = make_slots(THREE, limit=215)

    async def work() -> None:
        for name in "abca":
            await use(models, name)
        # a's and b's process of 10 MiB stay beside two whole models of 100; waking costs no start
        assert log == ["start a", "start b", "sleep a", "start c", "sleep b", "wake_up a"]

    run(work)


def test_a_sleeping_one_ends_if_its_process_is_in_the_way() -> None:
    models, log, _ = make_slots({"a": 100, "b": 195}, limit=200)

    async def work() -> None:
        await use(models, "a")
        models.slots["a"].leave(unload=False)
        await use(models, "b")
        assert log == ["start a", "sleep a", "end a", "start b"]

    run(work)


def test_waiters_share_a_load_and_its_failure() -> None:
    models, log, failures = make_slots(THREE, limit=200, delay_s=0.01)
    failures["a"] = [bad_files()]

    async def work() -> None:
        outcomes = await asyncio.gather(
            *(use(models, "a") for _ in range(5)), use(models, "b"), return_exceptions=True
        )
        errors = [error for error in outcomes if isinstance(error, ApiError)]
        assert len(errors) == 5 and {error.code for error in errors} == {"model_load_failed"}
        assert "'a' could not be loaded: its files are bad" in errors[0].message
        assert log == ["start b"]
        await asyncio.gather(*(use(models, "a") for _ in range(5)))  # the next attempt
        assert log == ["start b", "start a"]

    run(work)


def test_a_busy_model_is_waited_for_and_takes_no_new_users() -> None:
    models, log, _ = make_slots({"a": 100, "b": 100}, limit=100)
    order: list[str] = []

    async def noted(name: str) -> None:
        await use(models, name)
        order.append(name)

    async def work() -> None:
        a, b = models.slots["a"], models.slots["b"]
        await models.acquire(a)
        second = asyncio.create_task(noted("b"))
        await until(lambda: a.wanted is not None)
        third = asyncio.create_task(noted("a"))  # would starve b if it were let in
        await asyncio.sleep(0.01)
        assert not order and b.phase == "unloaded"
        models.release(a)
        await asyncio.gather(second, third)
        assert order == ["b", "a"]
        assert log == ["start a", "end a", "start b", "end b", "start a"]

    run(work)


def test_a_request_while_its_model_is_unloaded() -> None:
    models, log, _ = make_slots(THREE, limit=300, delay_s=0.01)

    async def work() -> None:
        slot = await use(models, "a")
        leaving = asyncio.create_task(models.unload(slot))
        await until(lambda: slot.leaving is not None)
        await asyncio.gather(*(use(models, "a") for _ in range(3)), leaving)
        assert log == ["start a", "end a", "start a"]
        assert slot.keep_alive_s is None  # the server's: unload changed it for once

    run(work)


def test_a_client_that_leaves_while_it_waits_for_memory() -> None:
    models, log, _ = make_slots({"a": 100, "b": 100}, limit=100)

    async def work() -> None:
        a, b = models.slots["a"], models.slots["b"]
        await models.acquire(a)
        waiting = asyncio.create_task(use(models, "b"))
        await until(lambda: a.wanted is not None)
        held_off = asyncio.create_task(use(models, "a"))
        await asyncio.sleep(0)
        waiting.cancel()
        await held_off  # nobody wants the memory any more
        models.release(a)
        await settled(models)
        assert log == ["start a"] and b.num_users == 0 and a.num_users == 0
        await use(models, "b")

    run(work)


def test_a_client_that_leaves_during_the_load() -> None:
    models, log, _ = make_slots(THREE, limit=300, delay_s=0.02)

    async def work() -> None:
        leaving, staying = (asyncio.create_task(use(models, "a")) for _ in range(2))
        await until(lambda: models.slots["a"].phase == "loading")
        leaving.cancel()
        await staying
        last = asyncio.create_task(use(models, "b"))
        await until(lambda: models.slots["b"].phase == "loading")
        last.cancel()
        await settled(models)  # the load is not lost
        assert models.slots["b"].phase == "ready" and log == ["start a", "start b"]

    run(work)


def test_what_does_not_fit_is_refused_with_figures() -> None:
    models, _, _ = make_slots({"a": 100, "big": 1024}, limit=512)

    async def work() -> None:
        await use(models, "a")
        with pytest.raises(ApiError) as raised:
            await use(models, "big")
        error = raised.value
        assert (error.status, error.code) == (503, "not_enough_memory")
        for words in (
            "It needs 1.00 GiB (weights 0.99 GiB, KV cache 0.00 GiB, process 0.01 GiB)",
            "0.40 GiB of 0.50 GiB is free; in use: a 0.10 GiB (ready)",
            "smaller max_model_len or kv_cache_memory_bytes, or with quantization int8",
        ):
            assert words in error.message
        assert models.slots["a"].phase == "ready"  # nothing was evicted for it

    run(work)


def test_measured_memory_that_others_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit was measured at start; since then another program has taken memory."""
    models, log, _ = make_slots({"a": 100, "b": 100}, limit=300, is_measured=True)
    free = [150 * MIB]
    monkeypatch.setattr("quire.frontend.server.models.free_memory_bytes", lambda: free[0])

    async def work() -> None:
        await use(models, "a")
        free[0] = 50 * MIB
        with pytest.raises(ApiError, match="'b' does not fit into memory"):
            await use(models, "b")
        assert log == ["start a", "sleep a", "end a"]  # what could leave has left

    run(work)


def test_the_wait_has_an_end() -> None:
    models, _, _ = make_slots({"a": 100, "b": 100}, limit=100, wait_s=0.05)

    async def work() -> None:
        await models.acquire(models.slots["a"])
        with pytest.raises(ApiError) as raised:
            await use(models, "b")
        assert raised.value.code == "model_not_ready" and raised.value.retry_after_s
        assert "in use: a 0.10 GiB (busy)" in raised.value.message
        models.release(models.slots["a"])

    run(work)


def test_those_who_wait_are_limited() -> None:
    models, _, _ = make_slots(THREE, limit=300, delay_s=0.02, max_waiting=2)

    async def work() -> None:
        waiting = [asyncio.create_task(use(models, name)) for name in "aa"]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="2 requests wait for models") as raised:
            await use(models, "b")
        assert raised.value.status == 429 and raised.value.retry_after_s
        await asyncio.gather(*waiting)
        await asyncio.gather(*(use(models, "a") for _ in range(9)))  # a ready one takes them all
        assert models.num_waiting == 0

    run(work)


def test_keep_alive() -> None:
    models, log, _ = make_slots(THREE, limit=300, keep_alive_s=0.08)

    async def work() -> None:
        a, b, c = models.slots.values()
        await use(models, "a")
        assert a.unloads_at is not None
        await until(lambda: a.phase == "unloaded")  # it sleeps after half of the time
        assert log == ["start a", "sleep a", "end a"] and a.unloads_at is None
        await models.acquire(b)
        models.release(b, -1.0)  # this request asks for ever
        await models.acquire(c)
        models.release(c, 0.0)
        await until(lambda: c.phase == "unloaded")
        await asyncio.sleep(0.1)
        assert b.phase == "ready" and log[3:] == ["start b", "start c", "end c"]

    run(work)


def test_an_engine_that_dies_harms_no_other() -> None:
    models, log, _ = make_slots(THREE, limit=200)

    async def work() -> None:
        a, b = models.slots["a"], models.slots["b"]
        await models.acquire(a)
        await models.acquire(b)
        engine: Any = a.state.engine
        engine.die()
        models.note_deaths()
        again = asyncio.create_task(use(models, "a"))
        await asyncio.sleep(0.01)
        assert a.phase == "leaving"  # its requests end first
        models.release(a)
        await again
        assert log == ["start a", "start b", "end a", "start a"]
        assert b.phase == "ready" and b.num_users == 1
        assert a.state.engine is not engine

    run(work)


def test_an_engine_that_dies_asleep_is_started_again() -> None:
    models, log, _ = make_slots(THREE, limit=300)

    async def work() -> None:
        a = await use(models, "a")
        await asyncio.wait([a.leave(unload=False)])
        engine: Any = a.state.engine
        engine.die()
        await use(models, "a")
        assert log == ["start a", "sleep a", "end a", "start a"]

    run(work)


def test_the_end_refuses_waiters_and_cancels_loads() -> None:
    models, log, _ = make_slots({"a": 100, "b": 100, "c": 200}, limit=200, delay_s=0.05)

    async def work() -> None:
        await use(models, "a")
        loading = asyncio.create_task(use(models, "b"))
        await until(lambda: models.slots["b"].phase == "loading")
        waiting = asyncio.create_task(use(models, "c"))
        await asyncio.sleep(0.01)
        await models.shutdown()
        for task in (loading, waiting):
            with pytest.raises(ApiError) as raised:
                await task
            assert raised.value.code == "shutting_down"
        assert log == ["start a", "cancelled b", "end a"]
        with pytest.raises(ApiError, match="shutting down"):
            await use(models, "a")

    run(work)


def test_unknown_names() -> None:
    models, _, _ = make_slots(THREE, limit=300)
    assert models.find(None) is models.find("") is models.find("a")
    with pytest.raises(ApiError, match="'x' does not exist. This server has 'a', 'b', 'c'"):
        models.find("x")


@pytest.mark.parametrize("seed", range(6))
def test_a_storm(seed: int) -> None:
    """Users of four models with memory for two; some leave early, and some loads fail or engines
    die. Everyone gets an answer, and the plan is never exceeded.
    """
    rng = random.Random(seed)
    sizes = {"a": 100, "b": 100, "c": 60, "d": 140}
    limit = rng.choice([200, 215, 240])
    keep_alive_s = rng.choice([-1.0, 0.0, 0.004])
    models, log, failures = make_slots(sizes, limit=limit, delay_s=0.001, keep_alive_s=keep_alive_s)

    async def one(number: int) -> str:
        await asyncio.sleep(rng.random() * 0.1)
        name = rng.choice("abcd")
        if number in (11, 77):
            failures.setdefault(name, []).append(bad_files())
        task = asyncio.create_task(use(models, name, rng.random() * 0.004))
        if number % 7 == 0:
            await asyncio.sleep(rng.random() * 0.01)
            task.cancel()
        if number % 40 == 0 and models.slots[name].phase == "ready":
            engine: Any = models.slots[name].state.engine
            engine.die()
        try:
            await task
        except asyncio.CancelledError:
            return "left"
        except ApiError as error:
            return str(error.code)
        return "answered"

    async def watch() -> None:
        while True:
            held = sum(slot.held_bytes for slot in models.slots.values())
            assert held <= limit * MIB
            models.note_deaths()
            await asyncio.sleep(0)

    async def work() -> None:
        watcher = asyncio.create_task(watch())
        outcomes = await asyncio.gather(*(one(number) for number in range(120)))
        assert set(outcomes) <= {"answered", "left", "model_load_failed", "engine_dead"}
        assert outcomes.count("answered") > 10  # a failed load fails all that wait for it
        await settled(models)
        assert not watcher.done()
        watcher.cancel()
        assert all(slot.num_users == 0 for slot in models.slots.values())
        await models.shutdown()
        assert log.count("start a") == log.count("end a")

    run(work)
