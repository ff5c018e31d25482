"""/api/tags, /api/show, /api/ps, /api/pull, /api/delete, /api/version: Ollama's routes about
models. Unsupported operations return an error that explains why.

Must not know: requests to models, files.
"""

from __future__ import annotations

from collections.abc import Container
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .... import __version__
from ....ipc.config import EngineConfig, ModelConfig
from ...model_info.model_sizes import ModelSizes, measure_model
from ...model_info.plan import weights_in_engine
from ...model_info.stored_weights import DTYPES, StoredWeights, stored_weights
from ..apis.ollama_answer import NDJSON
from ..apis.ollama_turn import plain_name
from ..http.call import read_body
from ..http.errors import ApiError, missing
from ..http.openapi import LINES, ApiRoute
from ..http.sse import Json
from ..pulls import changes_disabled, not_allowed_to_pull
from ..state import ServerState

# The version of Ollama's API that is implemented; clients compare it with the minimum they need.
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


def routes(state: ServerState) -> list[ApiRoute]:
    async def tags(request: Request) -> Response:
        """The available models, as Ollama lists them"""
        config = state.ready_engine().config
        own = [tag(name, config) for name in state.model_names]
        modified = {"modified_at": time_text(state.started)}
        return Json({"models": [one | modified for one in (*own, *loras_of(state, own[0]))]})

    async def ps(request: Request) -> Response:
        """The loaded models, as Ollama lists them"""
        config = state.ready_engine().config
        model = tag(state.model_name, config)
        on_gpu = config.device_config.device != "cpu"
        running = {
            "expires_at": NEVER,
            "size_vram": model["size"] if on_gpu else 0,
            "context_length": state.max_model_len,
        }
        return Json({"models": [model | running]})

    async def show(request: Request) -> Response:
        """Details of a model"""
        body = await read_body(request, state.server_config, ShowBody)
        state.ready_engine()
        state.check_model(named_model(body, state.model_names))
        return Json(shown(state))

    async def pull(request: Request) -> Response:
        """Confirms a model that this server has; clients pull a model before they use it"""
        body = await read_body(request, state.server_config, PullBody)
        state.ready_engine()
        return pulled(body, [*state.model_names, *state.loras.by_name])

    async def delete(request: Request) -> Response:
        """Not supported with one model; returns an error"""
        raise changes_disabled()

    async def version(request: Request) -> Response:
        """The version of Ollama's API"""
        return Json({"version": API_VERSION, "quire": __version__})

    async def refuse(request: Request) -> Response:
        """Not supported; returns an error"""
        raise ApiError(400, REFUSED[request.scope["path"]], code="unsupported_value")

    refusals = [ApiRoute(path, refuse, methods=["POST", "DELETE"]) for path in REFUSED]
    plain = [
        ApiRoute("/api/tags", tags, answer=dict[str, Any]),
        ApiRoute("/api/ps", ps, answer=dict[str, Any]),
        ApiRoute("/api/version", version, answer=dict[str, str]),
    ]
    about_one = [
        ApiRoute("/api/show", show, body=ShowBody, answer=dict[str, Any]),
        ApiRoute("/api/pull", pull, body=PullBody, answer=dict[str, Any], streams=LINES),
        ApiRoute("/api/delete", delete, methods=["DELETE", "POST"]),
    ]
    return [*plain, *about_one, *refusals]


def named_model(body: ShowBody | DeleteBody | PullBody, known: Container[str]) -> str:
    """The model's name, as plain_name gives it. Raises ApiError if there is none."""
    name = body.model or body.name
    if not name:
        raise missing("model")
    return plain_name(name, known)


def pulled(body: PullBody, names: list[str]) -> Response:
    """The response to a client that pulls one of `names`. Raises ApiError for another model."""
    name = named_model(body, names)
    if name not in names:
        raise not_allowed_to_pull(name)
    if body.stream is False:
        return Json({"status": "success"})
    stages = ("pulling manifest", "success")
    lines = b"".join(msgspec.json.encode({"status": stage}) + b"\n" for stage in stages)
    return Response(lines, media_type=NDJSON.decode())


def tag(name: str, config: EngineConfig) -> dict[str, Any]:
    """A model in a list."""
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
    """The adapters in a list, after the entry of their model."""
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
    # `quantization` is made of the stored weights when they are loaded
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
    engine, format = state.ready_engine(), state.answer_format
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
    capabilities = [
        # as Ollama lists them: models that generate are no embedding models, though they embed
        "embedding" if config.runner == "pooling" else "completion",
        *(["tools"] if format.tool_format else []),
        *(["thinking"] if format.reasoning_marks else []),
    ]
    return {
        "modelfile": f"FROM {state.model_name}",
        "parameters": "\n".join(
            f"{name:<30} {getattr(defaults, name):g}"
            for name in ("temperature", "top_k", "top_p", "min_p")
        ),
        "template": state.template_text,
        "details": _details(config),
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": time_text(state.started),
    }


def _short(number: int) -> str:
    """7615616512 -> 7.6B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)


def time_text(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat().replace("+00:00", "Z")


def _stored(config: ModelConfig) -> StoredWeights:
    return stored_weights(Path(config.model), config.hf_config)


def _sizes(config: ModelConfig) -> ModelSizes:
    return measure_model(config.hf_config, config.model, config.model_impl)
