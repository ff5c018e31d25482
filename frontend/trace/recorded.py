"""Some steps of an engine as they were recorded, with what the frontend made of their outputs.

Must not know: how a step is recorded or shown, clients.
"""

from __future__ import annotations

import time
from typing import Any, Self

import msgspec

from ...ipc.errors import InvalidParameterError
from ...ipc.messages import EngineCoreOutputs
from ...ipc.trace import EngineTrace, Hop, Record, StepTrace
from ..outputs import RequestOutput
from ..pooling_outputs import AnyOutput
from .fold import FoldedKernel, fold, kernels_of


class Received(Record, frozen=True):
    """Outputs of the engine as the frontend took them."""

    received_s: float
    seconds: float  # of process_outputs: detokenization, stop strings
    num_tokens: int
    texts: dict[str, str] = {}  # by request, what it returned


class TraceFile(Record, frozen=True):
    """A trace as a file has it."""

    engine: EngineTrace
    received: list[Received] = []
    places: dict[str, str] = {}  # of the frontend's stages


def _taken(hop: Hop, received: list[Received]) -> Hop:
    """Returns a hop of outputs with the time at which the frontend took them."""
    if hop.request_id:
        return hop
    decoded_s = hop.decode_begin_s + hop.decode_s
    later = (one.received_s for one in received if one.received_s >= decoded_s)
    return msgspec.structs.replace(hop, taken_s=next(later, 0.0))


class RecordedTrace:
    """The recorded steps. There are none until `complete`."""

    def __init__(
        self,
        engine: EngineTrace | None = None,
        received: list[Received] | None = None,
        places: dict[str, str] | None = None,
    ) -> None:
        self.engine = engine
        self.received = received or []
        self.places = places or {}

    def add(self, received_s: float, outputs: EngineCoreOutputs, made: list[AnyOutput]) -> None:
        """Records what a session has made of outputs that it took at `received_s`."""
        texts = {
            output.request_id: "".join(one.text for one in output.outputs)
            for output in made
            if isinstance(output, RequestOutput)
        }
        seconds = time.monotonic() - received_s
        self.received.append(Received(received_s, seconds, len(outputs.token_ids), texts))

    def complete(self, result: Any, places: dict[str, str]) -> None:
        """Takes the result of EngineCore.end_trace as it came from the engine, and the places of
        the frontend's stages in the order in which a request meets them.
        """
        engine = msgspec.convert(msgspec.to_builtins(result), EngineTrace)
        hops = [_taken(hop, self.received) for hop in engine.hops]
        self.engine = msgspec.structs.replace(engine, hops=hops)
        self.places = places

    @property
    def steps(self) -> list[StepTrace]:
        return self.recorded.steps

    @property
    def recorded(self) -> EngineTrace:
        if self.engine is None:
            raise RuntimeError("the trace is complete when its context ends")
        return self.engine

    def kernels(self) -> list[FoldedKernel]:
        """Returns the kernels of all steps, with equal layers in one entry."""
        engine = self.recorded
        kernels = [kernel for step in engine.steps for kernel in kernels_of(step)]
        return fold(kernels, engine.limits)

    def to_json(self) -> bytes:
        """Returns everything that was recorded; `from_json` reads it."""
        return msgspec.json.encode(TraceFile(self.recorded, self.received, self.places))

    @classmethod
    def from_json(cls, data: bytes, source: str = "trace") -> Self:
        """Reads a trace. Raises InvalidParameterError naming `source` for what is no trace."""
        try:
            found = msgspec.json.decode(data, type=TraceFile)
        except msgspec.DecodeError as error:
            raise InvalidParameterError(source, f"is not a trace of Quire: {error}") from None
        return cls(found.engine, found.received, found.places)
