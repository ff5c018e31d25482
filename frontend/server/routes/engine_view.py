"""Views of the running engine: its state between two steps, and the timelines of recent requests.

Must not know: what is displayed, or by which client.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...async_llm import AsyncLLM
from ..http.errors import ApiError
from ..http.openapi import ApiRoute
from ..http.queries import integer
from ..http.sse import JsonAnswer
from ..request_log import MAX_REQUESTS, FinishedRequest
from ..state import ServerState
from ..time_line import chrome_trace, summary_of, time_line

WAITING = ("model_loading", "model_not_loaded")  # no failures
SHOWN_DEFAULTS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
MAX_CELLS = 4096  # characters of the block map; with more blocks, several share one character


def routes(state: ServerState) -> list[ApiRoute]:
    view = EngineView(state)
    return [
        ApiRoute("/v1/engine/state", view.engine_state),
        ApiRoute("/v1/engine/experts", view.experts),
        ApiRoute("/v1/requests", view.recent),
        ApiRoute("/v1/requests/{request_id}/trace", view.trace),
        ApiRoute("/v1/requests/{request_id}", view.one),
    ]


class EngineView:
    """The handlers."""

    def __init__(self, state: ServerState):
        self._state = state

    async def engine_state(self, request: Request) -> Response:
        """`since`: the number of the last step that the caller has seen, -1 for none; the response
        contains the later steps. `errors=body`: while the model is not loaded, the error object
        comes with status 200.
        """
        since = integer(request, "since", default=-1, least=-1, most=2**63 - 1)
        try:
            engine = self._state.ready_engine()
        except ApiError as error:
            # A page that polls asks for this: browsers log each status above 399.
            if request.query_params.get("errors") == "body" and error.code in WAITING:
                return JsonAnswer(error.in_format())
            raise
        observed = await engine.observe(since, MAX_CELLS)
        return JsonAnswer(observed | about(self._state, engine))

    async def experts(self, request: Request) -> Response:
        return JsonAnswer(await self._state.ready_engine().expert_load())

    async def recent(self, request: Request) -> Response:
        limit = integer(request, "limit", default=100, least=0, most=MAX_REQUESTS)
        found = self._state.request_log.recent(limit)
        return JsonAnswer({"object": "list", "data": [summary_of(one) for one in found]})

    async def one(self, request: Request) -> Response:
        return JsonAnswer(time_line(self._found(request)))

    async def trace(self, request: Request) -> Response:
        return JsonAnswer(chrome_trace(self._found(request)))

    def _found(self, request: Request) -> FinishedRequest:
        request_id = request.path_params["request_id"]
        if (entry := self._state.request_log.get(request_id)) is None:
            message = (
                f"No finished request {request_id!r} is known here; the last {MAX_REQUESTS} are."
            )
            raise ApiError(404, message, code="request_not_found")
        return entry


def about(state: ServerState, engine: AsyncLLM) -> dict[str, Any]:
    """Returns what this server knows of the engine, besides what the engine observes: what all its
    processes know.
    """
    config, defaults = engine.config, engine.get_default_sampling_params()
    totals = state.totals()
    return {
        "model": state.model_name,
        "max_model_len": config.model_config.max_model_len,
        "block_size": config.cache_config.block_size,
        "uptime_s": state.now() - totals.started,
        # These requests are queued in this server. The engine's own queue is part of what it
        # observes.
        "num_queued": totals.gauges["num_queued"],
        "num_finished": sum(totals.meters.requests_by_reason.values()),  # since its start
        # `restarts` counts the engines that took the place of dead ones, by cause. `last_gap_s` has
        # the seconds from a death to the next output of the request that continued last.
        # `standby_is_ready` is null without --standby.
        "restarts": dict(totals.restarts),
        "last_gap_s": None if totals.last_gap is None else totals.last_gap[1],
        "standby_is_ready": engine.client.standby_is_ready,
        "has_chat_template": bool(state.template_text),
        "reads_images": state.reads_images,
        # These apply to a request that does not say otherwise.
        "default_sampling_params": {name: getattr(defaults, name) for name in SHOWN_DEFAULTS},
        # These names may be the `model` of a request. All processes have the same ones, since those
        # that come and go (--admin) need a server of one process.
        "loras": list(state.loras.by_name),
    }
