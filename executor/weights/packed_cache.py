"""Keeps packed weights in files, so that a second start maps what the first one has quantized.

Must not know: torch, layers, what an array is for.

    <name of the model>-<hash of path, quantization, dtype, part>.packed
        magic, length of the header, SHA-256 of the header; the header as JSON: the key, and where
        each array lies; the arrays, each at a page

Each rank, and each engine that shares experts, has an entry of its part. The key holds all that the
arrays depend on, and the header holds a checksum of each array. An entry that has another key, is
damaged, or is not this user's own (ipc/own_files.py) is ignored and written again. Writers write to
a file of their own and rename it, so readers see whole files, and several writers do no harm.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from struct import Struct
from typing import BinaryIO, NamedTuple

import msgspec

from ...ipc.config import EngineConfig
from ...ipc.machine import available_cores
from ...ipc.models.expert_parallel import shares_experts
from ...ipc.models.gguf import is_gguf, part_names
from ...ipc.models.ranks import num_ranks
from ...ipc.own_files import TEMPORARY, UntrustedFileError, open_own, replace_own

logger = logging.getLogger(__name__)

MAGIC = b"QUIREPW\0"
# it changes with kernels/cpu/native/src/quantize.inl; all instruction sets share the layout
LAYOUT = 2
FIRST = Struct("<8sQ32s")
MAX_HEADER_BYTES = 64 * 2**20
_ROW, _ROWS = 4096, 256  # bytes of a row, and rows of a piece of a megabyte
STALE_S = 3600.0  # a temporary file of this age was left by a process that died


class Place(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    begin: int
    num_bytes: int
    checksum: int = 0


class Header(msgspec.Struct, frozen=True):
    key: str
    file_bytes: int
    arrays: dict[str, Place]


class StoredArray(NamedTuple):
    dtype: str
    shape: list[int]
    data: memoryview  # of bytes; in an entry that was read, a view of the mapped file


def weight_files(model: Path) -> list[Path]:
    """All parts of a GGUF file, or the safetensors files of a directory."""
    if is_gguf(model):
        return [model.with_name(name) for name in part_names(model.name)]
    return sorted(model.glob("*.safetensors"))


class PackedCache:
    """The entry of one model in a directory, whether it exists or not."""

    def __init__(self, directory: Path, model: Path, config: EngineConfig, rank: int = 0):
        """`model` is the directory or the GGUF file of the weights. rank: among all of the engine.
        Raises OSError for weight files that cannot be found.
        """
        settings, device = config.model_config, config.device_config
        kind = [settings.quantization, settings.dtype, settings.model_impl]
        if num_ranks(config) > 1:
            sizes = device.pipeline_parallel_size, device.tensor_parallel_size
            kind.append(f"rank {rank} of {sizes[0]} stages of {sizes[1]}")
        if shares_experts(config):
            kind.append(f"experts {device.data_parallel_rank} of {device.data_parallel_size}")
        of_encoder = []
        if settings.vision is not None:
            kind.append("with an encoder of images")
            of_encoder = [Path(settings.vision.file)] if settings.vision.file else []
        files = [
            [str(path.resolve()), (stat := path.stat()).st_size, stat.st_mtime_ns]
            for path in [*weight_files(model), *of_encoder]
        ]
        which = _digest([str(model.resolve()), *kind])[:16]
        self.path = directory / f"{model.stem[:80]}-{which}.packed"
        self.key = _digest([LAYOUT, files, *kind, config.model_config.hf_config])

    @staticmethod
    def of(config: EngineConfig, model: Path | None = None, rank: int = 0) -> PackedCache | None:
        """The entry of a rank for the configuration's model, or for `model` in place of that. None:
        packed_weights_cache is not set, or does not apply.
        """
        directory = config.load_config.packed_weights_cache
        if directory is None or config.load_config.load_format == "dummy":
            return None
        if config.model_config.quantization is None or config.device_config.device != "cpu":
            return None
        try:
            files = model or Path(config.model_config.model)
            return PackedCache(Path(directory), files, config, rank)
        except OSError:
            return None  # the loader reports what is wrong

    def read(self) -> dict[str, StoredArray] | None:
        """Returns the arrays, in a private mapping whose pages are shared while nobody writes to
        them. It returns None if there is no entry, or logs why an entry cannot be used and returns
        None.
        """
        try:
            with open(open_own(self.path), "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            header = _read_header(mapped)
        except FileNotFoundError:
            return None
        except UntrustedFileError as error:
            logger.warning("%s; it is not read, and written again", error)
            return None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            logger.warning("%s: damaged, written again: %s", self.path, error)
            return None
        if header.key != self.key:
            logger.info("%s: of other weights or settings, written again", self.path)
            return None
        view = memoryview(mapped)
        arrays = {
            name: StoredArray(p.dtype, p.shape, view[p.begin : p.begin + p.num_bytes])
            for name, p in header.arrays.items()
        }
        for name, found in _checksums(arrays).items():
            if found != header.arrays[name].checksum:
                problem = f"the checksum of {name} differs"
                logger.warning("%s: damaged, written again: %s", self.path, problem)
                return None
        return arrays

    def may_be_read(self) -> bool:
        """Whether there is an entry, and it is this user's own."""
        try:
            os.close(open_own(self.path))
        except OSError:
            return False
        return True

    def write(self, arrays: Mapping[str, StoredArray]) -> None:
        """Writes or replaces the entry. A failure is only logged: the engine runs without it."""
        start = time.perf_counter()
        try:
            header, places = self._header(arrays)
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path.parent).free
            if header.file_bytes > free:
                raise OSError(f"it takes {header.file_bytes} bytes, {free} are free")
            pieces = [(places[name].begin, array.data) for name, array in arrays.items()]
            self._write(_encode(header), pieces, header.file_bytes)
        except OSError as error:
            logger.warning("%s: packed weights are not kept: %s", self.path, error)
            return
        seconds = time.perf_counter() - start
        gigabytes = header.file_bytes / 1e9
        logger.info("%s: packed weights written, %.2f GB in %.2f s", self.path, gigabytes, seconds)

    def _header(self, arrays: Mapping[str, StoredArray]) -> tuple[Header, dict[str, Place]]:
        checksums = _checksums(arrays)
        places = {
            name: Place(array.dtype, array.shape, 0, array.data.nbytes, checksums[name])
            for name, array in arrays.items()
        }
        # this leaves room for the digits of `begin`
        size = len(_encode(Header(self.key, 0, places))) + 16 * (len(places) + 1)
        at = _to_page(size)
        for name, place in places.items():
            places[name] = msgspec.structs.replace(place, begin=at)
            at = _to_page(at + place.num_bytes)
        return Header(self.key, at, places), places

    def _write(
        self, head: bytes, pieces: Iterable[tuple[int, memoryview]], file_bytes: int
    ) -> None:
        def fill(file: BinaryIO) -> None:
            _remove_stale(self.path.parent, os.fstat(file.fileno()).st_mtime)
            file.write(head)
            for begin, data in pieces:
                file.seek(begin)
                file.write(data)
            file.truncate(file_bytes)

        replace_own(self.path, fill)


