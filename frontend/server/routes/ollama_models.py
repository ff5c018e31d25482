"""/api/tags, /api/show, /api/ps, /api/pull, /api/delete, /api/version: Ollama's routes about
models. Unsupported operations return an error that explains why.

Must not know: requests to models, files.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Container
from contextlib import aclosing
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .... import __version__
from ....ipc.config import EngineConfig, ModelConfig
from ...model_info.model_sizes import ModelSizes, measure_model
from ...model_info.plan import weights_in_engine
from ...model_info.weight_labels import DTYPES, WeightLabels, weight_labels
from ..apis.ollama_answer import NDJSON, error_line, time_text
from ..apis.ollama_turn import plain_name
from ..http.call import call_of
from ..http.errors import ApiError, missing
from ..http.openapi import LINES, ApiRoute
from ..http.sse import JsonAnswer, encode
from ..pulls import changes_disabled, not_allowed_to_pull
from ..request_body import read_body
from ..state import ServerState

# The routes implement this version of Ollama's API. Clients compare it with what they need.
API_VERSION = "0.13.0"
NEVER = "9999-12-31T23:59:59Z"
ONE_MODEL = (
    "This server has models as they are on disk and on the hub: models cannot be created, copied "
    "or pushed."
)
REFUSED = {f"/api/{name}": ONE_MODEL for name in ("push", "create", "copy")}


class ShowBody(msgspec.Struct, kw_only=True):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None  # its deprecated name
    verbose: bool | None = None  # no effect


class DeleteBody(msgspec.Struct, kw_only=True):
    """DELETE /api/delete."""

    model: str | None = None
    name: str | None = None  # its deprecated name


class PullBody(msgspec.Struct, kw_only=True):
    """POST /api/pull."""

    model: str | None = None
    name: str | None = None  # its deprecated name
    stream: bool | None = None  # true by default
    insecure: bool | None = None  # no effect


class OllamaCatalog(Protocol):
    """What the routes show of the server's models. The methods raise ApiError."""

    def listed(self) -> list[dict[str, Any]]:
        """Returns the available models."""
        ...

    def running(self) -> list[dict[str, Any]]:
        """Returns the loaded models."""
        ...

    async def details(self, body: ShowBody) -> dict[str, Any]: ...

    def pull(self, body: PullBody, tenant: str) -> AsyncGenerator[dict[str, Any], None]:
        """Downloads a model, or confirms one that the server has; yields the lines about it."""
        ...


class OneModelCatalog:
    """The catalog of a server with one model."""

    def __init__(self, state: ServerState):
        self._state = state

    def listed(self) -> list[dict[str, Any]]:
        state = self._state
        config = state.ready_engine().config
        own = [tag(name, config) for name in state.model_names]
        modified = {"modified_at": time_text(state.started)}
        return [one | modified for one in (*own, *loras_of(state, own[0]))]

    def running(self) -> list[dict[str, Any]]:
        config = self._state.ready_engine().config
        model = tag(self._state.model_name, config)
        return [model | running_fields(config, model["size"], self._state.max_model_len)]

    async def details(self, body: ShowBody) -> dict[str, Any]:
        self._state.ready_engine()
        self._state.check_model(named_model(body, self._state.model_names))
        return shown(self._state)

    async def pull(self, body: PullBody, tenant: str) -> AsyncGenerator[dict[str, Any], None]:
        self._state.ready_engine()
        names = [*self._state.model_names, *self._state.loras.by_name]
        if (name := named_model(body, names)) not in names:
            raise not_allowed_to_pull(name)
        yield {"status": "pulling manifest"}
        yield {"status": "success"}


def routes(state: ServerState) -> list[ApiRoute]:
    async def delete(request: Request) -> Response:
        """Not supported with one model; returns an error"""
        raise changes_disabled()

    deletion = ApiRoute("/api/delete", delete, methods=["DELETE", "POST"])
    return [*catalog_routes(state, OneModelCatalog(state)), deletion]


