"""ServerState: the object that every route receives: configurations, the engine or its loading
progress, model names.

Must not know: HTTP beyond the errors that it raises.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from ... import __version__
from ...ipc.config import resolved
from ...ipc.errors import EngineDeadError, InvalidParameterError
from ..answer_format import AnswerFormat, detect
from ..async_llm import AsyncLLM
from ..batches.store import Store
from ..text.chat_template import WITHOUT_TEMPLATE, template_traits
from .admission import NUM_THREADS, Admission
from .config import ServerConfig, batch_folder
from .held_pixels import MAX_BYTES as MAX_PIXEL_BYTES
from .held_pixels import HeldPixels
from .http.auth import ApiKeys
from .http.call import HttpCall
from .http.errors import ENGINE_GONE, ApiError, from_exception, unsupported
from .http.sse import EventStream, event
from .meters import Meters
from .request_log import RequestLog
from .response_store import ResponseStore
from .served_loras import ServedLoras
from .totals import SharedTotals, Totals

logger = logging.getLogger(__name__)
MAX_NAMED = 20  # adapters in an error
SHUTDOWN_RETRY_S = 5.0  # until a replacement is ready
MAX_IMAGE_CALLS = 8  # whose images are prepared at once

# Each loading stage has its start and end as fractions of the total, measured on small and large
# models. They are accurate enough for an estimate.
STAGES = {
    "start": (0.0, 0.02),
    "import": (0.02, 0.2),
    "load weights": (0.2, 0.8),
    "profile": (0.8, 0.9),
    "kv cache": (0.9, 1.0),
}


def openai_error_event(error: ApiError) -> bytes:
    return event(error.in_format())


@dataclass(slots=True)
class LoadProgress:
    """Loading progress of the engine."""

    stage: str = "start"
    fraction: float = 0.0  # of the total, 0 to 1
    began: float = field(default_factory=time.monotonic)
    error: str | None = None  # why loading failed

    def report(self, stage: str, fraction: float) -> None:
        """`fraction` is that of the stage."""
        begin, end = STAGES.get(stage, (self.fraction, self.fraction))
        self.stage = stage
        self.fraction = max(self.fraction, begin + (end - begin) * min(1.0, max(0.0, fraction)))

    @property
    def remaining_s(self) -> float | None:
        """Returns the estimated seconds, or None while there is no basis for an estimate."""
        elapsed_s = time.monotonic() - self.began
        return elapsed_s * (1 - self.fraction) / self.fraction if self.fraction >= 0.05 else None


class ServerState:
    """The state of the server. `engine` is None while it loads; `is_draining` is set by SIGTERM and
    never reset.

    If `is_on_demand`, a request starts the engine, which may end when it is idle (model_slot.py).
    `responses` is the store that this state shares with the server's other models,
    `shared` has the counts of other processes that serve the same port.
    """

    def __init__(
        self,
        server_config: ServerConfig,
        model_name: str,
        engine: AsyncLLM | None = None,
        *,
        is_on_demand: bool = False,
        responses: ResponseStore | None = None,
        shared: SharedTotals | None = None,
    ):
        self.server_config = server_config
        # The name is the user's at first, and the engine's own once it is loaded.
        self.model_name = model_name
        self.loading = LoadProgress()
        self.is_draining = False
        self.has_ended_engine = False  # the server itself, at its end
        self.is_on_demand = is_on_demand
        self._is_loading = False  # on demand
        self.started = time.time()  # seconds since 1970
        self.began = time.monotonic()
        self.engine: AsyncLLM | None = None
        self.request_log = RequestLog()
        self.chat_template = read_template(server_config.chat_template)
        # This format holds until the engine is set. Unknown names are refused before a model loads.
        parsers = server_config.tool_call_parser, server_config.reasoning_parser
        self.answer_format: AnswerFormat = detect(None, *parsers)
        self.template_text = ""  # the Jinja source of the chat template, "" if the model has none
        self.system_fingerprint = ""
        self.admission: Admission | None = None  # set with the engine
        # Limits access to the threads of `in_turn`: round-robin by key.
        self.work_turns = Admission(NUM_THREADS, server_config.max_queued_requests, sys.maxsize)
        # The same for images, which may wait for other servers.
        self.image_turns = Admission(
            MAX_IMAGE_CALLS, server_config.max_queued_requests, sys.maxsize
        )
        self.held_pixels = HeldPixels(MAX_PIXEL_BYTES // server_config.api_server_count)
        self.meters = Meters()
        self.shared = shared
        self.keys = ApiKeys(server_config)
        self.loras = ServedLoras()
        if responses is None:
            responses = ResponseStore(server_config.max_stored_responses)
        self.responses = responses
        # Of files and batches, which all models and processes of the server share.
        self.files = Store(
            batch_folder(server_config), server_config.max_stored_file_bytes, self.now
        )
        self.running_ids: set[str] = set()  # of the engine's requests, waiting ones included
        if engine is not None:
            self.set_engine(engine)

    async def adopt_engine(self, engine: AsyncLLM) -> None:
        """Calls `set_engine` after compiling and trying out the template beside the event loop."""
        if text := self._find_template(engine):
            await asyncio.to_thread(template_traits, text)
        elif engine.tokenizer is not None and engine.config.model_config.runner != "pooling":
            logger.warning("%s has no chat template: %s", self.model_name, WITHOUT_TEMPLATE)
        self.set_engine(engine)

    def set_engine(self, engine: AsyncLLM) -> None:
        """Sets the engine. It is called when the engine has loaded."""
        self.model_name = engine.config.model_config.served_model_name or self.model_name
        self.system_fingerprint = fingerprint(engine)
        self.template_text = self._find_template(engine)
        config = self.server_config
        self.answer_format = detect(
            self.template_text, config.tool_call_parser, config.reasoning_parser, engine.tokenizer
        )
        num_seqs = engine.config.num_seqs_at_once
        of_key = config.max_queued_tokens_per_key
        self.admission = Admission(
            config.share(config.max_concurrent_requests or 2 * num_seqs),
            config.share(config.max_queued_requests),
            config.share(config.max_queued_tokens),
            max_computing=config.share(num_seqs),
            max_waiting_tokens_per_key=of_key and config.share(of_key),
            reserves_shares=True,
        )
        engine.set_record_token_times(True)  # for the timelines of requests
        engine.set_max_outputs_per_s(config.max_chunks_per_s)
        self.engine = engine

    def begin_loading(self) -> LoadProgress:
        """Returns the progress of an engine that is started on demand."""
        self.loading, self._is_loading = LoadProgress(), True
        return self.loading

    def end_loading(self) -> None:
        self._is_loading = False

    def begin_drain(self, *, is_draining: bool = True) -> None:
        """Begins the end of the server. `is_draining` stays false if it ends because its engine has
        failed: requests then receive that as the reason.
        """
        self.is_draining = is_draining
        if is_draining and self.engine is not None:
            self.engine.client.begin_drain()

    def begin_end(self) -> None:
        """Requests that receive an EngineDeadError from now on are told that the server ends."""
        self.has_ended_engine = True

    def clear_engine(self) -> None:
        """Clears an engine on demand that has ended. No request uses it any more."""
        self.engine = self.admission = None

    def totals(self) -> Totals:
        """Returns what this server has counted, in all of its processes."""
        own = self._own_totals()
        return own if self.shared is None else self.shared.of_all(own)

    @property
    def num_running(self) -> int:
        """Returns the number of requests that run or wait, in all processes of the server."""
        return len(self.running_ids) if self.shared is None else self.totals().gauges["num_running"]

    def _own_totals(self) -> Totals:
        """Returns what this process has counted; the meters are its own, not a copy."""
        totals = Totals(self.started, self.meters)
        totals.gauges["num_running"] = len(self.running_ids)
        if self.admission is not None:
            totals.gauges["num_queued"] = self.admission.num_waiting
            totals.gauges["num_queued_tokens"] = self.admission.num_waiting_tokens
            totals.rejected.update(self.admission.num_refused)
        if self.engine is not None:
            restarts = self.engine.client.restarts
            while restarts.gaps_s:
                self.meters.restart_gaps.observe(restarts.gaps_s.popleft())
            totals.restarts.update(restarts.by_cause)
            totals.last_gap = restarts.last_gap
            if self.shared is not None:  # else get_metrics has them
                totals.of_client.update(self.engine.session.metrics({}))
        return totals

    def publish_totals(self) -> None:
        """Shows the other processes of this server what this one has counted."""
        if self.shared is not None:
            self.shared.publish(self._own_totals())

    def now(self) -> float:
        """Returns seconds since 1970, by a clock that nobody sets."""
        return self.started + time.monotonic() - self.began

    def _find_template(self, engine: AsyncLLM) -> str:
        """Finds the template that will be rendered."""
        named = self.chat_template
        if engine.tokenizer is None:
            return ""
        templates = engine.tokenizer.chat_templates
        if named is None:
            return templates.get("tool_use") or templates.get("default") or ""
        if named not in templates and "{" not in named:
            raise InvalidParameterError(
                "chat_template",
                f"must be a file, or one of the model's templates "
                f"({', '.join(templates) or 'none'}), got {named!r}",
            )
        return templates.get(named, named)

    def ready_engine(self) -> AsyncLLM:
        """Returns the engine. Raises ApiError that explains why there is none."""
        if self.is_draining:
            raise shutting_down()
        if self.engine is None:
            is_absent = self.is_on_demand and not self._is_loading
            raise self._not_in_memory() if is_absent else self.not_loaded()
        if self.engine.errored:
            raise ApiError(503, ENGINE_GONE, code="engine_dead")
        return self.engine

    def ready_admission(self) -> Admission:
        """Returns the queue in front of the engine. Call it only after `ready_engine`."""
        assert self.admission is not None
        return self.admission

    def explain(self, error: BaseException, request: str, request_id: str) -> ApiError:
        """Does the same as from_exception, but reports an engine that the server has ended as the
        server's shutdown. An internal error is logged, since the answer refers to the log.
        """
        if self.has_ended_engine and isinstance(error, EngineDeadError):
            return shutting_down()
        refusal = from_exception(error)
        if refusal.status == 500 and refusal.cause is not None:  # the engine's, which has no trace
            logger.error("%s failed (%s): %s", request, request_id, refusal.cause)
        elif refusal.status == 500:
            logger.error("%s failed (%s)", request, request_id, exc_info=error)
        return refusal

    def not_loaded(self) -> ApiError:
        """Tells why the first load has not given an engine."""
        loading = self.loading
        if loading.error is not None:
            message = "The model could not be loaded; the server's log has the cause."
            return ApiError(503, message, code="model_load_failed")
        remaining_s = loading.remaining_s
        words = "" if remaining_s is None else f", about {max(1, round(remaining_s))} s to go"
        message = f"The model is loading: {loading.stage}, {loading.fraction:.0%}{words}."
        retry_after_s = min(30.0, remaining_s or 2.0)
        return ApiError(503, message, code="model_loading", retry_after_s=retry_after_s)

    def _not_in_memory(self) -> ApiError:
        message = f"The model {self.model_name!r} is not in memory; a request for it loads it."
        return ApiError(503, message, code="model_not_loaded")

    def check_open(self) -> None:
        """Raises ApiError if this server takes no requests now, though they need no engine."""
        if self.is_draining or not self.is_on_demand:
            self.ready_engine()

    @property
    def model_names(self) -> list[str]:
        """Returns the name of the model and its aliases."""
        aliases = self.server_config.model_aliases
        return [self.model_name, *(name for name in aliases if name != self.model_name)]

    def check_model(self, name: str | None) -> str:
        """Returns the served name for the `model` of a body, which may be an adapter's. Raises
        ApiError 404 for an unknown model, unless the server's own answers for such.
        """
        if name in (None, "", self.model_name):
            return self.model_name
        if name in self.server_config.model_aliases or self.loras.get(name) is not None:
            return str(name)
        if self.server_config.unknown_model == "default":
            return self.model_name
        known = ", ".join(map(repr, [*self.model_names, *islice(self.loras.by_name, MAX_NAMED)]))
        message = f"The model {name!r} does not exist. This server has {known}."
        raise ApiError(404, message, code="model_not_found", param="model")

    def select_model(self, name: str | None, call: HttpCall) -> str:
        """Does the same as check_model, for a call that generates: its requests use the named
        adapter.
        """
        found = self.check_model(name)
        call.lora_request = self.loras.get(found)
        return found

    def check_base(self, name: str | None) -> str:
        """Does the same as check_model, for a call for which adapters are not supported."""
        found = self.check_model(name)
        if self.loras.get(found) is not None:
            raise unsupported(
                "model",
                f"{found!r} is a LoRA adapter, which only generates text; this route does not.",
            )
        return found

    def check_generates(self) -> None:
        """Raises ApiError 400 if the model only pools."""
        config = self.ready_engine().config.model_config
        if config.runner == "pooling":
            can = ", ".join(config.pooling.tasks if config.pooling else ())
            raise unsupported(
                "model", f"The model {self.model_name!r} generates no text; it can {can}."
            )

    def event_stream(
        self,
        events: AsyncGenerator[bytes, None],
        call: HttpCall,
        *,
        error_event: Callable[[ApiError], bytes] = openai_error_event,
        **options: Any,
    ) -> EventStream:
        """Returns the response that streams `events` with this server's timeouts, by default in
        OpenAI's format. `options` are `comment` and `media_type` of the stream.
        """
        config = self.server_config

        def on_error(error: BaseException) -> bytes:
            return error_event(self.explain(error, "a stream", call.request_id))

        return EventStream(
            events, call, on_error, config.sse_keep_alive_s, config.write_timeout_s, **options
        )

    @property
    def reads_images(self) -> bool:
        return self.ready_engine().config.model_config.vision is not None

    @property
    def capabilities(self) -> list[str] | None:
        """Returns what a model that is in memory can do, in Ollama's words."""
        if self.engine is None:
            return None
        config, format = self.engine.config.model_config, self.answer_format
        return [
            # Ollama lists it so: models that generate are no embedding models, though they embed.
            "embedding" if config.runner == "pooling" else "completion",
            *(["tools"] if format.tool_format else []),
            *(["thinking"] if format.reasoning_marks else []),
            *(["vision"] if config.vision is not None else []),
        ]

    @property
    def max_model_len(self) -> int:
        return resolved(self.ready_engine().config.model_config.max_model_len)


def shutting_down() -> ApiError:
    return ApiError(
        503, "The server is shutting down.", code="shutting_down", retry_after_s=SHUTDOWN_RETRY_S
    )


def read_template(wanted: str | None) -> str | None:
    """Returns the text of a template file. The name of one of the model's templates, and a
    template's own text, are returned unchanged.
    """
    if wanted is None:
        return None
    path = Path(wanted).expanduser()
    try:
        is_file = path.is_file()
    except OSError:  # a text is too long for a path
        is_file = False
    return path.read_text(encoding="utf-8") if is_file else wanted


def fingerprint(engine: AsyncLLM) -> str:
    """Returns a text that changes when anything changes that may affect the output: the model, its
    settings, the engine's version.
    """
    config = engine.config
    parts = (config.model_config, config.load_config, config.device_config, __version__)
    return "fp_" + blake2b(msgspec.json.encode(parts), digest_size=5).hexdigest()
