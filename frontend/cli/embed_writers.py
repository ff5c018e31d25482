"""Files of embeddings, written row by row: .npy, Parquet and JSON lines.

Must not know: where rows come from.

A file gets its name when it is complete. Until then it has the suffix .partial, and *.partial.json
says what a second run need not compute again:

    rows.npy.partial        rows, of which the last may be incomplete
    rows.npy.partial.json   the run (input, model, options), its rows and bytes; saved every 5 s
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, Protocol

import msgspec

from ...ipc.errors import InvalidParameterError
from ...ipc.own_files import read_own, replace_own

if TYPE_CHECKING:
    import numpy as np

NPY_HEADER_BYTES = 128
ROW_GROUP = 4096  # rows of Parquet that are written together
SAVE_INTERVAL_S = 5.0
MAX_STATE_BYTES = 2**20


class Writer(Protocol):
    num_done: int  # rows that an earlier, interrupted run has written

    def write(self, record: dict[str, Any], data: np.ndarray) -> None:
        """Writes the next row: f4 [size] or [num_tokens, size], and the fields of its input's
        record except the text.
        """
        ...

    def close(self) -> None:
        """Completes the file."""
        ...

    def leave(self) -> int:
        """Ends an interrupted run. Returns the number of rows that a second run need not compute.
        If there are none, no file stays. It does nothing after `close`.
        """
        ...


class SavedRun(msgspec.Struct):
    """Describes what an incomplete file holds. It is saved beside the file."""

    run: dict[str, Any]
    num_rows: int
    num_bytes: int
    checksum: int = 0

    def sum(self) -> int:
        return zlib.crc32(msgspec.json.encode([self.run, self.num_rows, self.num_bytes]))


def check_output(output: str, *, is_by_token: bool) -> None:
    """Checks `output`, a file name, or "-" for JSON lines on standard output. Raises
    InvalidParameterError for a format that cannot hold the rows, or whose package is not installed.
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


def make_writer(
    output: str, *, is_by_token: bool, run: dict[str, Any] | None = None, resumes: bool = True
) -> Writer:
    """Returns a writer that continues where an interrupted run has stopped.

    `run` holds what determines the rows, by name. None means that the input cannot be read again,
    so an incomplete file is of no use. `resumes` tells whether rows of an earlier run are used.

    Raises the errors of check_output, and InvalidParameterError if the file cannot be written, or
    holds rows of another run.
    """
    check_output(output, is_by_token=is_by_token)
    if output == "-":
        return StandardOutput()
    target, suffix = PartialFile(output, run, resumes), Path(output).suffix
    if suffix == ".npy":
        return Npy(target)
    if suffix == ".parquet":
        return Parquet(target, is_by_token)
    return JsonLines(target)


class PartialFile:
    """A file that gets its name when it is complete. `num_rows` and `num_bytes` are those of an
    earlier run, which are kept.
    """

    def __init__(self, name: str, run: dict[str, Any] | None, resumes: bool):
        self.path = Path(name)
        self.partial = self.path.with_name(self.path.name + ".partial")
        self._state = self.path.with_name(self.path.name + ".partial.json")
        self._run = run
        self.num_rows = self.num_bytes = 0
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self.partial, flags, 0o666)
            self.file: BinaryIO = os.fdopen(descriptor, "r+b")
            self._lock()
            if not resumes:
                self._state.unlink(missing_ok=True)
            if (saved := self._read_state()) is not None:
                self.num_rows, self.num_bytes = saved.num_rows, saved.num_bytes
            self.file.truncate(self.num_bytes)
            self.file.seek(self.num_bytes)
        except OSError as error:
            raise InvalidParameterError(
                "--output", f"cannot write {name}: {error.strerror or error}"
            ) from None

    def _lock(self) -> None:
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidParameterError(
                "--output", f"another process writes {self.partial}"
            ) from None

    def _read_state(self) -> SavedRun | None:
        try:
            saved = msgspec.json.decode(read_own(self._state, MAX_STATE_BYTES), type=SavedRun)
        except FileNotFoundError:
            return None
        except OSError as error:  # also a file of another user, or one that is too large
            self._refuse(str(error))
        except msgspec.MsgspecError as error:
            self._refuse(f"{self._state} cannot be understood ({error})")
        if saved.checksum != saved.sum():
            self._refuse(f"{self._state} cannot be understood (its checksum is wrong)")
        run = self._run or {"input": "standard input"}
        others = [name for name, value in run.items() if saved.run.get(name) != value]
        if others:
            self._refuse(
                f"{self.partial} has {saved.num_rows} rows of a run with another "
                f"{' and another '.join(others)}"
            )
        if self.partial.stat().st_size < saved.num_bytes:
            self._refuse(f"{self.partial} is shorter than the {saved.num_bytes} bytes written")
        return saved

    def _refuse(self, problem: str) -> NoReturn:
        raise InvalidParameterError(
            "--output", f"{problem}; give --no-resume to start anew, or another file"
        )

    def save(self, num_rows: int) -> None:
        """Records that the first `num_rows` rows are written: a second run begins after them."""
        self.file.flush()
        if self._run is None:
            return
        os.fsync(self.file.fileno())
        saved = SavedRun(self._run, num_rows, self.file.tell())
        saved.checksum = saved.sum()
        replace_own(self._state, lambda file: file.write(msgspec.json.encode(saved)))
        self.num_rows, self.num_bytes = saved.num_rows, saved.num_bytes

    def close(self, convert: Callable[[Path, Path], None] | None = None) -> None:
        """Gives the file its name. `convert` makes the complete file (its second argument) of this
        one, if it has another format.
        """
        self.file.flush()
        if convert is None:
            self.partial.replace(self.path)
        else:
            new = self.path.with_name(self.path.name + ".new")
            try:
                convert(self.partial, new)
                new.replace(self.path)
            finally:
                new.unlink(missing_ok=True)
            self.partial.unlink()
        self._state.unlink(missing_ok=True)
        self.file.close()

    def leave(self) -> int:
        """Does what Writer.leave says, for the rows of the last `save`."""
        if self.file.closed:
            return 0
        with contextlib.suppress(OSError):  # on a full disk the last rows are lost
            self.file.close()
        if self.num_rows == 0:
            self.partial.unlink(missing_ok=True)
            self._state.unlink(missing_ok=True)
        return self.num_rows