def catalog_routes(state: ServerState, catalog: OllamaCatalog) -> list[ApiRoute]:
    """Returns all routes except /api/delete."""

    async def tags(request: Request) -> Response:
        """The available models, as Ollama lists them"""
        return JsonAnswer({"models": catalog.listed()})

    async def ps(request: Request) -> Response:
        """The loaded models, as Ollama lists them"""
        return JsonAnswer({"models": catalog.running()})

    async def show(request: Request) -> Response:
        """Details of a model; the first time, a model that is not in memory is loaded"""
        body = await read_body(request, state.server_config, ShowBody)
        return JsonAnswer(await catalog.details(body))

    async def pull(request: Request) -> Any:
        """Downloads a model, or confirms one that this server has"""
        body = await read_body(request, state.server_config, PullBody)
        call = call_of(request)
        lines = catalog.pull(body, call.tenant)
        if body.stream is False:
            async with aclosing(lines):
                last = [line async for line in lines][-1]
            return JsonAnswer(last)
        return state.event_stream(
            _encoded(lines), call, error_event=error_line, comment=b" ", media_type=NDJSON
        )

    async def version(request: Request) -> Response:
        """The version of Ollama's API"""
        return JsonAnswer({"version": API_VERSION, "quire": __version__})

    async def refuse(request: Request) -> Response:
        """Not supported; returns an error"""
        raise ApiError(400, REFUSED[request.scope["path"]], code="unsupported_value")

    return [
        ApiRoute("/api/tags", tags, answer=dict[str, Any]),
        ApiRoute("/api/ps", ps, answer=dict[str, Any]),
        ApiRoute("/api/version", version, answer=dict[str, str]),
        ApiRoute("/api/show", show, body=ShowBody, answer=dict[str, Any]),
        ApiRoute("/api/pull", pull, body=PullBody, answer=dict[str, Any], streams=LINES),
        *(ApiRoute(path, refuse, methods=["POST", "DELETE"]) for path in REFUSED),
    ]


async def _encoded(lines: AsyncGenerator[Any, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(lines):
        async for line in lines:
            yield encode(line) + b"\n"


def named_model(body: ShowBody | DeleteBody | PullBody, known: Container[str]) -> str:
    """Returns the model's name, as plain_name gives it. Raises ApiError if there is none."""
    name = body.model or body.name
    if not name:
        raise missing("model")
    return plain_name(name, known)


def running_fields(
    config: EngineConfig, weights_bytes: int, max_model_len: int, unloads_at: float | None = None
) -> dict[str, Any]:
    """Returns what the list of loaded models has besides a tag. `unloads_at` is in seconds since
    1970.
    """
    return {
        "expires_at": NEVER if unloads_at is None else time_text(unloads_at),
        "size_vram": weights_bytes if config.device_config.device != "cpu" else 0,
        "context_length": max_model_len,
    }


def tag(name: str, config: EngineConfig) -> dict[str, Any]:
    """Returns a model as an entry of a list."""
    model_config = config.model_config
    size, _ = weights_in_engine(config, _sizes(model_config))
    digest = sha256(msgspec.json.encode((name, model_config.hf_config))).hexdigest()
    return {
        "name": name,
        "model": name,
        "size": size,
        "digest": digest,
        "details": _details(model_config),
    }


def loras_of(state: ServerState, model: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the adapters in a list, after the entry of their model."""
    details = model["details"] | {"parent_model": model["name"]}
    return [
        model
        | {
            "name": name,
            "model": name,
            "digest": sha256(f"{model['digest']} {lora.lora_path}".encode()).hexdigest(),
            "details": details,
        }
        for name, lora in state.loras.by_name.items()
    ]


def _details(config: ModelConfig) -> dict[str, Any]:
    stored = _stored(config)
    # `quantization` is made of the stored weights when they are loaded.
    made = None if config.quantization is None else config.quantization.upper()
    return {
        "parent_model": "",
        "format": stored.file_format,
        "family": stored.family,
        "families": [stored.family],
        "parameter_size": _short(_sizes(config).num_parameters),
        "quantization_level": made or stored.numbers or DTYPES[config.dtype],
    }


def shown(state: ServerState) -> dict[str, Any]:
    engine = state.ready_engine()
    config = engine.config.model_config
    family = _stored(config).family
    info = {
        "general.architecture": family,
        "general.parameter_count": _sizes(config).num_parameters,
        f"{family}.context_length": state.max_model_len,
        f"{family}.embedding_length": config.hf_config.get("hidden_size"),
        f"{family}.block_count": config.hf_config.get("num_hidden_layers"),
    }
    defaults = engine.get_default_sampling_params()
    return {
        "modelfile": f"FROM {state.model_name}",
        "parameters": "\n".join(
            f"{name:<30} {getattr(defaults, name):g}"
            for name in ("temperature", "top_k", "top_p", "min_p")
        ),
        "template": state.template_text,
        "details": _details(config),
        "model_info": info,
        "capabilities": state.capabilities,
        "modified_at": time_text(state.started),
    }


def _short(number: int) -> str:
    """Shortens a number: 7615616512 becomes 7.6B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)


def _stored(config: ModelConfig) -> WeightLabels:
    return weight_labels(Path(config.model), config.hf_config)


def _sizes(config: ModelConfig) -> ModelSizes:
    return measure_model(config.hf_config, config.model, config.model_impl)
