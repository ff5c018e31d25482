"""Finds a model's directory or GGUF file (bundled, local, or on the hub) and reads its
configuration and generation configuration.

Must not know: weights, torch, tokenizers, how the engine uses a configuration.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from ...ipc.errors import ModelLoadError
from ...ipc.json_files import read_json, read_json_if_exists
from ...ipc.models.gguf import is_gguf, read_gguf
from . import gguf_names

BUNDLED = "bundled"
HUB_ADDRESS = re.compile(r"(https?://)?(www\.)?(huggingface|hf)\.co/", re.IGNORECASE)
CONFIG_PATTERNS = ["*.json", "*.jinja", "additional_chat_templates/*.jinja"]
WEIGHT_PATTERNS = ["*.safetensors"]
# These are the same weights in other forms, and files of other programs. Folders of
# sentence-transformers' modules begin with a number (1_Pooling).
NOT_NEEDED = ["consolidated*.safetensors", "[!0-9]*/*.safetensors", "[!0-9]*/*.json"]
# values of `generation_config` that select the defaults of SamplingParams
NO_GENERATION_CONFIG = "none"
# A key of generation_config.json maps to a field of SamplingParams.
SAMPLING_KEYS = {
    key: key for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
} | {"max_new_tokens": "max_tokens"}

# A chat with a GGUF file that recommends nothing gets llama.cpp's defaults, which are near
# Ollama's. Such files are used with these programs, and their blocks of a few bits make rare tokens
# likelier.
GGUF_CHAT_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}


def find_model_directory(
    model: str,
    *,
    revision: str | None = None,
    weights: bool = True,
    download_dir: str | None = None,
) -> Path:
    """Returns the absolute directory of the model's files, or the path of its GGUF file. A model on
    the hub is downloaded first, into `download_dir` (default: the hub cache); a GGUF file is
    downloaded without `weights` too, because it holds the configuration.

    Raises ModelLoadError naming the model if there is neither such a directory or file nor such a
    model on the hub, or no network.
    """
    if model == BUNDLED:
        return Path(__file__).resolve().parents[1] / "bundled_model"
    path = Path(model).expanduser()
    if path.is_dir():
        return gguf_names.find_in_directory(path.resolve()) or path.resolve()
    if path.exists():
        if is_gguf(path):
            return gguf_names.find_file(path)
        raise ModelLoadError(
            f"model {model!r} is a file; a model is a GGUF file (*.gguf), or a directory that "
            f"holds config.json and *.safetensors"
        )
    refuse_address(model)
    if (on_hub := gguf_names.parse_hub_name(model)) is not None:
        return gguf_names.find_on_hub(on_hub, revision, download_dir)
    if is_gguf(path):
        raise ModelLoadError(f"model {model!r}: there is no such file")
    if _looks_like_a_path(model):
        raise ModelLoadError(f"model {model!r}: there is no such directory")
    patterns = CONFIG_PATTERNS + (WEIGHT_PATTERNS if weights else [])
    directory = _download(model, revision, patterns, download_dir)
    if not (directory / "config.json").exists():
        gguf_names.refuse_without_quantization(model, revision, directory)
    return directory


def find_cached_directory(
    model: str, revision: str | None = None, download_dir: str | None = None
) -> Path | None:
    """Returns the directory or GGUF file of a hub model in the cache, without network access. It is
    None if the model is not cached or the name is not a valid hub name.
    """
    if model == BUNDLED or Path(model).expanduser().exists():
        return None
    if (on_hub := gguf_names.parse_hub_name(model)) is not None:
        return gguf_names.find_cached(on_hub, revision, download_dir)
    if _looks_like_a_path(model):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(
            model, "config.json", cache_dir=download_dir, revision=revision
        )
    except HFValidationError:
        return None
    # not resolved: the file is a link to its blob
    return Path(found).absolute().parent if isinstance(found, str) else None


def refuse_address(model: str) -> None:
    """Raises ModelLoadError, which has the model's name, for an address of a page of the hub."""
    if (found := HUB_ADDRESS.match(model)) is not None:
        name, page = re.sub(r"/(tree|blob|resolve)/[^/]+", "", model[found.end() :]), found[0]
        raise ModelLoadError(f"model {model!r}: give the name without {page}: {name!r}")


