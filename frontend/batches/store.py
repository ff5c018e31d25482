"""Files and batches on disk: a folder for each, below one folder for each owner.

Must not know: HTTP, who asks, how a batch is run.

    OWNER/files/ID/       file.json, content
    OWNER/batches/ID/     batch.json, input.jsonl, and while it runs output.jsonl, errors.jsonl,
                          journal; cancel, if that has been asked for
    queue/OWNER.ID        an empty file for each batch that has not ended

Several processes may use one store. A folder is made under another name and then renamed, so it is
whole when it is seen. Only the process that runs batches changes a batch.json; `cancel` is how
others ask. Ids begin with the time, so they are in the order of creation.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from ...ipc.own_files import open_own, read_own, replace_own
from .input_file import LineError

ID = re.compile(r"(file-|batch_|msgbatch_)[0-9a-f]{32}")
WRITING = ".writing"
ALL = "all"  # the owner where no keys are asked for
STALE_S = 24 * 3600.0  # after which an unfinished upload is one that was cut off
KEEP_S = 30 * 24 * 3600.0  # for which files and batches that have ended are kept by default
MAX_OBJECTS = 10_000  # files of one owner; the same for batches
MAX_JSON = 64 * 2**20  # bytes of one batch.json
Kind = Literal["openai", "anthropic"]
Ending = Literal["completed", "expired", "cancelled"]
Record = TypeVar("Record", "StoredFile", "StoredBatch")


class FullError(OSError):
    """The store has reached one of its limits."""


class StoredFile(msgspec.Struct, kw_only=True):
    """Times are in seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str


class Counts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0
    dropped: int = 0


