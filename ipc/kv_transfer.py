"""The settings with which engines send each other blocks of the KV cache, and the addresses of
their ranks.

Must not know: sockets, blocks, requests.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from .errors import InvalidParameterError

OPTION = "kv_transfer_config"


class KVShare(NamedTuple):
    """Which share of each block a rank has. rank: among all, those of the first stage first."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    rank: int = 0

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def __str__(self) -> str:
        return (
            f"rank {self.rank} with tensor_parallel_size={self.tensor_parallel_size} and "
            f"pipeline_parallel_size={self.pipeline_parallel_size}"
        )


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an engine sends blocks from, and where it gets them. Roles have vLLM's names."""

    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"]
    kv_connector: Literal["SocketConnector"] = "SocketConnector"
    # where a producer listens: tcp://HOST:PORT or ipc://PATH. With several engines or ranks it is
    # that of the first one.
    endpoint: str = "tcp://127.0.0.1:14579"
    # endpoints of producers, which a consumer asks: of each engine that of the first rank
    peers: list[str] = []
    # a file with a secret of 16 bytes or more that all these engines have; with tcp:// it must be
    key_file: str | None = None
    # how long a prompt waits at most for what others have of it
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 5.0

    @property
    def sends(self) -> bool:
        return self.kv_role != "kv_consumer"

    @property
    def receives(self) -> bool:
        return self.kv_role != "kv_producer"

    def of_rank(self, engine: int, share: KVShare) -> KVTransferConfig:
        """The settings of one rank of the engine with this number, with addresses of its own. An
        engine that has its own endpoint among the peers does not ask itself.
        """
        of_engine = engine_endpoint(self.endpoint, engine, share.num_ranks)
        peers = [one for one in self.peers if not (self.sends and one == of_engine)]
        return msgspec.structs.replace(
            self,
            endpoint=rank_endpoint(of_engine, share.rank),
            peers=[rank_endpoint(one, share.rank) for one in peers],
        )


def engine_endpoint(endpoint: str, engine: int, num_ranks: int) -> str:
    """Where the first rank of an engine listens: engines with ports have as many as ranks."""
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.{engine}" if engine else endpoint
    return _next_port(endpoint, engine * num_ranks)


def rank_endpoint(of_engine: str, rank: int) -> str:
    """Where a rank of an engine listens."""
    if of_engine.startswith("ipc://"):
        return f"{of_engine}-rank{rank}" if rank else of_engine
    return _next_port(of_engine, rank)


def _next_port(endpoint: str, distance: int) -> str:
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + distance}"


def check_kv_transfer(
    config: KVTransferConfig | None,
    offloading_size: float | None,
    *,
    num_engines: int,
    num_ranks: int,
    is_on_ray: bool,
) -> None:
    """Raises InvalidParameterError for settings that cannot be used together. offloading_size: of
    the place where blocks are kept, in GiB. num_ranks: of each engine. is_on_ray: they may be on
    several machines.
    """
    if config is None:
        return
    if not offloading_size:
        raise InvalidParameterError(
            "kv_offloading_size",
            f"must be above 0 with {OPTION}, got {offloading_size}: blocks are sent from there and "
            f"received there",
        )
    if config.receives != bool(config.peers):
        raise InvalidParameterError(
            OPTION,
            "kv_consumer and kv_both need peers, the endpoints of producers, and kv_producer has "
            "none",
        )
    if is_on_ray:
        raise InvalidParameterError(
            OPTION,
            "must be None with distributed_executor_backend=ray: an engine's ranks listen on one "
            "machine",
        )
    has_key = config.key_file is not None
    for address in config.peers:
        _check_endpoint(address, num_ranks, has_key=has_key)
    if config.sends:
        _check_endpoint(config.endpoint, num_engines * num_ranks, has_key=has_key)


def _check_endpoint(address: str, num_ports: int, *, has_key: bool) -> None:
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    is_file = scheme == "ipc" and rest and rest[0] not in "@*"
    is_number = port.isascii() and port.isdecimal()
    is_port = scheme == "tcp" and host and is_number and 0 < int(port) <= 65536 - num_ports
    if not (is_file or is_port):
        raise InvalidParameterError(
            OPTION,
            f"an endpoint must be tcp://HOST:PORT, with a port of 1 to {65536 - num_ports}, or "
            f"ipc://PATH, got {address!r}",
        )
    if is_port and not has_key:
        raise InvalidParameterError(
            OPTION, f"{address} needs key_file, a file with a secret that the engines share"
        )
