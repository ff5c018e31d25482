"""Files of embeddings, written row by row: .npy, Parquet and JSON lines.

Must not know: where rows come from.

A file gets its name when it is complete; until then it has the suffix .partial.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import msgspec

from ...ipc.errors import InvalidParameterError

if TYPE_CHECKING:
    import numpy as np

NPY_HEADER_BYTES = 128
ROW_GROUP = 4096  # rows of Parquet that are written together


class Writer(Protocol):
    def write(self, record: dict[str, Any], data: np.ndarray) -> None:
        """The next row: f4 [size] or [num_tokens, size], and the fields of its input's record
        except the text.
        """
        ...

    def close(self) -> None:
        """Completes the file."""
        ...

    def discard(self) -> None:
        """Removes the incomplete file. Does nothing after close."""
        ...


def check_output(output: str, *, is_by_token: bool) -> None:
    """`output`: a file name, or "-" for JSON lines on standard output. Raises InvalidParameterError
    for a format that cannot hold the rows, or whose package is not installed.
    """
    suffix = Path(output).suffix
    if output != "-" and suffix not in (".jsonl", ".npy", ".parquet"):
        raise InvalidParameterError(
            "--output", f"must end in .npy, .parquet or .jsonl, got {output!r}"
        )
    if suffix == ".npy" and is_by_token:
        raise InvalidParameterError(
            "--output",
            "*.npy holds one row for each text; write *.jsonl or *.parquet for a task by token",
        )
    if suffix == ".parquet" and find_spec("pyarrow") is None:
        raise InvalidParameterError(
            "--output", "*.parquet needs the package pyarrow: pip install pyarrow"
        )


def make_writer(output: str, *, is_by_token: bool) -> Writer:
    """Raises the errors of check_output, and if the file cannot be written."""
    check_output(output, is_by_token=is_by_token)
    suffix = Path(output).suffix
    if suffix == ".npy":
        return Npy(output)
    if suffix == ".parquet":
        return Parquet(output, is_by_token)
    return JsonLines(output)


class PartialFile:
    """A file that gets its name when it is complete."""

    def __init__(self, name: str):
        self.path = Path(name)
        self.partial = self.path.with_name(self.path.name + ".partial")
        try:
            self.file: BinaryIO = self.partial.open("wb")
        except OSError as error:
            raise InvalidParameterError(
                "--output", f"cannot write {name}: {error.strerror}"
            ) from None

    def close(self) -> None:
        self.file.close()
        self.partial.replace(self.path)

    def discard(self) -> None:
        self.file.close()
        self.partial.unlink(missing_ok=True)


class JsonLines:
    """One object for each text: its record's fields, and `embedding`."""

    def __init__(self, name: str):
        self._target = None if name == "-" else PartialFile(name)
        self._file = sys.stdout.buffer if self._target is None else self._target.file

    def write(self, record: dict[str, Any], data: np.ndarray) -> None:
        self._file.write(msgspec.json.encode({**record, "embedding": data.tolist()}) + b"\n")

    def close(self) -> None:
        if self._target is None:
            self._file.flush()
        else:
            self._target.close()

    def discard(self) -> None:
        if self._target is not None:
            self._target.discard()


class Npy:
    """numpy's format, version 1.0: f4 [number of texts, size]. The header is written last."""

    def __init__(self, name: str):
        self._target = PartialFile(name)
        self._target.file.write(bytes(NPY_HEADER_BYTES))
        self._num_rows, self._size = 0, 0

    def write(self, record: dict[str, Any], data: np.ndarray) -> None:
        self._target.file.write(data.astype("<f4", copy=False).tobytes())
        self._num_rows, self._size = self._num_rows + 1, data.shape[0]

    def close(self) -> None:
        shape = (self._num_rows, self._size)
        words = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
        length = NPY_HEADER_BYTES - 10
        start = b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little")
        self._target.file.seek(0)
        self._target.file.write(start + words.ljust(length - 1).encode() + b"\n")
        self._target.close()

    def discard(self) -> None:
        self._target.discard()


class Parquet:
    """Columns: those of the first record, and `embedding`, a list of f4 (of lists of f4 by
    token).
    """

    def __init__(self, name: str, is_by_token: bool):
        # not installed with Quire: types are unknown
        arrow: Any = import_module("pyarrow")
        self._arrow = arrow
        self._parquet: Any = import_module("pyarrow.parquet")
        row = arrow.list_(arrow.float32())
        self._type = arrow.list_(row) if is_by_token else row
        self._target = PartialFile(name)
        self._writer: Any = None
        self._records: list[dict[str, Any]] = []
        self._rows: list[Any] = []

    def write(self, record: dict[str, Any], data: np.ndarray) -> None:
        self._records.append(record)
        self._rows.append(list(data) if data.ndim == 2 else data)
        if len(self._rows) == ROW_GROUP:
            self._write_group()

    def _write_group(self) -> None:
        arrow = self._arrow
        names = (
            self._writer.schema.names[:-1]
            if self._writer
            else list(dict.fromkeys(name for record in self._records for name in record))
        )
        columns = {
            name: arrow.array([record.get(name) for record in self._records]) for name in names
        }
        columns["embedding"] = arrow.array(self._rows, self._type)
        table = arrow.table(columns)
        if self._writer is None:
            self._writer = self._parquet.ParquetWriter(self._target.file, table.schema)
        self._writer.write_table(table.cast(self._writer.schema))
        self._records, self._rows = [], []

    def close(self) -> None:
        if self._rows or self._writer is None:
            self._write_group()
        writer: Any = self._writer
        writer.close()
        self._target.close()

    def discard(self) -> None:
        self._target.discard()
