"""The parts of Dynamo 1.6 that examples/dynamo imports, as its documentation states them, without
its runtime. `pytest -m clients` runs the example in Dynamo itself.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


class LLMEngine:
    pass


@dataclass
class LlmRegistration:
    context_length: int | None = None
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


@dataclass
class EngineConfig:
    model: str
    served_model_name: str | None = None
    llm: LlmRegistration | None = None


@dataclass
class WorkerConfig:
    namespace: str
    component: str = "backend"
    endpoint: str = "generate"
    model_name: str = ""
    served_model_name: str | None = None
    discovery_backend: str = "etcd"
    request_plane: str = "tcp"


@dataclass(frozen=True)
class ZmqSource:
    endpoint: str
    topic: str = ""
    dp_rank: int = 0


@dataclass
class ComponentSnapshot:
    kv_used_blocks: int
    kv_total_blocks: int
    gpu_cache_usage: float
    dp_rank: int
    kv_cache_hit_rate: float | None = None


class InvalidArgument(Exception):
    pass


class EngineShutdown(Exception):
    pass


class Unknown(Exception):
    pass


@dataclass
class Context:
    """Of one request; the frontend chooses its id."""

    name: str

    def id(self) -> str:
        return self.name


@dataclass
class Publisher:
    published: list[ComponentSnapshot] = field(default_factory=list)

    def publish(self, dp_rank: int, snapshot: ComponentSnapshot) -> None:
        assert dp_rank == snapshot.dp_rank
        self.published.append(snapshot)


def build_health_check_payload(bos_token_id: int) -> dict[str, Any]:
    return {"token_ids": [bos_token_id], "stop_conditions": {"max_tokens": 1}}


MODULES: dict[str, dict[str, Any]] = {
    "dynamo": {},
    "dynamo.common": {},
    "dynamo.common.backend": {
        one.__name__: one for one in (EngineConfig, LLMEngine, LlmRegistration, WorkerConfig)
    },
    "dynamo.common.backend.health_check": {
        "build_health_check_payload": build_health_check_payload
    },
    "dynamo.common.backend.publisher": {
        one.__name__: one for one in (ComponentSnapshot, ZmqSource)
    },
    "dynamo.common.backend.run": {"run": None},
    "dynamo.common.utils": {},
    "dynamo.common.utils.token_ids": {"token_ids_to_list": list},
    "dynamo.llm": {},
    "dynamo.llm.exceptions": {
        one.__name__: one for one in (EngineShutdown, InvalidArgument, Unknown)
    },
}


def install() -> None:
    """Until `remove`, `import dynamo` finds this."""
    for name, contents in MODULES.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(contents)


def remove() -> None:
    for name in MODULES:
        del sys.modules[name]
