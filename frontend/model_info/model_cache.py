"""The content of the hub cache on this machine: models, their sizes, whether Quire supports them,
and which files are missing.

Must not know: the network, torch, how a list is shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from ...ipc.errors import ModelLoadError, QuireError
from ...ipc.models.checkpoint import missing_weight_files
from ...ipc.models.gguf import is_gguf, part_names
from ..engine_args import EngineArgs
from .gguf_names import first_parts, quantization_of
from .model_files import BUNDLED, find_model_directory, read_hf_config
from .model_sizes import measure_model
from .plan import Plan, make_plan
from .weight_labels import weight_labels

SHORT_CONTEXT = 4096


class CachedModel(msgspec.Struct, frozen=True, kw_only=True):
    model: str  # as passed to --model
    revision: str  # branches and tags of this commit, or the commit
    directory: str
    size_bytes: int
    weights: str | None  # type of the saved numbers: BF16, AWQ INT4, Q4_K_M
    architecture: str | None
    num_parameters: int | None  # None if the architecture is not supported
    problems: list[str]  # reasons why it cannot run; empty: ready, if it fits
    # memory for weights, engine and one request of SHORT_CONTEXT tokens; None with problems
    needs_bytes: int | None = None
    fits: bool | None = None  # whether it runs in the memory that is free now, with `flags`
    flags: list[str] = []  # flags that `quire serve` needs so that it fits


def list_models() -> tuple[list[CachedModel], list[str]]:
    """Returns the bundled model and every model snapshot in the cache, and the problems of the
    cache itself.
    """
    bundled = find_model_directory(BUNDLED)
    models = [
        describe_cached(
            BUNDLED,
            "",
            bundled,
            sum(path.stat().st_size for path in bundled.iterdir() if path.is_file()),
        )
    ]
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return models, []
    for repository in sorted(cache.repos, key=lambda repository: repository.repo_id.lower()):
        if repository.repo_type != "model":
            continue
        num_partial = len(list((repository.repo_path / "blobs").glob("*.incomplete")))
        partial = (
            [f"{num_partial} interrupted download{'s' * (num_partial > 1)}"] if num_partial else []
        )
        for revision in sorted(repository.revisions, key=lambda revision: -revision.last_modified):
            name = ", ".join(sorted(revision.refs)) or revision.commit_hash[:12]
            files = _gguf_files(revision.snapshot_path)
            for model_name, path in files:
                sizes = [path.with_name(part) for part in part_names(path.name)]
                num_bytes = sum(part.stat().st_size for part in sizes if part.is_file())
                model = f"{repository.repo_id}{model_name}"
                models.append(describe_cached(model, name, path, num_bytes, partial))
            if files and not any(revision.snapshot_path.glob("*.safetensors")):
                continue
            models.append(
                describe_cached(
                    repository.repo_id, name, revision.snapshot_path, revision.size_on_disk, partial
                )
            )
    return models, [str(warning).splitlines()[0] for warning in cache.warnings]


def _gguf_files(snapshot: Path) -> list[tuple[str, Path]]:
    """Returns what follows the repository's name to name a GGUF file (":Q4_K_M"), and its path."""
    names = first_parts(p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*.gguf"))
    labels = [quantization_of(name) for name in names]
    return [
        (f":{label}" if label and labels.count(label) == 1 else f"/{name}", snapshot / name)
        for name, label in zip(names, labels)
    ]


def describe_cached(
    model: str, revision: str, directory: Path, size_bytes: int, problems: Iterable[str] = ()
) -> CachedModel:
    problems, hf_config, numbers, sizes = list(problems), {}, None, None
    try:
        hf_config = read_hf_config(directory, {})
        numbers = weight_labels(directory, hf_config).numbers
        sizes = measure_model(hf_config, directory)
    except ModelLoadError as error:
        problems.append(short_reason(error, directory))
    try:
        if missing := missing_weight_files(directory):
            problems.append(
                f"no {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            )
    except ModelLoadError as error:
        problems.append(short_reason(error, directory))
    if not is_gguf(directory) and not (directory / "tokenizer.json").is_file():
        problems.append("no tokenizer.json")
    plan = None
    if not problems:
        try:
            plan = make_plan(EngineArgs(str(directory)))
        except QuireError as error:
            problems.append(short_reason(error, directory))
    architectures = hf_config.get("architectures")
    return CachedModel(
        model=model,
        revision=revision,
        directory=str(directory),
        size_bytes=size_bytes,
        weights=numbers,
        architecture=sizes.architecture
        if sizes
        else _text(architectures[0])
        if isinstance(architectures, list) and architectures
        else None,
        num_parameters=sizes.num_parameters if sizes else None,
        problems=problems,
        **_memory(plan) if plan is not None else {},
    )


def _memory(plan: Plan) -> dict[str, Any]:
    """Returns the fields of a CachedModel that come from its memory plan."""
    short = msgspec.structs.replace(plan, max_model_len=min(plan.max_model_len, SHORT_CONTEXT))
    return {
        "needs_bytes": short.least_memory_bytes,
        "fits": bool(plan.longest_context or plan.fits_as),
        "flags": plan.flags,
    }


def short_reason(error: Exception, directory: Path) -> str:
    """Returns the problem without the path, which the row already shows."""
    text = str(error).replace(f"{directory} has no ", "no ").replace(f"{directory}: ", "")
    text = text.replace(f"{directory}/", "")
    return text.partition("; supported:")[0]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
