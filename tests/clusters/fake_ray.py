"""The parts of Ray that examples/ray_serve imports, and a handle whose replicas are objects of this
process and die when they are told to. `pytest -m clients` runs the example on a Ray cluster.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from types import ModuleType
from typing import Any


class ActorDiedError(Exception):
    """Stands for ray.exceptions.RayError and its subclasses."""


class Handle:
    """Serve's DeploymentHandle over `replica`. `deaths`: after how many items the answers die, one
    number for each of the next calls.
    """

    def __init__(self, replica: Any) -> None:
        self.answer = self
        self.deaths: list[int] = []
        self.num_calls = 0
        self._replica = replica

    def options(self, stream: bool) -> Handle:
        assert stream
        return self

    def remote(self, *call: Any) -> Answer:
        self.num_calls += 1
        lives = self.deaths.pop(0) if self.deaths else None
        return Answer(self._replica.answer(*call), lives)


class Answer:
    """Serve's DeploymentResponseGenerator."""

    def __init__(self, items: AsyncGenerator[Any, None], lives: int | None) -> None:
        self._items = items
        self._lives = lives
        self.is_cancelled = False

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Any:
        if self._lives == 0:
            await self._items.aclose()
            raise ActorDiedError("the node is gone")
        self._lives = None if self._lives is None else self._lives - 1
        return await anext(self._items)

    def cancel(self) -> None:
        self.is_cancelled = True


class Anything:
    """A class that the example only names."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields


def install() -> None:
    """Until `remove`, `import ray` finds this."""
    for name in MODULES:
        sys.modules[name] = ModuleType(name)
    contents = {
        "ray": {"serve": sys.modules["ray.serve"]},
        "ray.exceptions": {"RayError": ActorDiedError},
        "ray.serve": {"Application": Anything, "deployment": None},
        "ray.serve.config": {"RequestRouterConfig": Anything},
        "ray.serve.exceptions": {"RayServeException": ActorDiedError},
        "ray.serve.handle": {"DeploymentHandle": Handle},
        "ray.serve.request_router": dict.fromkeys(
            ("PendingRequest", "ReplicaID", "RequestRouter", "RunningReplica"), Anything
        ),
    }
    for name, things in contents.items():
        vars(sys.modules[name]).update(things)


MODULES = (
    "ray",
    "ray.exceptions",
    "ray.serve",
    "ray.serve.config",
    "ray.serve.exceptions",
    "ray.serve.handle",
    "ray.serve.request_router",
)


def remove() -> None:
    for name in MODULES:
        del sys.modules[name]
