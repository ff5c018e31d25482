"""The messages from which routers learn what the KV cache holds, and the settings that ask an
engine to send them.

Must not know: sockets, requests, block tables.

Names, order of fields and encoding are vLLM's (vllm/distributed/kv_events.py), which llm-d and
Dynamo read: msgpack arrays whose first element is the name of the type.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from .errors import InvalidParameterError

# Where a block is. The first one means the engine's own cache, on a CPU too, as in vLLM: routers
# rank the media.
GPU, CPU, DISK = "GPU", "CPU", "DISK"
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
EPOCH_BITS = 40  # of a sequence number, below the engine's epoch


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether and where events of the KV cache are published, under vLLM's names."""

    enable_kv_cache_events: bool = False
    # None: zmq with enable_kv_cache_events, else null
    publisher: Literal["zmq", "null"] | None = None
    # tcp://*:PORT, tcp://[::]:PORT and ipc://PATH are bound; tcp://HOST:PORT is connected to. With
    # more than one engine, the engine's index is added to the port.
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None  # always bound
    buffer_steps: Annotated[int, Meta(ge=0)] = 10_000  # batches that can be replayed
    hwm: Annotated[int, Meta(ge=0)] = 100_000  # messages that wait for each subscriber; 0: no limit
    max_queue_size: Annotated[int, Meta(ge=1)] = 100_000  # batches that wait to be sent
    topic: str = ""

    @property
    def is_enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


class KVCacheEvent(
    msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False, tag=True
):
    """Base of the three events."""


class BlockStored(KVCacheEvent, frozen=True):
    """Consecutive blocks of one sequence can be found from now on.

    Outside the engine's own cache: block_hashes and medium alone.
    """

    block_hashes: list[int]  # see hash_for_routers
    parent_block_hash: int | None  # of the block before the first one; None: it begins a sequence
    token_ids: list[int]  # of all blocks
    block_size: int  # tokens
    lora_id: int | None  # always None; vLLM has deprecated it
    medium: str | None
    lora_name: str | None
    # for each block what else its hash includes: the adapter, and the cache_salt of the first block
    extra_keys: list[tuple[str, ...] | None] | None = None
    # where layers form more than one group
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent, frozen=True):
    """These blocks cannot be found any more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent, frozen=True):
    """No block can be found any more, in any medium."""


class EventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """What changed in a step, in order. ts: seconds of the wall clock."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def hash_for_routers(block_hash: bytes) -> int:
    """A block's hash as routers know it: its last 8 bytes, without a sign."""
    return int.from_bytes(block_hash[24:32], "big")


class Endpoint(NamedTuple):
    """An address of ZMQ, and what to do with it."""

    address: str
    is_bound: bool


def parse_endpoint(endpoint: str, engine_index: int = 0, *, must_bind: bool = False) -> Endpoint:
    """The address of engine number `engine_index`.

    Raises InvalidParameterError.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest and not rest.startswith(("@", "*")):
        return Endpoint(endpoint + (f".{engine_index}" if engine_index else ""), True)
    host, _, port = rest.rpartition(":")
    last = 65535 - engine_index
    if scheme != "tcp" or not host or not port.isdecimal() or not 1 <= int(port) <= last:
        raise InvalidParameterError(
            "kv_events_config",
            f"an endpoint must be tcp://HOST:PORT (HOST * for all interfaces) or ipc://PATH, got "
            f"{endpoint!r}",
        )
    is_bound = must_bind or "*" in host or "::" in host
    return Endpoint(f"tcp://{host}:{int(port) + engine_index}", is_bound)


def check_kv_events(config: KVEventsConfig | None, *, has_prefix_cache: bool) -> None:
    """Raises InvalidParameterError for what cannot be published."""
    if config is None:
        return
    if config.publisher == "zmq" and not config.enable_kv_cache_events:
        raise InvalidParameterError(
            "kv_events_config", 'publisher="zmq" needs enable_kv_cache_events=true'
        )
    if config.is_enabled and not has_prefix_cache:
        raise InvalidParameterError(
            "kv_events_config", "there are no events without enable_prefix_caching"
        )
    parse_endpoint(config.endpoint)
    if config.replay_endpoint is not None:
        parse_endpoint(config.replay_endpoint, must_bind=True)


def encode_batch(batch: EventBatch) -> bytes:
    return msgspec.msgpack.encode(batch)


def decode_batch(payload: Any) -> EventBatch:
    """Raises msgspec.ValidationError."""
    return msgspec.msgpack.decode(payload, type=EventBatch)
