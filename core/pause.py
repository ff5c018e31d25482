"""Operations between steps: pause and resume, sleep and wake-up, new weights, calls of workers.

Must not know: sockets, threads, torch; who waits for a result, or how it is delivered.

    pause("abort")  all requests end with ABORT        ┐ meanwhile new requests are
    pause("wait")   running requests finish            ├ held; resume() continues
    pause("keep")   all requests freeze                ┘
    sleep(level)    all requests are preempted and memory is released; new requests are held until
                    wake_up()

Both may be active at once; the engine continues when neither is. A pause ends with the last
connected client that requested it: a client that dies takes its pause with it. A sleep stays until
wake_up, because another program may be using the memory. A paused or sleeping engine that is asked
to exit (SIGTERM) exits at once: frozen requests would never finish.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..ipc.errors import EnginePausedError, InvalidParameterError
from .arrivals import Arrivals
from .scheduling.scheduler import Scheduler

MODES = ("abort", "wait", "keep")
TAGS = ("weights", "kv_cache")  # what can sleep, in the order in which it must wake up
SLEEPS = {1: ("kv_cache",), 2: TAGS}  # level -> what it frees
# methods of a worker that only this module may call
KNOWN_TO_THE_CORE = frozenset({"sleep", "wake_up", "load_weights"})


class Workers(Protocol):
    """See Executor."""

    def collective_rpc(self, method: str, *args: Any) -> list[Any]: ...


@dataclass(eq=False, slots=True)
class PendingResult:
    """A utility's result that a later step brings.

    `is_due` is checked when something has changed; `result` is called once.
    """

    is_due: Callable[[], bool]
    result: Callable[[], Any]
    ends_with_pause: bool = False
    future: Future = field(default_factory=Future)


class PauseControl:
    """Owns the pause, what sleeps, and the results that are due later.

    Utilities are called when no step is in flight. They return a plain value, or a Future that
    `settle` or a later call completes, in the thread that runs steps.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workers: Workers,
        arrivals: Arrivals,
        *,
        has_work: Callable[[], bool],
        has_pending_outputs: Callable[[], bool],
        publish_kv_events: Callable[[], None],
    ):
        """has_work: whether a step would compute something or deliver a row. has_pending_outputs:
        whether a client has rows to receive, or a step in flight may bring some.
        """
        self.mode: str | None = None  # of MODES, while paused
        self.asleep: set[str] = set()  # of TAGS
        self.can_step = True  # read in every step
        self._has_turn = True  # see set_turn
        self.pending: list[PendingResult] = []
        self._scheduler = scheduler
        self._workers = workers
        self._arrivals = arrivals
        self._has_work = has_work
        self._has_pending_outputs = has_pending_outputs
        self._publish_kv_events = publish_kv_events
        self._owners: set[int] = set()  # clients whose pause is active

    # ------------------------------------------------------------ pause

    def pause(self, mode: str = "abort", *, client_index: int = 0) -> Future:
        """Pauses the engine in a mode of the module's docstring.

        The result comes when the mode is reached and all rows that led there are sent. "wait" fails
        with EnginePausedError if the engine is resumed before everything has finished. Another call
        changes the mode.
        """
        if mode not in MODES:
            raise InvalidParameterError("mode", f"must be one of {', '.join(MODES)}, got {mode!r}")
        if mode == "wait" and self.asleep and self._arrivals.num_unheld_requests():
            raise EnginePausedError(
                "the engine is asleep, so what is there cannot finish: wake_up() first"
            )
        self.mode = mode
        self._owners.add(client_index)
        if mode == "abort":
            self._arrivals.abort_all()
        self._update()
        if mode != "wait":
            return self.when(lambda: not self._has_pending_outputs())
        return self._when(
            PendingResult(
                lambda: not (self._arrivals.num_unheld_requests() or self._has_pending_outputs()),
                lambda: None,
                ends_with_pause=True,
            )
        )

    def resume(self) -> None:
        """Ends every client's pause: frozen requests continue, held ones are queued in order of
        arrival.
        """
        self.settle()
        self.mode = None
        self._owners.clear()
        for one in [one for one in self.pending if one.ends_with_pause]:
            self.pending.remove(one)
            one.future.set_exception(
                EnginePausedError('the pause ended before pause("wait") had seen everything finish')
            )
        self._update()

    def is_paused(self) -> bool:
        return self.mode is not None

    def stall_reason(self) -> Future:
        """Why no output can come, after all rows are delivered; None if one may come."""

        def can_progress() -> bool:
            return self.can_step and self._arrivals.num_unheld_requests() > 0

        return self._when(
            PendingResult(
                lambda: can_progress() or not self._has_pending_outputs(), self.describe_stall
            )
        )

    def describe_stall(self) -> str | None:
        """What `stall_reason` would answer now, while rows may still come."""
        if self._has_work() or (self.mode is None and not self.asleep):
            return None
        if self.asleep:
            return f"the engine is asleep ({', '.join(sorted(self.asleep))}): wake_up() first"
        return "the engine is paused: resume() first"

    def drop_client(self, client_index: int) -> None:
        """The client has left: a pause that no other client requested ends."""
        self._owners.discard(client_index)
        if self.mode is not None and not self._owners:
            self.resume()
        self.settle()

    def is_used_by(self, client_index: int) -> bool:
        """Whether the client has requested the pause."""
        return client_index in self._owners

    # ------------------------------------------------------------ results that are due later

    def settle(self) -> None:
        """Completes the results that are due.

        Called after each step whose rows are sent, and when a client has left.
        """
        for one in [one for one in self.pending if one.is_due()]:
            self.pending.remove(one)
            one.future.set_result(one.result())

    def _when(self, result: PendingResult) -> Future:
        self.pending.append(result)
        self.settle()
        return result.future

    def when(self, is_due: Callable[[], bool]) -> Future:
        """Completes with None, when `is_due` says so after a step."""
        return self._when(PendingResult(is_due, lambda: None))

    def _update(self) -> None:
        """Called when mode or sleep has changed."""
        self.set_turn(self._has_turn)
        if self.mode is not None or self.asleep:
            self._scheduler.hold_arrivals()
        else:
            self._scheduler.release_arrivals()

    def set_turn(self, has_turn: bool) -> None:
        """Sets whether steps may be scheduled at all. They may not while other engines do not take
        part.
        """
        self._has_turn = has_turn
        self.can_step = has_turn and self.mode != "keep" and not self.asleep

    def has_requests(self) -> bool:
        """Whether a step would compute something if this engine had its turn."""
        scheduler = self._scheduler
        is_waiting = len(scheduler.requests) > len(scheduler.held)
        return is_waiting and self.mode != "keep" and not self.asleep

    # ------------------------------------------------------------ sleep

    def sleep(self, level: int = 1) -> None:
        """Releases memory: the KV cache (level 1), the weights too (level 2).

        Requests stay queued and continue after wake_up.
        """
        if type(level) is not int or level not in SLEEPS:
            raise InvalidParameterError(
                "level",
                f"must be 1 (frees the KV cache) or 2 (frees the weights too), got {level!r}",
            )
        tags = [tag for tag in SLEEPS[level] if tag not in self.asleep]
        if not tags:
            return
        self._forget_kv(keeps=True)
        self.asleep.update(tags)
        self._update()
        self._workers.collective_rpc("sleep", tags)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocates memory again: all that sleeps, or the named parts.

        What fails stays asleep and can be woken again.
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
                self._workers.collective_rpc("wake_up", [tag])
                self.asleep.discard(tag)
        self._update()

    def is_sleeping(self) -> bool:
        return bool(self.asleep)

    # ------------------------------------------------------------ cache, weights, workers

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Drops all cached blocks, and those that were offloaded, if no request holds one; returns
        whether it did.

        `reset_running`: requests that hold blocks are preempted, and recompute theirs.
        """
        if type(reset_running) is not bool:
            raise InvalidParameterError(
                "reset_running", f"must be True or False, got {reset_running!r}"
            )
        if reset_running:
            self._forget_kv()
        was_reset = self._scheduler.reset_prefix_cache()
        if was_reset and (offload := self._scheduler.kv_cache_manager.offload) is not None:
            offload.clear()
        self._publish_kv_events()
        return was_reset

    def load_weights(self, path: str) -> None:
        """Replaces the weights by those in the directory `path`.

        Raises ModelLoadError; the old ones then stay in use. Unfinished requests keep their tokens,
        and their KV entries are recomputed with the new weights.
        """
        if not isinstance(path, str) or not path:
            raise InvalidParameterError("path", f"must be the name of a directory, got {path!r}")
        self._workers.collective_rpc("load_weights", path)
        self._forget_kv()
        self.asleep.discard("weights")
        self._update()

    def collective_rpc(self, method: str, args: list[Any] = []) -> list[Any]:  # noqa: B006 (never changed; the wire's default)
        """Calls a method of every worker by name; returns the results in rank order."""
        if not isinstance(method, str):
            raise InvalidParameterError("method", f"must be a method's name, got {method!r}")
        if method in KNOWN_TO_THE_CORE:
            raise InvalidParameterError(
                "method", f"{method} is not for the workers alone: call the engine's own {method}"
            )
        if not isinstance(args, list):
            raise InvalidParameterError("args", f"must be a list, got {args!r}")
        return self._workers.collective_rpc(method, *args)

    def _forget_kv(self, *, keeps: bool = False) -> None:
        """Preempts all requests and drops the prefix cache. keeps: its blocks are stored outside it
        first, if there is a place for them.
        """
        self._scheduler.preempt_all()
        if keeps:
            self._scheduler.keep_cached_blocks()
        if not self._scheduler.reset_prefix_cache():
            raise AssertionError("a block in use belongs to no request")
        self._publish_kv_events()