class StoredBatch(msgspec.Struct, kw_only=True):
    """`times` has the time of each status, by its name. `ending` is set when no more lines are
    answered; what is left to do then is to write down the rest. `urls` are the endpoints.
    """

    id: str
    owner: str
    kind: Kind
    urls: list[str]
    created_at: int
    expires_at: int
    completion_window: str = ""
    input_file_id: str | None = None
    metadata: dict[str, str] | None = None
    output_expires_s: int | None = None
    status: str = "validating"
    ending: Ending | None = None
    times: dict[str, int] = {}
    num_lines: int = 0
    counts: Counts = msgspec.field(default_factory=Counts)
    errors: list[LineError] = []
    # The files that the results become. They are chosen first, so that a second try makes the same.
    output_file_id: str
    error_file_id: str
    has_output: bool = False
    has_errors: bool = False

    @property
    def has_ended(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")


class Store:
    """`now` returns seconds since 1970. All files together have at most `max_bytes`."""

    def __init__(self, root: Path, max_bytes: int, now: Callable[[], float]):
        self.root = root
        self.max_bytes = max_bytes
        self.now = now

    def new_id(self, prefix: str) -> str:
        return f"{prefix}{int(self.now() * 1e6):016x}{secrets.token_hex(8)}"

    def _owner(self, owner: str) -> Path:
        return self.root / (owner or ALL)

    def _folder(self, owner: str, kind: str, id: str) -> Path:
        return self._owner(owner) / kind / id

    def used_bytes(self) -> int:
        """Returns the size of all files. One that has several names counts once."""
        sizes = {}
        for folder, _, names in os.walk(self.root):
            for name in names:
                with contextlib.suppress(OSError):
                    status = os.stat(os.path.join(folder, name))
                    sizes[status.st_ino] = status.st_size
        return sum(sizes.values())

    def check_room(self, owner: str, kind: str) -> int:
        """Returns the bytes that are left. Raises FullError if there are none, or if the owner has
        too many files or batches.
        """
        if sum(1 for _ in self._ids(owner, kind)) >= MAX_OBJECTS:
            raise FullError(f"there are {MAX_OBJECTS} {kind} already, the most that may be kept")
        left = self.max_bytes - self.used_bytes()
        if left <= 0:
            raise FullError(f"the files of this server have {self.max_bytes} bytes, the most")
        return left

    # ------------------------------------------------------------ what files and batches share

    def _ids(self, owner: str, kind: str) -> Iterator[str]:
        with contextlib.suppress(FileNotFoundError):
            yield from filter(ID.fullmatch, os.listdir(self._owner(owner) / kind))

    def _owners(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return [name for name in os.listdir(self.root) if name not in ("queue", "lock")]
        return []

    def _read(self, path: Path, kind: type[Record]) -> Record | None:
        try:
            return msgspec.json.decode(read_own(path, MAX_JSON), type=kind)
        except FileNotFoundError:
            return None

    def _remove(self, folder: Path) -> bool:
        """Removes a folder at once for all who look. Returns whether it was there."""
        gone = folder.with_name(folder.name + WRITING)
        try:
            folder.rename(gone)
        except FileNotFoundError:
            return False
        shutil.rmtree(gone, ignore_errors=True)
        return True

    # ------------------------------------------------------------ files

    def new_file(self, owner: str) -> Upload:
        """Begins a file. Raises OSError."""
        room = self.check_room(owner, "files")
        return Upload(self, owner, self.new_id("file-"), room)

    def file(self, owner: str, id: str) -> StoredFile | None:
        if not ID.fullmatch(id):
            return None
        found = self._read(self._folder(owner, "files", id) / "file.json", StoredFile)
        if found is None or (found.expires_at is not None and found.expires_at <= self.now()):
            return None
        return found

    def files(self, owner: str) -> Iterator[StoredFile]:
        """Yields the files of an owner, the oldest first."""
        for id in sorted(self._ids(owner, "files")):
            if (found := self.file(owner, id)) is not None:
                yield found

    def content(self, owner: str, id: str) -> Path:
        return self._folder(owner, "files", id) / "content"

    def delete_file(self, owner: str, id: str) -> bool:
        """Returns whether it was there. A batch keeps its own name of its input."""
        return self.file(owner, id) is not None and self._remove(self._folder(owner, "files", id))

    def publish(self, owner: str, path: Path, info: StoredFile) -> None:
        """Makes a file of results that are complete, or leaves it if it is there."""
        folder = self._folder(owner, "files", info.id)
        if folder.exists():
            return
        writing = folder.with_name(info.id + WRITING)
        with contextlib.suppress(FileExistsError):  # from an earlier try
            make_private(writing)
        with contextlib.suppress(FileExistsError):
            os.link(path, writing / "content")
        replace_own(writing / "file.json", lambda file: file.write(msgspec.json.encode(info)))
        writing.rename(folder)

    # ------------------------------------------------------------ batches

    def add_batch(self, batch: StoredBatch, write_input: Callable[[Path], object]) -> None:
        """Adds a batch whose input `write_input` puts at a path. Raises OSError."""
        self.check_room(batch.owner, "batches")
        folder = self.batch_folder(batch)
        writing = folder.with_name(batch.id + WRITING)
        make_private(writing)
        try:
            write_input(writing / "input.jsonl")
            self._write_batch(writing, batch)
            queue = self.root / "queue"
            queue.mkdir(mode=0o700, exist_ok=True)
            os.close(open_own(queue / f"{batch.owner}.{batch.id}", os.O_WRONLY | os.O_CREAT))
            writing.rename(folder)
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise

    def batch_folder(self, batch: StoredBatch) -> Path:
        return self._folder(batch.owner, "batches", batch.id)

    def _write_batch(self, folder: Path, batch: StoredBatch) -> None:
        replace_own(folder / "batch.json", lambda file: file.write(msgspec.json.encode(batch)))

    def save_batch(self, batch: StoredBatch) -> None:
        """Writes what has changed. Raises OSError."""
        self._write_batch(self.batch_folder(batch), batch)
        if batch.has_ended:
            self._leave_queue(batch)

    def _leave_queue(self, batch: StoredBatch) -> None:
        (self.root / "queue" / f"{batch.owner}.{batch.id}").unlink(missing_ok=True)

    def batch(self, owner: str, id: str, kind: Kind) -> StoredBatch | None:
        if not ID.fullmatch(id):
            return None
        found = self._read(self._folder(owner, "batches", id) / "batch.json", StoredBatch)
        return found if found is not None and found.kind == kind else None

    def batches(self, owner: str, kind: Kind) -> Iterator[StoredBatch]:
        """Yields the batches of an owner, the newest first."""
        for id in sorted(self._ids(owner, "batches"), reverse=True):
            if (found := self.batch(owner, id, kind)) is not None:
                yield found

    def request_cancel(self, batch: StoredBatch) -> None:
        flags = os.O_WRONLY | os.O_CREAT
        with contextlib.suppress(FileNotFoundError):  # it has been deleted
            os.close(open_own(self.batch_folder(batch) / "cancel", flags))

    def cancel_requested(self, batch: StoredBatch) -> int | None:
        """Returns the time at which somebody has asked to cancel the batch, if so."""
        try:
            return int(os.stat(self.batch_folder(batch) / "cancel").st_mtime)
        except FileNotFoundError:
            return None

    def delete_batch(self, batch: StoredBatch) -> None:
        self._leave_queue(batch)
        self._remove(self.batch_folder(batch))

    def unfinished(self) -> Iterator[tuple[str, str]]:
        """Yields owner and id of each batch that has not ended, the oldest first."""
        with contextlib.suppress(FileNotFoundError):
            names = [name.partition(".") for name in os.listdir(self.root / "queue")]
            yield from sorted(
                ((owner, id) for owner, _, id in names if ID.fullmatch(id)),
                key=lambda name: name[1].rpartition("_")[2],
            )

    # ------------------------------------------------------------ what is removed

    def sweep(self) -> None:
        """Removes what has expired, what is left of uploads that were cut off, and batches that
        ended long ago.
        """
        now = self.now()
        for owner in self._owners():
            for kind in ("files", "batches"):
                with contextlib.suppress(FileNotFoundError):
                    for folder in (self.root / owner / kind).iterdir():
                        if self._is_over(folder, now):
                            self._remove(folder)

    def _is_over(self, folder: Path, now: float) -> bool:
        with contextlib.suppress(FileNotFoundError):
            if folder.name.endswith(WRITING):
                if folder.stat().st_mtime < now - STALE_S:
                    shutil.rmtree(folder, ignore_errors=True)
                return False
            if folder.parent.name == "files":
                file = self._read(folder / "file.json", StoredFile)
                return file is not None and file.expires_at is not None and file.expires_at <= now
            batch = self._read(folder / "batch.json", StoredBatch)
            if batch is not None and batch.has_ended:
                return max(batch.times.values(), default=batch.created_at) < now - KEEP_S
        return False


def make_private(folder: Path) -> None:
    """Makes a folder that only this user may look into, and those above it that do not exist.

    Raises OSError, also if it exists.
    """
    if not folder.parent.is_dir():
        with contextlib.suppress(FileExistsError):  # another process has been faster
            make_private(folder.parent)
    folder.mkdir(mode=0o700)


class Upload:
    """A file that arrives in pieces. It exists when `finish` has returned."""

    def __init__(self, store: Store, owner: str, id: str, room: int):
        self.num_bytes = 0
        self._store = store
        self._id = id
        self._room = room
        self._folder = store.content(owner, id).parent
        self._writing = self._folder.with_name(id + WRITING)
        make_private(self._writing)
        content = open_own(self._writing / "content", os.O_WRONLY | os.O_CREAT)
        self._file = open(content, "wb")

    def write(self, data: Any) -> None:
        """Raises FullError beyond what the store has left, and OSError."""
        self.num_bytes += len(data)
        if self.num_bytes > self._room:
            most = self._store.max_bytes
            raise FullError(f"the files of this server may have {most} bytes together")
        self._file.write(data)

    def finish(self, filename: str, purpose: str, expires_s: int | None) -> StoredFile:
        """Raises OSError."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        created = int(self._store.now())
        info = StoredFile(
            id=self._id,
            bytes=self.num_bytes,
            created_at=created,
            expires_at=None if expires_s is None else created + expires_s,
            filename=filename,
            purpose=purpose,
        )
        data = msgspec.json.encode(info)
        replace_own(self._writing / "file.json", lambda file: file.write(data))
        self._writing.rename(self._folder)
        return info

    def discard(self) -> None:
        """Removes what is not finished. Does nothing after `finish`."""
        with contextlib.suppress(OSError):
            self._file.close()
        shutil.rmtree(self._writing, ignore_errors=True)
