"""Replica: one of several engines of a model, and what its client is doing.

Must not know: other replicas, requests.
"""

from __future__ import annotations

import asyncio

from ....ipc.errors import EngineDeadError
from ....ipc.messages import EngineCoreOutputs
from ..client import EngineClient
from ..journal import Journal


class Replica:
    """One engine after the other, and the task that awaits their outputs."""

    def __init__(self, index: int, client: EngineClient, journal: Journal):
        self.index, self.client = index, client
        self.journal = journal  # of its requests
        self.reader: asyncio.Task[EngineCoreOutputs] | None = None
        self.reports: set[asyncio.Task] = set()  # calls that others can answer
        self.is_draining = False
        self.failure: EngineDeadError | None = None  # it is lost

    @property
    def is_up(self) -> bool:
        return self.failure is None and not self.client.is_replacing

    def stop_reading(self) -> None:
        """What was read and not taken is computed again."""
        if self.reader is not None:
            self.reader.cancel()
            self.reader = None
