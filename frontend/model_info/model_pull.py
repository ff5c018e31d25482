"""Downloads a model into the hub cache. It takes only the files that Quire reads, resumes where an
earlier download ended, and compares each file with the hub's checksum.

Must not know: what is in the files, how progress is shown.

The hub client (2.x) discards a partial file when its process ends, so the bytes are received here,
into `blobs/<checksum>.incomplete`. The client then finds the blobs and links them, as after a
download of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

import msgspec

from ...ipc.errors import ModelLoadError, QuireError
from ...ipc.models.gguf import part_names
from . import gguf_names
from .gguf_names import BESIDE, HubFile, first_line
from .model_files import (
    CONFIG_PATTERNS,
    NOT_NEEDED,
    WEIGHT_PATTERNS,
    find_model_directory,
    refuse_address,
)

CHUNK_BYTES = 2**20
MAX_RETRIES = 3  # of a broken connection, without a byte received in between
# a broken stream is continued, not begun again; a busy hub is asked once more
_STREAM: dict[str, Any] = {"timeout": 30, "max_retries": 1, "retry_on_exceptions": ()}
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


class DownloadError(QuireError):
    """The hub, the network or the disk failed. The same command continues where it ended."""


class HubBlob(msgspec.Struct, frozen=True):
    """A file of a repository. `checksum` is the SHA-256 of a large file, and git's SHA-1 of a small
    one. It is also the name of the file in the cache.
    """

    name: str
    num_bytes: int
    checksum: str

    def matches(self, path: Path) -> bool:
        with path.open("rb") as file:
            if len(self.checksum) == 64:
                return hashlib.file_digest(file, "sha256").hexdigest() == self.checksum
            digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
            return digest.hexdigest() == self.checksum


class Wanted(msgspec.Struct, frozen=True):
    """The files that the hub has of a model, as far as Quire reads them."""

    model: str
    repository: str
    commit: str
    blobs: list[HubBlob]

    @property
    def num_bytes(self) -> int:
        return sum(blob.num_bytes for blob in self.blobs)


class PullProgress(Protocol):
    """It is called with the blob, and with each number of bytes received."""

    def begin(self, blob: HubBlob, num_bytes_there: int) -> None: ...

    def add(self, num_bytes: int) -> None: ...


def find_wanted(model: str, revision: str | None = None) -> Wanted:
    """Asks the hub for the files of `model`, a name such as org/name, org/name:Q4_K_M or
    org/name/file.gguf.

    Raises ModelLoadError for a name that the hub does not have or does not give, and DownloadError
    if it does not answer.
    """
    from huggingface_hub import HfApi

    if Path(model).expanduser().exists() or model.startswith(("/", ".", "~")):
        raise ModelLoadError(f"model {model!r} is a path; pull takes a name on the hub")
    refuse_address(model)
    on_hub = gguf_names.parse_hub_name(model)
    repository = on_hub.repository if on_hub is not None else model
    with explained(model, repository, revision):
        info = HfApi().model_info(repository, revision=revision, files_metadata=True)
    files = {file.rfilename: file for file in info.siblings or []}
    blobs = []
    for name in needed_names(repository, list(files), on_hub):
        file = files[name]
        checksum = file.lfs.sha256 if file.lfs is not None else file.blob_id
        if file.size is None or not checksum or info.sha is None:
            raise DownloadError(f"model {model!r}: the hub gave no size or checksum of {name}")
        blobs.append(HubBlob(name, file.size, checksum))
    return Wanted(model, repository, str(info.sha), blobs)


def needed_names(repository: str, names: list[str], wanted: HubFile | None) -> list[str]:
    """Returns the files that find_model_directory downloads, sorted.

    Raises ModelLoadError if the repository has no weights that Quire reads, or not those wanted.
    """
    if wanted is not None:
        file = PurePosixPath(gguf_names.choose(names, wanted))
        parts = [str(file.with_name(part)) for part in part_names(file.name)]
        if missing := sorted(set(parts) - set(names)):
            raise ModelLoadError(f"model {repository!r} has no {missing[0]}, a part of {file}")
        return sorted({*parts, *_matching(names, BESIDE)})
    weights = set(_matching(names, WEIGHT_PATTERNS, NOT_NEEDED))
    if not weights:
        gguf_names.refuse_among(repository, names)
        raise ModelLoadError(f"model {repository!r} has no *.safetensors file and no GGUF file")
    return sorted({*weights, *_matching(names, CONFIG_PATTERNS, NOT_NEEDED)})


def _matching(names: list[str], patterns: list[str], without: list[str] = []) -> list[str]:  # noqa: B006 (never changed)
    return [
        name
        for name in names
        if any(fnmatch(name, pattern) for pattern in patterns)
        and not any(fnmatch(name, pattern) for pattern in without)
    ]


def pull(
    wanted: Wanted,
    progress: PullProgress,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    verify: bool = False,
    on_damaged: Callable[[HubBlob], None] = lambda blob: None,
) -> Path:
    """Downloads what is missing and returns the model's directory or GGUF file.

    With `verify`, files that are there already are compared with the hub's checksums too. A damaged
    one is reported and downloaded again. Without it, their names and sizes are trusted.

    Raises DownloadError; partial files stay, and a later call continues them.
    """
    from huggingface_hub.utils import WeakFileLock, disable_progress_bars

    folder = _cache_folder(wanted.repository, download_dir)
    blobs_folder = folder / "blobs"
    blobs_folder.mkdir(parents=True, exist_ok=True)
    if verify:
        for blob in _present(wanted, blobs_folder):
            if not blob.matches(blobs_folder / blob.checksum):
                on_damaged(blob)
                (blobs_folder / blob.checksum).unlink()
    check_disk_space(wanted, blobs_folder)
    there = set(_present(wanted, blobs_folder))
    for blob in wanted.blobs:
        if blob in there:
            progress.begin(blob, blob.num_bytes)
            continue
        locks = folder.parent / ".locks" / folder.name
        locks.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(locks / f"{blob.checksum}.lock"):
            _receive(wanted, blob, blobs_folder, progress)
    disable_progress_bars()  # the client has nothing left to download and only links the files
    return find_model_directory(wanted.model, revision=revision, download_dir=download_dir)


def check_disk_space(wanted: Wanted, blobs_folder: Path) -> None:
    """Raises DownloadError if what is missing is larger than the free space."""
    there = set(_present(wanted, blobs_folder))
    missing = sum(
        blob.num_bytes - _size(_partial(blobs_folder, blob))
        for blob in wanted.blobs
        if blob not in there
    )
    free = shutil.disk_usage(blobs_folder).free
    if missing > free:
        raise DownloadError(
            f"model {wanted.model!r} needs {missing / 2**30:.2f} GiB more on disk, and "
            f"{blobs_folder} has {free / 2**30:.2f} GiB free; --download-dir or HF_HOME names "
            f"another disk"
        )


def _cache_folder(repository: str, download_dir: str | None) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    base = Path(download_dir or constants.HF_HUB_CACHE).expanduser()
    return base / repo_folder_name(repo_id=repository, repo_type="model")


def _present(wanted: Wanted, blobs_folder: Path) -> list[HubBlob]:
    return [b for b in wanted.blobs if _size(blobs_folder / b.checksum, -1) == b.num_bytes]


def _partial(blobs_folder: Path, blob: HubBlob) -> Path:
    return blobs_folder / f"{blob.checksum}.incomplete"


def _size(path: Path, otherwise: int = 0) -> int:
    return path.stat().st_size if path.is_file() else otherwise


def _receive(wanted: Wanted, blob: HubBlob, blobs_folder: Path, progress: PullProgress) -> None:
    """Receives what is missing of one file, checks it, and gives it its name."""
    path = _partial(blobs_folder, blob)
    with path.open("ab") as file:
        if file.tell() > blob.num_bytes:
            _empty(file)
        progress.begin(blob, file.tell())
        num_failures = 0
        while file.tell() < blob.num_bytes:
            before = file.tell()
            try:
                _receive_rest(wanted, blob, file, progress)
            except DownloadError:
                num_failures = 0 if file.tell() > before else num_failures + 1
                if num_failures == MAX_RETRIES:
                    raise
    if not blob.matches(path):
        path.unlink()
        raise DownloadError(
            f"model {wanted.model!r}: {blob.name} was received damaged: its checksum is not "
            f"{blob.checksum}, the hub's; the same command downloads it again"
        )
    path.replace(blobs_folder / blob.checksum)


def _receive_rest(wanted: Wanted, blob: HubBlob, file: BinaryIO, progress: PullProgress) -> None:
    """Appends to the file until the connection ends. Raises DownloadError if it ends early."""
    there = file.tell()
    byte_range = f"{there}-" if there else None
    with (
        explained(wanted.model, wanted.repository, None),
        hub_stream(wanted.repository, blob.name, wanted.commit, byte_range) as response,
    ):
        if there and response.status_code != 206:  # the server ignores ranges
            _empty(file)
            progress.add(-there)
        for chunk in response.iter_bytes(CHUNK_BYTES):
            file.write(chunk)
            progress.add(len(chunk))
            if file.tell() > blob.num_bytes:
                break
    if file.tell() > blob.num_bytes:
        _empty(file)
    if file.tell() < blob.num_bytes:
        raise DownloadError(
            f"model {wanted.model!r}: {blob.name} ended after {file.tell():,} of "
            f"{blob.num_bytes:,} bytes"
        )


@contextlib.contextmanager
def hub_stream(
    repository: str, name: str, revision: str | None, byte_range: str | None
) -> Iterator[Any]:
    """Yields the hub's response with a file, to be read as a stream. `byte_range` is "0-99", or
    "100-" up to the end. A response with another status than 206 has the whole file. Raises the hub
    client's errors.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    if byte_range is not None:
        headers["Range"] = f"bytes={byte_range}"
    url = hf_hub_url(repository, name, revision=revision)
    with http_stream_backoff("GET", url, headers=headers, **_STREAM) as response:
        hf_raise_for_status(response)
        yield response


