"""Replica is one of several engines of a model, and what its client is doing.

Must not know: other replicas, requests.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ....ipc.errors import EngineDeadError
from ....ipc.messages import EngineCoreOutputs
from ..client import EngineClient
from ..journal import Journal


@dataclass(slots=True, eq=False)
class Replica:
    """One engine after the other, and the task that awaits their outputs."""

    index: int
    client: EngineClient
    journal: Journal  # of its requests
    reader: asyncio.Task[EngineCoreOutputs] | None = None
    reports: set[asyncio.Task] = field(default_factory=set)  # calls that others can answer
    is_draining: bool = False
    failure: EngineDeadError | None = None  # it is lost

    @property
    def is_up(self) -> bool:
        return self.failure is None and not self.client.is_replacing

    def stop_reading(self) -> None:
        """Stops the reader. What it has read and nobody has taken is computed again."""
        if self.reader is not None:
            self.reader.cancel()
            self.reader = None
