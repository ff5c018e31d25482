"""Utilities: methods of the core that a client calls by name, between two steps.

Must not know: what a utility does, how its answer reaches the client.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from ..ipc.errors import InvalidParameterError
from ..ipc.failures import pack_exception
from ..ipc.messages import UtilityCall, UtilityResult
from .loras import Loras
from .pause import PauseControl
from .waves import EngineWaves

if TYPE_CHECKING:
    from .engine_core import EngineCore


def answer_utility(
    core: EngineCore,
    call: UtilityCall,
    client_index: int,
    answer: Callable[[UtilityResult], None],
) -> None:
    """Calls a utility for a client and passes its result or failure to `answer`, now or after a
    later
    step.

    An exception raised here is a failure of the step in flight, and therefore of the engine, not of
    the utility.
    """
    if call.method in core.DRAINING:
        core.drain()

    def finish(done: Future) -> None:
        error = done.exception()
        core.scheduler.counters.num_failed_utilities += error is not None
        failed = None if error is None else pack_exception(error)
        answer(UtilityResult(call.call_id, None if failed else done.result(), failed))

    try:
        result = call_utility(core, call.method, call.args, client_index)
    except Exception as error:
        done: Future = Future()
        done.set_exception(error)
        return finish(done)
    if not isinstance(result, Future):
        done = Future()
        done.set_result(result)
        return finish(done)
    result.add_done_callback(finish)


def call_utility(core: EngineCore, method: str, args: list[Any], client_index: int) -> Any:
    """Calls one of EngineCore.UTILITIES between two steps; returns its result, or a Future that a
    later step completes (core/pause.py).

    Raises InvalidParameterError for an unknown name and for wrong arguments.
    """
    if method not in core.UTILITIES:
        raise InvalidParameterError(
            "method", f"must be one of {', '.join(sorted(core.UTILITIES))}, got {method!r}"
        )
    if method in EngineWaves.UTILITIES and core.waves is None:
        raise InvalidParameterError("method", f"{method} needs enable_expert_parallel")
    owners = (
        (PauseControl, core.pausing),
        (Loras, core.loras),
        (EngineWaves, core.waves),
    )
    owner = next((owner for kind, owner in owners if method in kind.UTILITIES), core)
    function = getattr(owner, method)
    if method in core.OWNED:
        function = partial(function, client_index=client_index)
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        raise InvalidParameterError("args", f"{method} does not take {args!r}: {error}") from None
    return function(*args)