def _looks_like_a_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.endswith("/") or model.count("/") > 1


def _download(
    model: str, revision: str | None, patterns: list[str], download_dir: str | None
) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=patterns,
            ignore_patterns=NOT_NEEDED,
        )
        return Path(found).resolve()
    except Exception as error:
        # The hub client raises its own exceptions and those of its HTTP library and the system.
        raise ModelLoadError(
            f"model {model!r}: there is no such directory, and the hub did not provide it: "
            f"{gguf_names.reason_of(error)}"
        ) from error


def read_hf_config(directory: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json, or what a GGUF file's metadata says, updated with `overrides`. Objects
    are merged key by key.

    Raises ModelLoadError for a file that read_json rejects, and for values that cannot be encoded
    in a message.
    """
    path = directory if is_gguf(directory) else directory / "config.json"
    # knows all architectures, which a help text does not need
    from ...ipc.models.architectures import text_part

    if is_gguf(path):
        from ...ipc.models.gguf_config import gguf_config

        own = gguf_config(read_gguf(path))
    else:
        own = text_part(read_json(path))
    hf_config = _merged(own, overrides)
    try:
        msgspec.msgpack.encode(hf_config)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return hf_config


def _merged(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in overrides.items():
        both_objects = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both_objects else value
    return result


def read_generation_config(directory: Path) -> dict[str, Any]:
    """Returns generation_config.json, or {} if the model has none. Beside a GGUF file it replaces
    what the file's metadata says.
    """
    if is_gguf(directory):
        beside = read_json_if_exists(directory.with_name("generation_config.json"))
        return beside or _read_gguf_generation_config(directory, directory.stat().st_mtime_ns)
    return read_json_if_exists(directory / "generation_config.json")


# a start reads it several times, and all tokens of the vocabulary each time
@lru_cache(maxsize=8)
def _read_gguf_generation_config(path: Path, mtime_ns: int) -> dict[str, Any]:
    from ...ipc.models.gguf_config import gguf_generation_config

    return gguf_generation_config(read_gguf(path))


def eos_token_ids(generation_config: dict[str, Any], hf_config: dict[str, Any]) -> list[int]:
    """Returns the end-of-sequence ids of generation_config.json, or of config.json if it has none.

    The value may be one id, a list, null, or absent.
    """
    value = generation_config.get("eos_token_id")
    if value is None:
        value = hf_config.get("eos_token_id")
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelLoadError(
            f"eos_token_id of generation_config.json or config.json must be an id or a list of "
            f"ids, not {value!r}"
        )
    return ids


def default_sampling_arguments(generation_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the recommendations of generation_config.json as arguments of SamplingParams. It uses
    the same keys as vLLM.
    """
    return {
        parameter: value
        for key, parameter in SAMPLING_KEYS.items()
        if (value := generation_config.get(key)) is not None
    }


def recommended_sampling(directory: Path) -> tuple[dict[str, Any], bool]:
    """Returns the arguments of SamplingParams that a model recommends, and whether they are
    GGUF_CHAT_SAMPLING, since its file has a chat template and recommends nothing.
    """
    arguments = default_sampling_arguments(read_generation_config(directory))
    if not is_gguf(directory) or arguments.keys() - {"max_tokens"}:
        return arguments, False
    is_chat = "tokenizer.chat_template" in read_gguf(directory).metadata
    if not is_chat and not directory.with_name("chat_template.jinja").exists():
        return arguments, False
    return GGUF_CHAT_SAMPLING | arguments, True
