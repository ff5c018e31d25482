"""Finds the GGUF file that a name means: a file, the only one of a folder, or one of a hub
repository (repo:Q4_K_M, repo/file.gguf).

Must not know: what is in the file, torch, tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ...ipc.errors import ModelLoadError
from ...ipc.json_files import check_model_file
from ...ipc.models.gguf import part_names

# small files of a repository that override what is in the GGUF file
BESIDE = ["*.json", "*.jinja"]
_QUANTIZATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d[A-Z0-9_]*|TQ\d_\d|MXFP4[A-Z0-9_]*|NVFP4|BF16|F16|F32))"
    r"(?=[-./]|$)",
    re.IGNORECASE,
)


class HubFile(NamedTuple):
    """`file` or `quantization` is given."""

    repository: str
    file: str | None = None
    quantization: str | None = None


def parse_hub_name(model: str) -> HubFile | None:
    """Parses a name. It returns None for a name that means no GGUF file of a repository."""
    if model.startswith(("/", ".", "~")):
        return None
    if model.endswith(".gguf"):
        owner, _, rest = model.partition("/")
        name, _, file = rest.partition("/")
        return HubFile(f"{owner}/{name}", file=file) if owner and name and file else None
    repository, _, quantization = model.rpartition(":")
    if repository and quantization and "/" not in quantization and repository.count("/") <= 1:
        return HubFile(repository, quantization=quantization)
    return None


def quantization_of(name: str) -> str | None:
    """Returns UD-Q4_K_XL for org-7b-UD-Q4_K_XL-00001-of-00002.gguf."""
    found = _QUANTIZATION.findall(name.removesuffix(".gguf"))
    return found[-1].upper() if found else None


def first_parts(names: Iterable[str]) -> list[str]:
    """Returns one name for each model among these files, sorted, without projectors of images."""
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    return [
        name
        for name in ggufs
        if part_names(base := PurePosixPath(name).name)[0] == base and "mmproj" not in base.lower()
    ]


def choose(names: Iterable[str], wanted: HubFile) -> str:
    """Returns the first part of the model that is wanted, among a repository's files.

    Raises ModelLoadError, which lists what there is.
    """
    models = first_parts(names)
    place = f"model {wanted.repository!r}"
    if not models:
        raise ModelLoadError(f"{place} has no GGUF file")
    if wanted.file is not None:
        base = part_names(PurePosixPath(wanted.file).name)[0]
        file = str(PurePosixPath(wanted.file).with_name(base))
        if file not in models:
            raise ModelLoadError(f"{place} has no {file}; there are: {', '.join(models)}")
        return file
    label = (wanted.quantization or "").upper()
    found = [name for name in models if quantization_of(name) == label]
    if not found:
        labels = sorted({quantization_of(name) or name for name in models})
        raise ModelLoadError(
            f"{place} has no {wanted.quantization}; there are: {', '.join(labels)}"
        )
    if len(found) > 1:
        raise ModelLoadError(
            f"{place} has several {label}; name one of: "
            + ", ".join(f"{wanted.repository}/{name}" for name in found)
        )
    return found[0]


def find_file(path: Path) -> Path:
    """Returns the absolute path of a GGUF file, or of its first part. Links are kept: the hub's
    cache stores files under other names.
    """
    return path.parent.resolve() / part_names(path.name)[0]


def find_in_directory(directory: Path) -> Path | None:
    """Returns the model of a directory that has no safetensors files, or None if it has no GGUF
    file either.

    Raises ModelLoadError if there are several.
    """
    if any(directory.glob("*.safetensors")):
        return None
    models = first_parts(path.name for path in directory.iterdir())
    if len(models) > 1:
        raise ModelLoadError(
            f"{directory} holds several models; name one of the files: {', '.join(models)}"
        )
    if not models:
        return None
    check_model_file(directory / models[0])
    return directory / models[0]


def find_on_hub(wanted: HubFile, revision: str | None, download_dir: str | None) -> Path:
    """Returns the file in the hub's cache, downloaded first if the hub answers.

    Raises ModelLoadError naming the repository if neither the hub nor the cache has it.
    """
    from huggingface_hub import HfApi, snapshot_download

    try:
        names = HfApi().list_repo_files(wanted.repository, revision=revision)
    except Exception as error:
        # the hub client raises its own exceptions and those of its HTTP library and the system
        if (cached := find_cached(wanted, revision, download_dir)) is not None:
            return cached
        raise ModelLoadError(
            f"model {wanted.repository!r}: it is not in the cache, and the hub did not provide it: "
            f"{reason_of(error)}"
        ) from error
    file = PurePosixPath(choose(names, wanted))
    parts = [str(file.with_name(part)) for part in part_names(file.name)]
    try:
        snapshot = snapshot_download(
            wanted.repository,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=[*parts, *BESIDE],
        )
    except Exception as error:
        raise ModelLoadError(
            f"model {wanted.repository!r}: the hub did not provide {file}: {reason_of(error)}"
        ) from error
    return find_file(Path(snapshot) / file)


def refuse_without_quantization(repository: str, revision: str | None, cached: Path) -> None:
    """Raises ModelLoadError, which lists the files, if the repository holds GGUF files: on the hub,
    or in the directory `cached` if the hub does not answer.
    """
    from huggingface_hub import HfApi

    try:
        names = HfApi().list_repo_files(repository, revision=revision)
    except Exception:  # there is no network
        names = [path.relative_to(cached).as_posix() for path in cached.rglob("*.gguf")]
    refuse_among(repository, names)


def refuse_among(repository: str, names: Iterable[str]) -> None:
    """Raises ModelLoadError, which lists the models, if there are GGUF files among `names`."""
    if models := first_parts(names):
        names = sorted(
            f"{repository}:{label}" if (label := quantization_of(name)) else f"{repository}/{name}"
            for name in models
        )
        raise ModelLoadError(
            f"model {repository!r} holds GGUF files; name one of them: {', '.join(names)}"
        )


def find_cached(wanted: HubFile, revision: str | None, download_dir: str | None) -> Path | None:
    """Returns the file in the hub's cache, without network access, or None if the repository is not
    cached.

    Raises ModelLoadError, which lists what is cached, if only this file is not.
    """
    from huggingface_hub import snapshot_download

    try:
        snapshot = Path(
            snapshot_download(
                wanted.repository, revision=revision, cache_dir=download_dir, local_files_only=True
            )
        )
    except Exception as error:  # this includes a name that no repository can have
        # the client's IncompleteSnapshotError: files of the repository are missing, which is usual
        if (found := getattr(error, "snapshot_path", None)) is None:
            return None
        snapshot = Path(found)
    names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")]
    return find_file(snapshot / choose(names, wanted)) if names else None


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def reason_of(error: Exception) -> str:
    """Returns the first line of an error of the hub client."""
    return first_line(error).removeprefix("Got: ")  # so it begins where it names another error
