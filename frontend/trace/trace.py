"""Trace: some steps of an engine as they were recorded, and what can be made of them.

Must not know: how a step is recorded, clients.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

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


class Recorded(Record, frozen=True):
    """A trace as a file has it."""

    engine: EngineTrace
    received: list[Received] = []
    places: dict[str, str] = {}  # of the frontend's stages


def _taken(hop: Hop, received: list[Received]) -> Hop:
    """Outputs with the time when the frontend took them."""
    if hop.request_id:
        return hop
    decoded_s = hop.decode_begin_s + hop.decode_s
    later = (one.received_s for one in received if one.received_s >= decoded_s)
    return msgspec.structs.replace(hop, taken_s=next(later, 0.0))


class Trace:
    """The recorded steps. Empty until the context of `LLM.trace` ends."""

    def __init__(self, engine: EngineTrace | None = None) -> None:
        self.engine = engine
        self.received: list[Received] = []
        self.places: dict[str, str] = {}

    def add(self, received_s: float, outputs: EngineCoreOutputs, made: list[AnyOutput]) -> None:
        """What a session has made of outputs that it took at `received_s`."""
        texts = {
            output.request_id: "".join(one.text for one in output.outputs)
            for output in made
            if isinstance(output, RequestOutput)
        }
        seconds = time.monotonic() - received_s
        self.received.append(Received(received_s, seconds, len(outputs.token_ids), texts))

    def complete(self, result: Any, places: dict[str, str]) -> None:
        """result: of EngineCore.end_trace, as it came from the engine. places: of the frontend's
        stages, in the order in which a request meets them.
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
        """The kernels of all steps, equal layers in one entry."""
        engine = self.recorded
        kernels = [kernel for step in engine.steps for kernel in kernels_of(step)]
        return fold(kernels, engine.limits)

    def tree(self, width: int = 190) -> str:
        """The path of the tokens as plain text, in lines of at most `width` columns."""
        from .tree import render, tree_of

        return render(tree_of(self, width), width)

    def to_json(self) -> bytes:
        """Everything that was recorded; `from_json` reads it."""
        return msgspec.json.encode(Recorded(self.recorded, self.received, self.places))

    @classmethod
    def from_json(cls, data: bytes, source: str = "trace") -> Trace:
        """Raises InvalidParameterError naming `source` for what is no trace."""
        try:
            found = msgspec.json.decode(data, type=Recorded)
        except msgspec.DecodeError as error:
            raise InvalidParameterError(source, f"is not a trace of Quire: {error}") from None
        trace = cls(found.engine)
        trace.received, trace.places = found.received, found.places
        return trace

    def to_perfetto(self, path: str | Path) -> None:
        """Writes a file for ui.perfetto.dev or chrome://tracing."""
        from .perfetto import chrome_trace

        Path(path).write_bytes(msgspec.json.encode(chrome_trace(self)))

    def to_html(self, path: str | Path) -> None:
        """Writes one file that a browser shows without a network."""
        from .html import page

        Path(path).write_text(page(self), encoding="utf-8")
