"""What happens to the engine beside its steps: pause and resume, sleep and wake-up, new weights,
calls of the workers.

Must not know: sockets, threads, torch; who waits for a result, or how it is told.

    pause("abort")  everybody ends with ABORT          ┐
    pause("wait")   what is there finishes             ├ meanwhile arrivals are held; resume() lets everything go on
    pause("keep")   everything freezes where it is     ┘
    sleep(level)    everything is preempted, the memory given back; arrivals are held until wake_up()

Both may hold at once; the engine goes on when neither does. A pause ends with the last client that
asked for one and is still there: a client that dies takes its pause with it. Sleep stays until
somebody wakes the engine: another program may be using the memory. An engine that is asked to leave
(SIGTERM) while it is paused or asleep leaves at once: what is frozen would never finish.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ..ipc.errors import EnginePausedError, InvalidParameterError

MODES = ("abort", "wait", "keep")
TAGS = ("weights", "kv_cache")  # what can be asleep, in the order in which it must be woken
SLEEPS = {1: ("kv_cache",), 2: TAGS}  # level -> what it frees
# methods of a worker that must not be called behind our back
KNOWN_TO_THE_CORE = frozenset({"sleep", "wake_up", "load_weights"})


@dataclass(eq=False, slots=True)
class Wait:
    """A utility's result that a later step brings.

    `is_due` is asked when something has changed, `result` once.
    """

    is_due: Callable[[], bool]
    result: Callable[[], Any]
    ends_with_pause: bool = False
    future: Future = field(default_factory=Future)


class PauseControl:
    """The one owner of the pause, of what sleeps, and of the results that are due later.

    `core` is the EngineCore it belongs to.

    Its utilities return a plain value, or a Future that `settle` or a later call completes, in the
    thread of the core.
    """

    UTILITIES = frozenset(
        {
            "pause",
            "resume",
            "is_paused",
            "stall_reason",
            "sleep",
            "wake_up",
            "is_sleeping",
            "reset_prefix_cache",
            "load_weights",
            "collective_rpc",
        }
    )

    DRAINING = frozenset({"pause", "sleep", "reset_prefix_cache", "load_weights", "collective_rpc"})

    def __init__(self, core: Any):
        self.mode: str | None = None  # of MODES, while paused
        self.asleep: set[str] = set()  # of TAGS
        self.can_step = True  # asked in every step
        self.waits: list[Wait] = []
        self._core = core
        self._owners: set[int] = set()  # clients whose pause stands

    # ------------------------------------------------------------ pause

    def pause(self, mode: str = "abort", *, client_index: int = 0) -> Future:
        """See above.

        The result comes when the mode is reached and every client has been sent the rows that led
        there.

        "wait" fails with EnginePausedError if the engine is resumed before everything has finished.
        Called again it changes the mode.
        """
        core = self._core
        if mode not in MODES:
            raise InvalidParameterError("mode", f"must be one of {', '.join(MODES)}, got {mode!r}")
        if mode == "wait" and self.asleep and core.num_unheld_requests():
            raise EnginePausedError(
                "the engine is asleep, so what is there cannot finish: wake_up() first"
            )
        core.drain()
        self.mode = mode
        self._owners.add(client_index)
        if mode == "abort":
            core.abort_all_requests()
        self._update()
        if mode != "wait":
            return self._when_delivered(lambda: None)
        return self._when(
            Wait(
                lambda: not (core.num_unheld_requests() or core.owes_rows()),
                lambda: None,
                ends_with_pause=True,
            )
        )

    def resume(self) -> None:
        """Ends every client's pause: what was frozen goes on, what was held is queued, in the order
        of arrival.
        """
        self.settle()
        self.mode = None
        self._owners.clear()
        for wait in [wait for wait in self.waits if wait.ends_with_pause]:
            self.waits.remove(wait)
            wait.future.set_exception(
                EnginePausedError('the pause ended before pause("wait") had seen everything finish')
            )
        self._update()

    def is_paused(self) -> bool:
        return self.mode is not None

    def stall_reason(self) -> Future:
        """Why nothing more would come however long one waited, in a sentence; None if something
        may. Once all rows are delivered.
        """
        core = self._core

        def goes_on() -> bool:
            return self.can_step and core.num_unheld_requests() > 0

        return self._when(Wait(lambda: goes_on() or not core.owes_rows(), self.describe_stall))

    def describe_stall(self) -> str | None:
        """The same for now: rows that are owed may come."""
        if self._core.has_work() or (self.mode is None and not self.asleep):
            return None
        if self.asleep:
            return f"the engine is asleep ({', '.join(sorted(self.asleep))}): wake_up() first"
        return "the engine is paused: resume() first"

    def drop_client(self, client_index: int) -> None:
        """It has left: a pause that nobody else asked for ends."""
        self._owners.discard(client_index)
        if self.mode is not None and not self._owners:
            self.resume()
        self.settle()

    # ------------------------------------------------------------ results that are due later

    def settle(self) -> None:
        """Completes what is due.

        Called after each step whose rows are on their way, and when a client has left.
        """
        for wait in [wait for wait in self.waits if wait.is_due()]:
            self.waits.remove(wait)
            wait.future.set_result(wait.result())

    def _when(self, wait: Wait) -> Future:
        self.waits.append(wait)
        self.settle()
        return wait.future

    def _when_delivered(self, result: Callable[[], Any]) -> Future:
        return self._when(Wait(lambda: not self._core.owes_rows(), result))

    def _update(self) -> None:
        """To be called when mode or sleep has changed."""
        self.can_step = self.mode != "keep" and not self.asleep
        if self.mode is not None or self.asleep:
            self._core.scheduler.hold_arrivals()
        else:
            self._core.scheduler.release_arrivals()

    # ------------------------------------------------------------ sleep

    def sleep(self, level: int = 1) -> None:
        """Gives memory back: the KV cache (level 1), the weights too (level 2).

        Requests stay queued and go on after wake_up.
        """
        if type(level) is not int or level not in SLEEPS:
            raise InvalidParameterError(
                "level",
                f"must be 1 (frees the KV cache) or 2 (frees the weights too), got {level!r}",
            )
        tags = [tag for tag in SLEEPS[level] if tag not in self.asleep]
        if not tags:
            return
        self._forget_kv()
        self.asleep.update(tags)
        self._update()
        self._core.executor.collective_rpc("sleep", tags)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Takes memory again: all that sleeps, or what is named.

        What fails stays asleep, and can be woken again.
        """
        tags = list(TAGS) if tags is None else tags
        if not isinstance(tags, list) or not tags or not all(tag in TAGS for tag in tags):
            raise InvalidParameterError(
                "tags", f"must be a list of {' and '.join(TAGS)}, or None for both, got {tags!r}"
            )
        if "kv_cache" in tags and "weights" in self.asleep and "weights" not in tags:
            raise InvalidParameterError(
                "tags",
                "the weights are asleep, and the KV cache is made for them: wake them first, or "
                "together",
            )
        for tag in TAGS:
            if tag in tags and tag in self.asleep:
                self._core.executor.collective_rpc("wake_up", [tag])
                self.asleep.discard(tag)
        self._update()

    def is_sleeping(self) -> bool:
        return bool(self.asleep)

    # ------------------------------------------------------------ cache, weights, workers

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forgets all cached blocks, if no request holds one; returns whether it did.

        `reset_running`: requests that hold some are
        preempted, and recompute theirs.
        """
        if type(reset_running) is not bool:
            raise InvalidParameterError(
                "reset_running", f"must be True or False, got {reset_running!r}"
            )
        self._core.drain()
        if reset_running:
            self._forget_kv()
            return True
        return self._core.scheduler.reset_prefix_cache()

    def load_weights(self, path: str) -> None:
        """The weights in the directory `path` replace those in use.

        Raises ModelLoadError, and then the old ones go on serving.

        What was computed with the old weights is computed anew; unfinished requests keep the tokens
        they have and go on with the new.
        """
        if not isinstance(path, str) or not path:
            raise InvalidParameterError("path", f"must be the name of a directory, got {path!r}")
        self._core.drain()
        self._core.executor.collective_rpc("load_weights", path)
        self._forget_kv()
        self.asleep.discard("weights")
        self._update()

    def collective_rpc(self, method: str, args: list[Any] = []) -> list[Any]:  # noqa: B006 (never changed; the wire's default)
        """Calls a method of every worker by name; the results in rank order."""
        if not isinstance(method, str):
            raise InvalidParameterError("method", f"must be a method's name, got {method!r}")
        if method in KNOWN_TO_THE_CORE:
            raise InvalidParameterError(
                "method", f"{method} is not for the workers alone: call the engine's own {method}"
            )
        if not isinstance(args, list):
            raise InvalidParameterError("args", f"must be a list, got {args!r}")
        self._core.drain()
        return self._core.executor.collective_rpc(method, *args)

    def _forget_kv(self) -> None:
        """Nobody holds a block, and none can be found again."""
        self._core.drain()
        self._core.scheduler.preempt_all()
        if not self._core.scheduler.reset_prefix_cache():
            raise AssertionError("a block is held by nobody")