def _empty(file: BinaryIO) -> None:
    file.seek(0)
    file.truncate()


@contextlib.contextmanager
def explained(model: str, repository: str, revision: str | None) -> Iterator[None]:
    """Turns the hub client's errors into one sentence that says what to do."""
    from huggingface_hub import errors

    place = f"model {model!r}"
    try:
        yield
    except errors.GatedRepoError:
        raise ModelLoadError(
            f"{place} is gated: accept its terms at https://huggingface.co/{repository}, then "
            f"{LOG_IN}"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelLoadError(
            f"{place}: the hub has no repository {repository!r} that is open to you; if it is "
            f"private, {LOG_IN}"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelLoadError(f"{place} has no revision {revision!r}") from None
    except errors.HFValidationError as error:
        raise ModelLoadError(f"{place} is not a name on the hub: {first_line(error)}") from None
    except errors.OfflineModeIsEnabled:
        raise DownloadError(
            f"{place}: the hub is not asked, because HF_HUB_OFFLINE is set"
        ) from None
    except (QuireError, KeyboardInterrupt):
        raise
    except errors.LocalEntryNotFoundError as error:  # it names what it could not do, not why
        reason = first_line(error.__cause__ or error)
        raise DownloadError(f"{place}: the hub cannot be reached: {reason}") from None
    except OSError as error:
        if isinstance(error, errors.HfHubHTTPError) or error.errno is None:
            raise DownloadError(f"{place}: the hub answered: {first_line(error)}") from None
        raise  # the disk
    except Exception as error:  # of the client's HTTP library
        raise DownloadError(f"{place}: the hub cannot be reached: {first_line(error)}") from None
