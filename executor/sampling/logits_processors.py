"""User-defined logits processors: the interface, the loader, and the stage that calls them.

Must not know: what a processor does, the other stages, the model.

The configuration names factories, `logits_processors=["package.module:name"]`, importable where the
engine runs (in a child process `__main__` is the engine's, not the user's script). When a request
enters the engine, each factory is called for a processor:

    def name(params: SamplingParams) -> Processor | None

    def processor(
        prompt_token_ids: list[int], output_token_ids: list[int], logits: torch.Tensor
    ) -> torch.Tensor

None means that the request does not use the processor. `params.extra_args` passes the request's
arguments to the factory. The processor is called for every token with the request's logits
[vocab_size] f32, after masks and biases and before penalties and temperature (-inf: masked). It
returns the logits to continue with: the same tensor, modified in place or not, or a new one of the
same shape. Several processors run in the order of the configuration.

A preempted request enters again with new processors, so a processor must derive its state from its
arguments. An exception in a factory or processor, sys.exit() included, fails only its own
request. Processors run inside the engine's step and delay all requests.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...ipc.errors import InvalidParameterError
from ...ipc.params import SamplingParams
from ...ipc.step_messages import NewRequestData
from ..input_batch import InputBatch
from ..plugins import place_in
from .change_list import ChangeList

Processor = Callable[[list[int], list[int], torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LoadedProcessor:
    path: str  # as in the configuration
    make: Callable[[SamplingParams], Processor | None]


def load_logits_processors(paths: Sequence[str]) -> list[LoadedProcessor]:
    """Imports the factories that the configuration names.

    Raises InvalidParameterError, naming the path, for what is not a callable of an importable
    module.
    """
    return [LoadedProcessor(path, _load(path)) for path in paths]


def _load(path: str) -> Any:
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise InvalidParameterError(
            "logits_processors", f'each must be "package.module:name", got {path!r}'
        )
    try:
        found = importlib.import_module(module_name)
        for attribute in name.split("."):
            found = getattr(found, attribute)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() in the user's module too
        raise InvalidParameterError(
            "logits_processors",
            f"{path} cannot be imported: {_describe(error)}{place_in(module_name, error)}",
        ) from error
    if not callable(found):
        raise InvalidParameterError(
            "logits_processors",
            f"{path} must be a function of the sampling parameters, got {found!r}",
        )
    return found


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class UserProcessors:
    """The stage that calls processors, one call per row and processor."""

    parameter = "logits_processors"

    def __init__(self, loaded: Sequence[LoadedProcessor] = ()):
        self.loaded = list(loaded)
        self._processors: dict[int, list[tuple[str, Processor]]] = {}  # by slot

    def enter(self, request: NewRequestData) -> bool:
        processors = []
        for loaded in self.loaded:
            try:
                processor = loaded.make(request.sampling_params)
            except KeyboardInterrupt:  # the terminal's, not the request's
                raise
            except BaseException as error:  # sys.exit() ends the request, not the engine
                raise InvalidParameterError(
                    "logits_processors", f"{loaded.path} failed on the request: {_describe(error)}"
                ) from error
            if processor is not None:
                processors.append((loaded.path, processor))
        if processors:
            self._processors[request.slot] = processors
        return bool(processors)

    def leave(self, slot: int) -> None:
        del self._processors[slot]

    def describe(
        self, changes: ChangeList, rows: np.ndarray, slots: np.ndarray, batch: InputBatch
    ) -> None:
        raise NotImplementedError("what a user's function does is not known")

    def apply(
        self, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, batch: InputBatch
    ) -> dict[int, str]:
        errors = {}
        for row, slot in zip(rows.tolist(), slots.tolist()):
            start, end = int(batch.num_prompt_tokens[slot]), int(batch.num_tokens[slot])
            token_ids = batch.token_ids[slot, :end].tolist()
            try:
                logits[row] = self._run(slot, token_ids[:start], token_ids[start:], logits[row])
            except InvalidParameterError as error:
                errors[row] = str(error)
        return errors

    def _run(
        self,
        slot: int,
        prompt_token_ids: list[int],
        output_token_ids: list[int],
        logits: torch.Tensor,
    ) -> torch.Tensor:
        """Calls a row's processors: [vocab_size] -> [vocab_size]."""
        shape = logits.shape
        for path, processor in self._processors[slot]:
            try:
                logits = processor(prompt_token_ids, output_token_ids, logits)
            except KeyboardInterrupt:  # the terminal's, not the request's
                raise
            except BaseException as error:  # sys.exit() ends the request, not the engine
                raise InvalidParameterError(
                    "logits_processors", f"{path} failed: {_describe(error)}"
                ) from error
            if not isinstance(logits, torch.Tensor):
                raise InvalidParameterError(
                    "logits_processors", f"{path} must return a tensor, got {logits!r}"
                )
            if (
                logits.shape != shape
                or not logits.is_floating_point()
                or logits.layout != torch.strided
            ):
                got = f"{list(logits.shape)} of {logits.dtype}, {logits.layout}"
                raise InvalidParameterError(
                    "logits_processors",
                    f"{path} must return a floating-point tensor {list(shape)}, got {got}",
                )
        return logits
