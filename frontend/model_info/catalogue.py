"""Which models of a catalogue run here, in whose code, and why the others do not.

Must not know: weights, memory, torch, how a list is shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from ...ipc.errors import ModelLoadError, QuireError
from ...ipc.json_files import read_json
from ...ipc.models.architectures import NATIVE, text_part
from ...ipc.models.fallback_architectures import QUIRE, parse_model
from ...ipc.models.gguf import is_gguf, read_gguf
from ...ipc.models.gguf_weights import check_gguf_tensors
from ..engine_args import EngineArgs
from . import gguf_names
from .gguf_header import find_description
from .model_cache import short_reason
from .model_files import BUNDLED, find_cached_directory, find_model_directory, read_hf_config
from .model_pull import DownloadError, explained

NATIVELY, IN_TRANSFORMERS, NOT, UNKNOWN = "natively", "in transformers' code", "not", "unknown"
RUNS = (NATIVELY, IN_TRANSFORMERS, NOT, UNKNOWN)
NOT_HERE = "its configuration is not on this machine"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    model: str  # as given
    runs: str  # one of RUNS
    architecture: str | None = None  # as config.json names it, or as Quire found it
    model_type: str | None = None
    reason: str = ""  # the engine's, if the model does not run


def read_catalogue(text: str) -> list[str]:
    """Returns the names of a catalogue: one on each line. Lines may be empty or begin with #."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def judge(models: Iterable[str], *, downloads: bool = False) -> list[Verdict]:
    """Returns a verdict for each model. It is a config.json under any name, a directory, a GGUF
    file, or a model on the hub, of which the cache holds the configuration. With `downloads` a
    configuration that is missing there is downloaded, without anything else, as long as the hub
    answers.
    """
    verdicts = []
    for model in models:
        try:
            verdicts.append(_judge(model, downloads))
        except DownloadError as error:
            downloads = False  # each further try would take half a minute
            verdicts.append(Verdict(model=model, runs=UNKNOWN, reason=str(error)))
    return verdicts


def _judge(model: str, downloads: bool) -> Verdict:
    """Raises DownloadError if the hub does not answer."""
    try:
        path = _find(model, downloads)
    except DownloadError:
        raise
    except QuireError as error:
        return Verdict(model=model, runs=UNKNOWN, reason=str(error))
    if path is None:
        return Verdict(model=model, runs=UNKNOWN, reason=NOT_HERE)
    hf_config: dict[str, Any] = {}
    try:
        hf_config = text_part(read_json(path)) if _is_config(path) else read_hf_config(path, {})
        implementation, architecture, config = parse_model(hf_config)
        if implementation == QUIRE and is_gguf(path):
            shapes = NATIVE[architecture].weight_shapes(config)  # type: ignore[arg-type]
            check_gguf_tensors(read_gguf(path), shapes)
    except ModelLoadError as error:
        names = hf_config.get("architectures")
        return Verdict(
            model=model,
            runs=NOT,
            architecture=_text(names[0]) if isinstance(names, list) and names else None,
            model_type=_text(hf_config.get("model_type")),
            reason=short_reason(error, path),
        )
    return Verdict(
        model=model,
        runs=NATIVELY if implementation == QUIRE else IN_TRANSFORMERS,
        architecture=architecture,
        model_type=_text(hf_config.get("model_type")),
    )


def _find(model: str, downloads: bool) -> Path | None:
    """Returns the file or directory that describes the model, or None if it is not here.

    Raises ModelLoadError, and DownloadError if the hub does not answer.
    """
    path = Path(model).expanduser()
    if _is_config(path) and path.is_file():
        return path
    if model == BUNDLED or path.exists():
        return find_model_directory(model, weights=False)
    found = find_cached_directory(model)
    if found is not None or not downloads:
        return found
    if gguf_names.parse_hub_name(model) is not None:
        return find_description(EngineArgs(model))
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    with explained(model, model, None):
        try:
            return Path(hf_hub_download(model, "config.json")).parent
        except RemoteEntryNotFoundError:
            raise ModelLoadError(f"model {model!r} has no config.json on the hub") from None


def _is_config(path: Path) -> bool:
    return path.suffix == ".json"


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