def checksum(data: memoryview) -> int:
    """XORs the rows of 4 KiB of each megabyte, and returns a CRC-32 of the results. This is six
    times as fast as a CRC-32 of all bytes. The checksum changes with any byte, with pages of zeros,
    and with data that moves to another megabyte. It does not change if rows within a megabyte
    change places.

    `data` is contiguous. It runs without the GIL.
    """
    import numpy as np  # here, because most engines import this module and write no such file

    found, piece = 0, _ROW * _ROWS
    for start in range(0, data.nbytes, piece):
        part = data[start : start + piece]
        whole = part.nbytes // _ROW * _ROW
        if whole:
            rows = np.frombuffer(part[:whole], "<u8").reshape(-1, _ROW // 8)
            found = zlib.crc32(np.bitwise_xor.reduce(rows, axis=0), found)
        found = zlib.crc32(part[whole:], found)
    return found


def _checksums(arrays: Mapping[str, StoredArray]) -> dict[str, int]:
    with ThreadPoolExecutor(available_cores()) as pool:
        found = pool.map(checksum, [array.data for array in arrays.values()])
        return dict(zip(arrays, found, strict=True))


def _read_header(mapped: mmap.mmap) -> Header:
    """Reads the header. Raises ValueError or MsgspecError if it is not exactly as written."""
    if len(mapped) < FIRST.size:
        raise ValueError(f"it has {len(mapped)} bytes")
    magic, size, digest = FIRST.unpack_from(mapped)
    if magic != MAGIC or size > min(MAX_HEADER_BYTES, len(mapped) - FIRST.size):
        raise ValueError("it does not begin as such a file does")
    text = mapped[FIRST.size : FIRST.size + size]
    if hashlib.sha256(text).digest() != digest:
        raise ValueError("the header's checksum differs")
    header = msgspec.json.decode(text, type=Header)
    if header.file_bytes != len(mapped):
        raise ValueError(f"it has {len(mapped)} bytes, not {header.file_bytes}")
    return header


def _encode(header: Header) -> bytes:
    text = msgspec.json.encode(header)
    return FIRST.pack(MAGIC, len(text), hashlib.sha256(text).digest()) + text


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


def _to_page(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _remove_stale(directory: Path, now: float) -> None:
    for path in directory.glob(f"*{TEMPORARY}"):
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime > STALE_S:
                path.unlink()
