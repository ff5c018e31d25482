"""The arguments of a call for several prompts: one for all of them, or one for each.

Must not know: how a prompt is processed, the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...ipc.errors import InvalidParameterError
from ...ipc.params import PoolingParams, RequestOutputKind, SamplingParams
from .prompts import Prompt


def prompt_list(prompts: Any) -> list[Prompt]:
    """Converts the argument to a list. A single prompt is a string, a dict, or a list of integers;
    anything else must be a sequence of prompts.
    """
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidParameterError(
            "prompts", f"must be a prompt or a sequence of prompts, got {type(prompts).__name__}"
        )
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def one_each(name: str, value: Any, num_prompts: int) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise InvalidParameterError(
            name,
            f"must be one for all or one per prompt, got {len(value)} for {num_prompts} prompts",
        )
    return list(value)


def with_task(params: list[PoolingParams], task: str | None) -> list[PoolingParams]:
    """The parameters with the task; the same object where they were."""
    if task is None:
        return params
    made: dict[int, PoolingParams] = {}
    for one in params:
        if not isinstance(one, PoolingParams):
            raise InvalidParameterError(
                "pooling_params", f"must be PoolingParams, got {type(one).__name__}"
            )
        if one.task not in (None, task):
            raise InvalidParameterError(
                "pooling_params", f"have the task {one.task}, which differs from {task}"
            )
        if id(one) not in made:
            made[id(one)] = msgspec.structs.replace(one, task=task)
    return [made[id(one)] for one in params]


def final_only(params: Any) -> Any:
    """A copy with output_kind FINAL_ONLY.

    A value that is not SamplingParams is returned as it is; the InputProcessor raises the error.
    """
    if not isinstance(params, SamplingParams) or params.output_kind == RequestOutputKind.FINAL_ONLY:
        return params
    return msgspec.structs.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
