"""Removes models from the hub cache: a whole repository, or the files of one GGUF model.

Must not know: the network, who is asked first, how a model is listed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from ...ipc.errors import ModelLoadError
from ...ipc.models.gguf import part_names
from .gguf_names import HubFile, choose, parse_hub_name
from .model_files import BUNDLED


class Removal(msgspec.Struct, frozen=True):
    """The files that removing `model` deletes: a repository's folder, or links and the blobs behind
    them.
    """

    model: str
    paths: list[Path]
    num_bytes: int

    def run(self) -> None:
        for path in self.paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def find_removal(model: str, download_dir: str | None = None) -> Removal:
    """Finds what to delete. `download_dir` takes the place of the hub cache. Raises ModelLoadError
    for a model that is not there.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    if model == BUNDLED:
        raise ModelLoadError("model 'bundled' is a part of Quire and cannot be removed")
    wanted = parse_hub_name(model)
    repository = wanted.repository if wanted is not None else model
    cache = Path(download_dir or constants.HF_HUB_CACHE).expanduser()
    try:
        name = repo_folder_name(repo_id=repository, repo_type="model")
    except HFValidationError:
        name = ""
    folder = cache / name
    if "/" in name or not name or not folder.is_dir():
        raise ModelLoadError(f"model {model!r} is not in {cache}; `quire models` lists what is")
    if wanted is not None:
        links = _links_of(wanted, folder)
        others = _weights(folder) - links
        if others:
            shared = {link.resolve() for link in _links(folder) - links}
            blobs = {link.resolve() for link in links} - shared
            return Removal(model, sorted(links) + sorted(blobs), _num_bytes(blobs))
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    locks = cache / ".locks" / name
    return Removal(model, [folder, *([locks] if locks.is_dir() else [])], _num_bytes(files))


def _links(folder: Path) -> set[Path]:
    return {path for path in (folder / "snapshots").rglob("*") if not path.is_dir()}


def _weights(folder: Path) -> set[Path]:
    return {path for path in _links(folder) if path.suffix in (".gguf", ".safetensors")}


def _links_of(wanted: HubFile, folder: Path) -> set[Path]:
    """Returns the links of all parts, in every snapshot that has the model."""
    links, error = set(), None
    for snapshot in sorted((folder / "snapshots").glob("*")):
        names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")]
        try:
            first = snapshot / choose(names, wanted)
        except ModelLoadError as refusal:
            error = refusal
            continue
        links |= {first.with_name(part) for part in part_names(first.name)} & _links(folder)
    if not links:
        raise error or ModelLoadError(f"model {wanted.repository!r} has no files in the cache")
    return links


def _num_bytes(paths: list[Path] | set[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())
