"""The headers of GGUF files on the hub, so that `quire plan` and `quire doctor` need not download a
model to describe it.

Must not know: what is in a header, plans, findings.
"""

from __future__ import annotations

import tempfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ...ipc.errors import ModelLoadError
from ...ipc.models.gguf import GGUFFile, part_names, read_gguf
from ...ipc.models.gguf_weights import ROPE_FACTORS
from ..engine_args import EngineArgs
from . import gguf_names
from .model_files import find_cached_directory, find_model_directory
from .model_pull import CHUNK_BYTES, DownloadError, explained, hub_stream

FIRST_BYTES = 2 * 2**20
MOST_BYTES = 64 * 2**20  # far above the header of any model

# The folders of this process, each with what removes it at exit.
_folders: dict[Path, tempfile.TemporaryDirectory[str]] = {}


def find_description(args: EngineArgs) -> Path:
    """Returns the directory or GGUF file that describes the model. For a GGUF file that is on the
    hub and not in the cache, it is a file in a temporary folder with the header alone, as long as
    the whole file and empty behind the header.

    Raises ModelLoadError, and DownloadError if the hub does not answer.
    """
    found = find_cached_directory(args.model, args.revision, args.download_dir)
    if found is not None:
        return found
    wanted = gguf_names.parse_hub_name(args.model)
    if wanted is None or Path(args.model).expanduser().exists():
        return find_model_directory(
            args.model, revision=args.revision, weights=False, download_dir=args.download_dir
        )
    return _fetch(args.model, wanted, args.revision, args.download_dir)


def is_header_only(path: Path) -> bool:
    return path.parent in _folders


def _fetch(
    model: str, wanted: gguf_names.HubFile, revision: str | None, download_dir: str | None
) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    with explained(model, wanted.repository, revision):
        names = HfApi().list_repo_files(wanted.repository, revision=revision)
        chosen = PurePosixPath(gguf_names.choose(names, wanted))
        small = [
            Path(hf_hub_download(wanted.repository, n, revision=revision, cache_dir=download_dir))
            for n in names
            if PurePosixPath(n).parent == chosen.parent and n.endswith((".json", ".jinja"))
        ]
    temporary = tempfile.TemporaryDirectory(prefix="quire-header-")
    folder = Path(temporary.name).resolve()
    _folders[folder] = temporary
    for path in small:
        (folder / path.name).symlink_to(path)
    parts = part_names(chosen.name)
    source = _Source(model, wanted.repository, revision)
    num_bytes = FIRST_BYTES
    while True:
        for part in parts:
            source.receive(str(chosen.with_name(part)), folder / part, 0, num_bytes)
        try:
            file = read_gguf(folder / parts[0])
            # a truncated header may read as another one
            if all(min(_offsets(file, path), default=0) <= num_bytes for path in file.paths):
                break
        except ModelLoadError:
            if num_bytes >= MOST_BYTES:
                raise
        num_bytes *= 4
    if (factors := file.tensors.get(ROPE_FACTORS)) is not None:  # a part of the configuration
        name = str(chosen.with_name(factors.path.name))
        source.receive(name, factors.path, factors.offset, factors.num_bytes)
    return folder / parts[0]


def _offsets(file: GGUFFile, path: Path) -> list[int]:
    return [tensor.offset for tensor in file.tensors.values() if tensor.path == path]


class _Source(NamedTuple):
    model: str
    repository: str
    revision: str | None

    def receive(self, name: str, path: Path, start: int, num_bytes: int) -> None:
        """Writes these bytes of the hub's file to their place in `path`, which is as long."""
        byte_range = f"{start}-{start + num_bytes - 1}"
        with (
            explained(self.model, self.repository, self.revision),
            hub_stream(self.repository, name, self.revision, byte_range) as response,
        ):
            is_part = response.status_code == 206
            if start and not is_part:
                raise DownloadError(f"model {self.model!r}: the hub ignores ranges of {name}")
            total = int(
                response.headers["Content-Range"].rpartition("/")[2]
                if is_part
                else response.headers["Content-Length"]
            )
            with path.open("r+b" if path.exists() else "wb") as file:
                file.seek(start)
                for chunk in response.iter_bytes(CHUNK_BYTES):
                    file.write(chunk[: start + num_bytes - file.tell()])
                    if file.tell() == start + num_bytes:
                        break
                file.truncate(total)
