"""Utilities: what a client calls by name, between two steps.

Must not know: what a utility does, how its answer reaches the client.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from ..ipc.counters import EngineCounters
from ..ipc.errors import InvalidParameterError
from ..ipc.failures import pack_exception
from ..ipc.messages import BEAT, UtilityCall, UtilityResult
from .loras import LoraRegistry
from .observation import Observer
from .pause import PauseControl
from .tracing import Tracing
from .waves import EngineWaves


class Utility(NamedTuple):
    """One row of the registry."""

    function: Callable[..., Any]
    is_drained: bool = False  # the steps in flight are finished first
    is_owned: bool = False  # it gets the index of the client that calls


def list_utilities(
    observer: Observer,
    pausing: PauseControl,
    loras: LoraRegistry,
    tracing: Tracing,
    waves: EngineWaves | None,
    *,
    check_integrity: Callable[[], bool],
    execute_dummy_batch: Callable[[], None],
) -> dict[str, Utility]:
    """All utilities, by name."""
    return {
        "ping": Utility(lambda: "pong"),  # an answer between two steps
        # an answer at once: an engine in its own process gives it in another thread
        "beat": Utility(lambda: BEAT),
        "observe": Utility(observer.observe),
        "scheduler_state": Utility(observer.scheduler_state),
        "get_metrics": Utility(observer.get_metrics),
        "status": Utility(observer.status),
        "expert_load": Utility(observer.expert_load),
        "check_integrity": Utility(check_integrity),
        # so that ranks without work stay in step with the others
        "execute_dummy_batch": Utility(execute_dummy_batch, is_drained=True),
        "start_trace": Utility(tracing.start_trace, is_drained=True, is_owned=True),
        "wait_for_trace": Utility(tracing.wait_for_trace),
        "end_trace": Utility(tracing.end_trace, is_drained=True, is_owned=True),
        "pause": Utility(pausing.pause, is_drained=True, is_owned=True),
        "resume": Utility(pausing.resume),
        "is_paused": Utility(pausing.is_paused),
        "stall_reason": Utility(pausing.stall_reason),
        "sleep": Utility(pausing.sleep, is_drained=True),
        "wake_up": Utility(pausing.wake_up),
        "is_sleeping": Utility(pausing.is_sleeping),
        "reset_prefix_cache": Utility(pausing.reset_prefix_cache, is_drained=True),
        "load_weights": Utility(pausing.load_weights, is_drained=True),
        "collective_rpc": Utility(pausing.collective_rpc, is_drained=True),
        "add_lora": Utility(loras.add_lora),
        "remove_lora": Utility(loras.remove_lora, is_drained=True),
        "list_loras": Utility(loras.list_loras),
        "pin_lora": Utility(loras.pin_lora),
        "hold_waves": Utility(_without_waves("hold_waves") if waves is None else waves.hold_waves),
        "release_waves": Utility(
            _without_waves("release_waves") if waves is None else waves.release_waves
        ),
    }


def _without_waves(name: str) -> Callable[..., Any]:
    def refuse(*args: Any) -> None:
        raise InvalidParameterError("method", f"{name} needs enable_expert_parallel")

    return refuse


class UtilityRegistry:
    """Calls utilities for clients."""

    def __init__(
        self, utilities: Mapping[str, Utility], counters: EngineCounters, drain: Callable[[], None]
    ):
        """drain: finishes the steps in flight."""
        self.utilities = utilities
        self._counters = counters
        self._drain = drain

    def answer(
        self, call: UtilityCall, client_index: int, answer: Callable[[UtilityResult], None]
    ) -> None:
        """Calls a utility for a client and passes its result or failure to `answer`, now or after
        a later step.

        An exception raised here is a failure of the step in flight, and therefore of the engine,
        not of the utility.
        """
        utility = self.utilities.get(call.method)
        if utility is not None and utility.is_drained:
            self._drain()

        def finish(done: Future) -> None:
            error = done.exception()
            self._counters.num_failed_utilities += error is not None
            failed = None if error is None else pack_exception(error)
            answer(UtilityResult(call.call_id, None if failed else done.result(), failed))

        result: Future = Future()
        try:
            value = self.call(call.method, call.args, client_index)
        except Exception as error:
            result.set_exception(error)
        else:
            if isinstance(value, Future):
                result = value
            else:
                result.set_result(value)
        result.add_done_callback(finish)

    def call(self, method: str, args: list[Any], client_index: int) -> Any:
        """Calls a utility; returns its result, or a Future that a later step completes
        (core/pause.py).

        Raises InvalidParameterError for an unknown name and for wrong arguments.
        """
        utility = self.utilities.get(method)
        if utility is None:
            raise InvalidParameterError(
                "method", f"must be one of {', '.join(sorted(self.utilities))}, got {method!r}"
            )
        if utility.is_drained:
            self._drain()
        function = utility.function
        if utility.is_owned:
            function = partial(function, client_index=client_index)
        try:
            inspect.signature(function).bind(*args)
        except TypeError as error:
            raise InvalidParameterError(
                "args", f"{method} does not take {args!r}: {error}"
            ) from None
        return function(*args)