class StandardOutput:
    """Writes JSON lines, as JsonLines does."""

    num_done = 0

    def write(self, record: dict[str, Any], data: np.ndarray) -> None:
        sys.stdout.buffer.write(json_line(record, data))

    def close(self) -> None:
        sys.stdout.buffer.flush()

    def leave(self) -> int:
        return 0


class FileWriter(ABC):
    """A Writer of a file, which saves its state every SAVE_INTERVAL_S."""

    def __init__(self, target: PartialFile):
        self._target = target
        self.num_done = self._num_rows = target.num_rows
        self._saved = time.monotonic()

    def write(self, record: dict[str, Any], data: np.ndarray) -> None:
        self._append(record, data)
        self._num_rows += 1
        if time.monotonic() - self._saved >= SAVE_INTERVAL_S:
            self._save()

    @abstractmethod
    def _append(self, record: dict[str, Any], data: np.ndarray) -> None: ...

    def _flush(self) -> None:
        """Writes rows that wait for others."""
        self._target.file.flush()

    def _save(self) -> None:
        self._flush()
        self._target.save(self._num_rows)
        self._saved = time.monotonic()

    def close(self) -> None:
        self._target.close()

    def leave(self) -> int:
        if not self._target.file.closed:
            with contextlib.suppress(OSError):  # on a full disk the last state stands
                self._save()
        return self._target.leave()


def json_line(record: dict[str, Any], data: np.ndarray) -> bytes:
    return msgspec.json.encode({**record, "embedding": data.tolist()}) + b"\n"


class JsonLines(FileWriter):
    """Writes one object for each text: its record's fields, and `embedding`."""

    def _append(self, record: dict[str, Any], data: np.ndarray) -> None:
        self._target.file.write(json_line(record, data))


class Npy(FileWriter):
    """Writes numpy's format, version 1.0: f4 [number of texts, size]. The header is written
    last.
    """

    def __init__(self, target: PartialFile):
        super().__init__(target)
        if not target.num_bytes:
            target.file.write(bytes(NPY_HEADER_BYTES))

    def _append(self, record: dict[str, Any], data: np.ndarray) -> None:
        self._target.file.write(data.astype("<f4", copy=False).tobytes())

    def close(self) -> None:
        from numpy.lib.format import write_array_header_1_0

        file = self._target.file
        shape = (self._num_rows, (file.tell() - NPY_HEADER_BYTES) // (4 * max(1, self._num_rows)))
        file.seek(0)
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        write_array_header_1_0(file, header)  # fills NPY_HEADER_BYTES
        super().close()


class Parquet(FileWriter):
    """Writes the columns of the first record, and `embedding`, a list of f4 (of lists of f4 by
    token).

    Until it is complete, the file is a stream of Arrow's batches. Parquet has its index at its end,
    so a second run could not continue an incomplete Parquet file.
    """

    def __init__(self, target: PartialFile, is_by_token: bool):
        super().__init__(target)
        # pyarrow is not installed with Quire, so its types are unknown
        arrow: Any = import_module("pyarrow")
        self._arrow = arrow
        row = arrow.list_(arrow.float32())
        self._type = arrow.list_(row) if is_by_token else row
        self._records: list[dict[str, Any]] = []
        self._rows: list[Any] = []
        self._schema: Any = None
        if target.num_bytes:
            with target.partial.open("rb") as file:
                self._schema = arrow.ipc.open_stream(file).schema

    def _append(self, record: dict[str, Any], data: np.ndarray) -> None:
        self._records.append(record)
        self._rows.append(list(data) if data.ndim == 2 else data)
        if len(self._rows) == ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        arrow = self._arrow
        if not self._rows and self._schema is not None:
            return
        names = (
            self._schema.names[:-1]
            if self._schema is not None
            else list(dict.fromkeys(name for record in self._records for name in record))
        )
        columns = {
            name: arrow.array([record.get(name) for record in self._records]) for name in names
        }
        columns["embedding"] = arrow.array(self._rows, self._type)
        table = arrow.table(columns)
        if self._schema is None:
            self._schema = table.schema
            self._target.file.write(self._schema.serialize())
        for batch in table.cast(self._schema).to_batches():
            self._target.file.write(batch.serialize())
        self._records, self._rows = [], []

    def close(self) -> None:
        self._flush()
        self._target.close(self._convert)

    def _convert(self, stream: Path, complete: Path) -> None:
        parquet: Any = import_module("pyarrow.parquet")
        with (
            stream.open("rb") as file,
            parquet.ParquetWriter(str(complete), self._schema) as writer,
        ):
            for batch in self._arrow.ipc.open_stream(file):
                writer.write_batch(batch)
