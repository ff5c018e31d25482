"""Utilities calls a utility of the replicas that it is for.

Must not know: requests, what a utility does beyond calls.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....ipc.errors import EngineDeadError
from .calls import DIVISIVE, FORGETTING, REPORTS, TRACES, Observations, is_simultaneous, join
from .replica import Replica
from .routing import Router
from .waves import WaveCoordinator


class Utilities:
    """lose: is called with a replica that cannot be used any more. raise_if_over: raises the error
    that ended the client, if one has.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        router: Router,
        lose: Callable[[Replica, EngineDeadError], None],
        raise_if_over: Callable[[], None],
        waves: WaveCoordinator | None = None,
    ):
        self._replicas, self._router = replicas, router
        self._lose, self._raise_if_over = lose, raise_if_over
        self._waves = waves
        self._changes: set[asyncio.Task] = set()  # calls in progress that change engines
        self._observations = Observations(len(replicas))
        self._traced: Replica | None = None

    @property
    def traced_index(self) -> int | None:
        """Returns the replica whose steps are traced."""
        return None if self._traced is None else self._traced.index

    def cancel(self) -> None:
        for change in self._changes:
            change.cancel()

    def _usable(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.failure is None]

    async def call(self, method: str, args: tuple) -> Any:
        """Works as EngineClient.call_utility_async."""
        self._raise_if_over()
        if method in TRACES:
            return await self._trace(method, args)
        if method == "observe":
            return await self._observe(*args)
        if method in REPORTS:
            return join(method, list((await self.call_each(method, args)).values()))
        # A caller that stops waiting must not leave a change half made.
        change = asyncio.get_running_loop().create_task(self._change(method, args))
        self._changes.add(change)
        change.add_done_callback(self._on_changed)
        return await asyncio.shield(change)

    def _on_changed(self, change: asyncio.Task) -> None:
        self._changes.discard(change)
        if not change.cancelled():
            change.exception()  # its caller may be gone

    async def call_each(self, method: str, args: tuple) -> dict[int, Any]:
        """Returns the answers to a report by replica. Replicas that cannot answer now are left
        out.
        """
        usable = self._usable()
        return await self._ask(method, {replica.index: args for replica in usable})

    async def _ask(self, method: str, args_of: Mapping[int, tuple]) -> dict[int, Any]:
        """Returns the answers of the replicas that are up, in their order, or of all if none is
        up.
        """
        while True:
            self._raise_if_over()
            usable = [one for one in self._usable() if one.index in args_of]
            asked = [one for one in usable if one.is_up] or usable
            calls = {
                one: asyncio.ensure_future(
                    one.client.call_utility_async(method, *args_of[one.index])
                )
                for one in asked
            }
            for replica, call in calls.items():
                replica.reports.add(call)
            try:
                await asyncio.wait(calls.values())
            finally:
                for replica, call in calls.items():
                    replica.reports.discard(call)
                    call.cancel()
            if answers := self._answers(calls):
                return answers

    def _answers(self, calls: Mapping[Replica, asyncio.Future]) -> dict[int, Any]:
        """Returns the answers of finished calls. Raises the first error; a death leaves a replica
        out.
        """
        failures, answers = [], {}
        for replica, call in calls.items():
            if call.cancelled():
                continue
            if (error := call.exception()) is None:
                answers[replica.index] = call.result()
            elif isinstance(error, EngineDeadError):
                self._lose(replica, error)
            else:
                failures.append(error)
        if failures:
            raise failures[0]
        return answers

    async def _change(self, method: str, args: tuple) -> Any:
        if self._waves is None:
            return await self._change_each(method, args)
        async with self._waves.stopped():
            change = asyncio.ensure_future(self._change_each(method, args))
            if method == "pause" and is_simultaneous(method, args):
                # It may wait for requests, which engines compute when they are released. The calls
                # are sent before that.
                for _ in range(2):
                    await asyncio.sleep(0)
            else:
                await asyncio.wait([change])
        return await change

    async def _change_each(self, method: str, args: tuple) -> Any:
        usable = self._usable()
        usable.sort(key=lambda one: not one.is_up)  # the first should answer at once
        answers: dict[int, Any] = {}
        if not is_simultaneous(method, args):
            while usable and not answers:
                answers = self._answers(await self._called(usable[:1], method, args))
                del usable[0]
        calls = await self._called(usable, method, args)
        if method in DIVISIVE:
            for replica, call in calls.items():
                if (error := call.exception()) is not None:
                    self._lose(replica, EngineDeadError(f"{method} failed: {error}"))
        answers |= self._answers(calls)
        self._raise_if_over()
        if method in FORGETTING:
            for replica in self._replicas:
                self._router.prefixes.forget(replica.index)
        return join(method, [answers[index] for index in sorted(answers)])

    async def _called(
        self, replicas: Sequence[Replica], method: str, args: tuple
    ) -> dict[Replica, asyncio.Task]:
        calls = {
            one: asyncio.ensure_future(one.client.call_utility_async(method, *args))
            for one in replicas
        }
        if calls:
            await asyncio.wait(calls.values())
        return calls

    async def _trace(self, method: str, args: tuple) -> Any:
        """Traces steps of one replica, the one with most requests. New requests go there, too."""
        replica = self._traced
        if replica is None:
            up = [one for one in self._usable() if one.is_up] or self._usable()
            replica = max(up, key=lambda one: self._router.num_requests(one.index))
        try:
            answer = await replica.client.call_utility_async(method, *args)
        finally:
            if method == "end_trace":
                self._traced = None
        if method == "start_trace":
            self._traced = replica
        return answer

    async def _observe(self, since_step: Any = -1, max_blocks: Any = 4096) -> dict[str, Any]:
        observations, args_of = self._observations, {}
        for replica in self._usable():
            since = since_step
            if type(since_step) is int and since_step >= -1:  # else the engine refuses it
                since = observations.since(replica.index, replica.client.ready.epoch)
            args_of[replica.index] = (since, max_blocks)
        return observations.join(await self._ask("observe", args_of), since_step)
