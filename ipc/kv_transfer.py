"""The settings with which engines send each other blocks of the KV cache.

Must not know: sockets, blocks, requests.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .errors import InvalidParameterError

OPTION = "kv_transfer_config"


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an engine sends blocks from, and where it gets them. Roles have vLLM's names."""

    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"]
    kv_connector: Literal["SocketConnector"] = "SocketConnector"
    # where a producer listens: tcp://HOST:PORT or ipc://PATH
    endpoint: str = "tcp://127.0.0.1:14579"
    # endpoints of producers, which a consumer asks
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


def check_kv_transfer(
    config: KVTransferConfig | None,
    offloading_size: float | None,
    *,
    num_engines: int,
    num_ranks: int,
) -> None:
    """Raises InvalidParameterError for settings that cannot be used together. offloading_size: of
    the place where blocks are kept, in GiB.
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
    for address in [*config.peers, *([config.endpoint] if config.sends else [])]:
        _check_endpoint(address, has_key=config.key_file is not None)
    if num_ranks > 1 or num_engines > 1:
        raise InvalidParameterError(
            OPTION,
            "must be None with tensor_parallel_size, pipeline_parallel_size or data_parallel_size "
            "above 1: one rank of one engine sends and receives",
        )


def _check_endpoint(address: str, *, has_key: bool) -> None:
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    is_file = scheme == "ipc" and rest and rest[0] not in "@*"
    is_number = port.isascii() and port.isdecimal()
    is_port = scheme == "tcp" and host and is_number and 0 < int(port) < 65536
    if not (is_file or is_port):
        raise InvalidParameterError(
            OPTION, f"an endpoint must be tcp://HOST:PORT or ipc://PATH, got {address!r}"
        )
    if is_port and not has_key:
        raise InvalidParameterError(
            OPTION, f"{address} needs key_file, a file with a secret that the engines share"
        )
