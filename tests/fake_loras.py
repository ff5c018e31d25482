"""The adapters of the fake executor: an adapter is a checksum, from which digests start."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from quire.ipc.config import EngineConfig
from quire.ipc.errors import InvalidParameterError
from quire.ipc.lora import LoRARequest

_MASK = 2**64 - 1


def extend_digest(digest: int, token_id: int) -> int:
    """Return the fake KV entry of one token, 64 bits.

    Like a real entry, it depends on the token and on every token before it.
    """
    digest = ((digest ^ (token_id + 1)) * 0x9E3779B97F4A7C15) & _MASK
    return digest ^ (digest >> 29)


def adapter_checksum(path: str) -> int:
    """Return the checksum of the fake adapter at `path`: of the file's bytes, or of the path itself
    if there is no file.
    """
    return zlib.crc32(Path(path).read_bytes() if Path(path).is_file() else path.encode())


def adapter_digest(path: str, weights: int = 0) -> int:
    """Return the digest of the weights with a fake adapter, which precedes the first token."""
    return extend_digest(weights, adapter_checksum(path))


class FakeLoras:
    def __init__(self) -> None:
        self.adapters: dict[int, int] = {}  # number -> digest
        self.read_adapters: dict[int, int] = {}
        self.holds_reads = False  # adapters are read when the test calls finish_reads
        self.held_reads: list[tuple[LoRARequest, Future[str]]] = []

    def read_lora(self, request: LoRARequest) -> Future[str]:
        """Read an adapter. A path that contains "missing" fails."""
        future: Future[str] = Future()
        self.held_reads.append((request, future))
        if not self.holds_reads:
            self.finish_reads()
        return future

    def finish_reads(self) -> None:
        while self.held_reads:
            request, future = self.held_reads.pop(0)
            if "missing" in request.lora_path:
                future.set_exception(
                    InvalidParameterError("lora_request", f"{request.lora_path} is not there")
                )
                continue
            digest = self.read_adapters[request.lora_int_id] = adapter_checksum(request.lora_path)
            future.set_result(str(digest))

    def add_lora(self, request: LoRARequest) -> bool:
        assert request.lora_int_id not in self.adapters, "a number twice"
        self.adapters[request.lora_int_id] = self.read_adapters.pop(request.lora_int_id)
        return True

    def remove_lora(self, lora_int_id: int) -> bool:
        was_read = self.read_adapters.pop(lora_int_id, None) is not None
        return self.adapters.pop(lora_int_id, None) is not None or was_read

    def list_loras(self) -> set[int]:
        return set(self.adapters)

    def check_adapters(self, config: EngineConfig, slots: Iterable[Any]) -> None:
        """Check what the core promises about the adapters of the requests in slots."""
        requests = [slot.request.lora_request for slot in slots]
        used = {request.lora_int_id for request in requests if request is not None}
        assert len(used) <= config.lora_config.max_loras, f"too many adapters: {used}"
        assert used <= set(self.adapters), f"{used} are not in memory"
