"""Makes the slots of a server with several models: each with its memory plan, computed before
anything is loaded.

Must not know: the command line, HTTP, when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ...ipc.config import ModelConfig
from ...ipc.errors import InvalidParameterError
from ...ipc.machine import free_memory_bytes
from ..arguments.quantities import parse_bytes
from ..engine_args import EngineArgs
from ..model_info.plan import Plan, make_plan, resolve
from ..text.tokenizer import stored_chat_templates
from .config import ServerConfig
from .durations import parse_duration
from .model_slot import ModelSlot
from .models import Downloads, Models
from .response_store import ResponseStore
from .state import ServerState


class ServedModel(msgspec.Struct, frozen=True):
    """A model of the command line. `name` is what requests call it."""

    name: str
    args: EngineArgs


def make_models(
    served: list[ServedModel],
    config: ServerConfig,
    on_loaded: Callable[[], None] = lambda: None,
    common: Mapping[str, Any] = {},
) -> Models:
    """Reads the configuration of each model, downloading it if needed. `common` has the engine
    settings of models that clients pull.

    Raises ModelLoadError and InvalidParameterError, as an engine would.
    """
    limit_bytes = _memory_limit(config.memory_limit)
    # The store is shared, since a conversation may change its model.
    responses = ResponseStore(config.max_stored_responses)

    def slot_of(model: ServedModel, num_models: int) -> ModelSlot:
        return make_slot(model, config, limit_bytes, num_models, responses)

    slots = [slot_of(model, len(served)) for model in served]
    names = [slot.name for slot in slots]
    default = config.default_model or names[0]
    if default not in names:
        raise InvalidParameterError(
            "default_model", f"must be one of {', '.join(names)}, got {default!r}"
        )
    keep_alive_s = _duration("keep_alive", config.keep_alive)

    def make_pulled(name: str, num_models: int) -> ModelSlot:
        arguments: dict[str, Any] = {**common, "model": name}
        return slot_of(ServedModel(name, EngineArgs(**arguments)), num_models)

    downloads = Downloads(make_pulled, common.get("revision"), common.get("download_dir"))
    return Models(
        slots,
        default,
        limit_bytes=limit_bytes,
        is_measured=config.memory_limit is None,
        keep_alive_s=300.0 if keep_alive_s is None else keep_alive_s,
        sleep_after_s=_duration("sleep_after", config.sleep_after),
        wait_s=config.model_wait_s,
        max_waiting=max(1, config.max_queued_requests),
        unknown_is_default=config.unknown_model == "default",
        on_loaded=on_loaded,
        downloads=downloads if config.allow_model_changes else None,
    )


def make_slot(
    model: ServedModel,
    config: ServerConfig,
    limit_bytes: int,
    num_models: int,
    responses: ResponseStore,
) -> ModelSlot:
    """Makes the slot of one of `num_models`."""
    if model.args.device == "auto":
        on_a_cpu: dict[str, Any] = vars(model.args) | {"device": "cpu"}
        model = ServedModel(model.name, EngineArgs(**on_a_cpu))
    plan = plan_beside(model.args, limit_bytes, num_models)
    args = sized(model, plan)
    engine_config = resolve(args)
    if engine_config.device_config.device != "cpu":
        raise InvalidParameterError("device", "several models are served on a CPU only")
    state = ServerState(config, model.name, is_on_demand=True, responses=responses)
    is_chat = state.chat_template is not None or _has_template(engine_config.model_config)
    return ModelSlot(args, state, engine_config, plan, is_chat)


def _has_template(config: ModelConfig) -> bool:
    """Tells whether the files of the model, which need not be loaded, have a chat template."""
    if config.skip_tokenizer_init:
        return False
    templates = stored_chat_templates(config.tokenizer or config.model)
    return "tool_use" in templates or "default" in templates


def plan_beside(args: EngineArgs, limit_bytes: int, num_models: int) -> Plan:
    """Plans one of `num_models`: it has a KV cache as in an equal share of the memory, but room for
    at least one sequence of max_model_len.
    """
    plan = make_plan(args, limit_bytes // num_models)
    if plan.fits:
        return plan
    return msgspec.structs.replace(plan, kv_cache_bytes=plan.least_kv_cache_bytes)


def sized(model: ServedModel, plan: Plan) -> EngineArgs:
    """Returns the arguments with the planned KV cache: an engine must not measure the memory of
    others.

    A text encoder has no cache, and its number of blocks does not depend on the memory.
    """
    args = model.args
    arguments: dict[str, Any] = vars(args) | {"served_model_name": model.name}
    is_set = args.kv_cache_memory_bytes is not None or args.num_gpu_blocks_override is not None
    if plan.block_bytes and not is_set:
        arguments["kv_cache_memory_bytes"] = plan.kv_cache_bytes
    return EngineArgs(**arguments)


def _memory_limit(text: str | None) -> int:
    try:
        return free_memory_bytes() if text is None else parse_bytes(text)
    except ValueError as error:
        raise InvalidParameterError("memory_limit", str(error)) from None


def _duration(name: str, text: str | None) -> float | None:
    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise InvalidParameterError(name, str(error)) from None
