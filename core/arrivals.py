"""Requests on their way to the scheduler, and those that do not get there.

Must not know: steps, sockets, how rows reach clients.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..ipc.errors import InvalidParameterError
from ..ipc.messages import EngineCoreRequest, FinishReason
from .request import Request
from .scheduling.results import write_end

if TYPE_CHECKING:
    from .engine_core import EngineCore

logger = logging.getLogger(__name__)


def enter(
    core: EngineCore,
    request: EngineCoreRequest,
    client_index: int,
    arrival: int | None = None,
    queued_time: float | None = None,
) -> None:
    """Passes a checked request to the scheduler, unless its adapter cannot be used."""
    try:
        adapter = core.loras.find(request.lora_request)
    except InvalidParameterError as refusal:
        return refuse(core, request.request_id, refusal, client_index)
    core.scheduler.add_request(request, client_index, arrival, queued_time, adapter)


def admit_checked(core: EngineCore) -> None:
    """Passes requests with a valid grammar, and late ones, to the scheduler; answers the others."""
    for gated in core.gate.take():
        if (error := gated.error) is None:
            enter(core, gated.request, gated.client_index, gated.arrival, gated.queued_time)
            core.abort_requests(gated.aborted_ids, gated.client_index)
            if core.hand_out is not None:  # from here on steps compute it; see Resubmission
                core.rows.of(gated.client_index).add_admitted(gated.request)
                core.hand_out(core.take_rows())
        else:
            is_refusal = isinstance(error, InvalidParameterError)
            core.scheduler.counters.num_grammar_refusals += is_refusal
            refuse(core, gated.request.request_id, error, gated.client_index)


def refuse(core: EngineCore, request_id: str, error: BaseException, client_index: int) -> None:
    """Answers a request that the scheduler does not get. An error that names no parameter is the
    engine's own.
    """
    parameter = getattr(error, "parameter", None)
    if parameter is None:
        logger.error("the request %s failed: %s", request_id, error)
    rows = core.rows.of(client_index)
    rows.add(request_id, 0, [])
    rows.finish(FinishReason.ERROR, error=str(error), parameter=parameter)
    core.scheduler.counters.num_requests_refused += 1


def fail_requests(core: EngineCore, requests: Iterable[Request], error: BaseException) -> None:
    """Ends requests that the scheduler has."""
    parameter = getattr(error, "parameter", None)
    for request in requests:
        core.scheduler.finish(request, FinishReason.ERROR)
        now = time.monotonic()
        write_end(request, FinishReason.ERROR, core.rows, now, str(error), parameter)
