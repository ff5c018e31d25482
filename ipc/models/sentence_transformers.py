"""Reads a model's directory as sentence-transformers writes it: modules.json, the modules' folders
and the configuration files beside them.

Must not know: tensors' values, torch, architectures, what a user has changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from ..errors import ModelLoadError
from ..json_files import read_json, read_json_if_exists, read_json_list
from .pooling import Dense, Pooling, PoolingMode

MODULES_FILE = "modules.json"
MODES: tuple[str, ...] = get_args(PoolingMode)
_FLAGS = {  # of the older form of 1_Pooling/config.json
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = {  # the class of torch.nn -> the name in executor/pooling/heads.py
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
SIMILARITIES = ("cosine", "dot")
MOST_FEATURES = 2**20
LONGEST = 10**9  # tokenizers without a limit say 10**30


def has_modules(directory: Path) -> bool:
    return directory.is_dir() and (directory / MODULES_FILE).exists()


def read_modules(directory: Path, hf_config: dict[str, Any]) -> Pooling:
    """How the model pools. Its modules are Transformer, Pooling, any number of Dense and Normalize,
    in this order.

    Raises ModelLoadError, naming file and module or key, for others.
    """
    path = directory / MODULES_FILE
    modules = read_json_list(path)
    kinds: list[str] = []
    changes: dict[str, Any] = {"activation": "identity"}
    dense: list[Dense] = []
    for module in modules:
        kind, folder = _kind(path, module)
        before = kinds[-1] if kinds else ""
        allowed = {
            "Transformer": ("",),
            "Pooling": ("Transformer",),
            "Dense": ("Pooling", "Dense"),
            "Normalize": ("Pooling", "Dense"),
        }
        if kind not in allowed:
            raise ModelLoadError(
                f"{path}: module {kind} is not supported; supported: {', '.join(allowed)}"
            )
        if before not in allowed[kind]:
            raise ModelLoadError(
                f"{path}: module {kind} behind {before or 'nothing'} is not supported; the order "
                f"is Transformer, Pooling, Dense, Normalize"
            )
        if kind == "Transformer" and folder:
            raise ModelLoadError(f"{path}: a Transformer in folder {folder!r:.60} is not supported")
        if kind == "Pooling":
            changes |= _read_pooling(directory / folder / "config.json")
        elif kind == "Dense":
            dense.append(_read_dense(directory, folder))
        elif kind == "Normalize":
            changes["activation"] = "normalize"
        kinds.append(kind)
    if "Pooling" not in kinds:
        raise ModelLoadError(f"{path}: there is no module Pooling")
    changes |= _read_texts(directory) | {"dense": tuple(dense)}
    changes |= read_matryoshka(hf_config)
    return Pooling(**changes)


def _kind(path: Path, module: Any) -> tuple[str, str]:
    """The class of a module, without its package, and its folder."""
    kind, folder = (module.get(k) if isinstance(module, dict) else None for k in ("type", "path"))
    if not isinstance(kind, str) or not isinstance(folder, str):
        raise ModelLoadError(f"{path}: a module must have a type and a path, got {module!r:.100}")
    # a folder must not lead out of the model's
    if Path(folder).is_absolute() or ".." in Path(folder).parts:
        raise ModelLoadError(f"{path}: {folder!r:.100} is not a folder of the model")
    if not kind.startswith("sentence_transformers."):
        raise ModelLoadError(
            f"{path}: module {kind:.100} is not one of sentence_transformers; no code of models is "
            f"run"
        )
    return kind.rpartition(".")[2], folder


def _read_pooling(path: Path) -> dict[str, Any]:
    config = read_json(path)
    mode = config.get("pooling_mode")
    if mode is None:
        flags = {key: config.get(key) for key in config if key.startswith("pooling_mode_")}
        if unknown := [key for key, on in flags.items() if on and key not in _FLAGS]:
            raise ModelLoadError(f"{path}: {', '.join(unknown)} is not supported")
        modes = [name for key, name in _FLAGS.items() if flags.get(key)]
        # a file without flags means the class's default
        modes = modes or ([] if flags else ["mean"])
    else:
        modes = [mode] if isinstance(mode, str) else mode
    if not isinstance(modes, list) or not modes or any(name not in MODES for name in modes):
        raise ModelLoadError(
            f"{path}: pooling_mode must be one or several of {', '.join(MODES)}, got {mode!r:.100}"
        )
    include_prompt = config.get("include_prompt", True)
    if not isinstance(include_prompt, bool):
        raise ModelLoadError(f"{path}: include_prompt must be true or false")
    return {"modes": tuple(modes), "include_prompt": include_prompt}


def _read_dense(directory: Path, folder: str) -> Dense:
    path = directory / folder / "config.json"
    config = read_json(path)
    for key, neutral in (
        ("module_input_name", "sentence_embedding"),
        ("module_output_name", "sentence_embedding"),
        ("use_residual", False),
    ):
        if config.get(key) not in (None, neutral):
            raise ModelLoadError(f"{path}: {key}={config[key]!r:.60} is not supported")
    sizes: list[Any] = [config.get(key) for key in ("in_features", "out_features")]
    if not all(type(size) is int and 1 <= size <= MOST_FEATURES for size in sizes):
        raise ModelLoadError(
            f"{path}: in_features and out_features must be integers from 1 to {MOST_FEATURES:,}, "
            f"got {sizes!r:.100}"
        )
    return Dense(
        folder=folder,
        in_features=sizes[0],
        out_features=sizes[1],
        has_bias=bool(config.get("bias", True)),
        activation=activation_named(
            config.get("activation_function", "torch.nn.modules.activation.Tanh"), str(path)
        ),
    )


def activation_named(name: Any, where: str) -> str:
    """ "torch.nn.modules.activation.Tanh" -> "tanh". Raises ModelLoadError for another class."""
    last = name.rpartition(".")[2] if isinstance(name, str) else ""
    if last not in ACTIVATIONS or not name.startswith("torch.nn."):
        raise ModelLoadError(
            f"{where}: activation {name!r:.100} is not supported; supported: torch.nn's "
            f"{', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[last]


def _read_texts(directory: Path) -> dict[str, Any]:
    """Prompts, similarity, and how texts are truncated and written."""
    path = directory / "config_sentence_transformers.json"
    config = read_json_if_exists(path)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    texts = prompts.values() if isinstance(prompts, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ModelLoadError(f"{path}: prompts must be an object of texts by name")
    if default is not None and default not in prompts:
        raise ModelLoadError(f"{path}: default_prompt_name={default!r:.60} is not one of prompts")
    similarity = config.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise ModelLoadError(
            f"{path}: similarity_fn_name={similarity!r:.60} is not supported; supported: "
            f"{', '.join(SIMILARITIES)}"
        )
    own_path = directory / "sentence_bert_config.json"
    own = read_json_if_exists(own_path)
    limits = [own.get("max_seq_length"), longest_of_tokenizer(directory)]
    length = next((limit for limit in limits if limit is not None), None)
    if length is not None and (type(length) is not int or length < 1):
        raise ModelLoadError(
            f"{own_path}: max_seq_length must be a positive integer, got {length!r:.60}"
        )
    return {
        "prompts": prompts,
        "default_prompt_name": default,
        "similarity": similarity,
        "max_seq_length": length,
        "do_lower_case": bool(own.get("do_lower_case", False)),
    }


def longest_of_tokenizer(directory: Path) -> int | None:
    """model_max_length of tokenizer_config.json, if it is a limit."""
    limit = read_json_if_exists(directory / "tokenizer_config.json").get("model_max_length")
    is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
    return int(limit) if limit is not None and is_number and 1 <= limit < LONGEST else None


def read_matryoshka(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The lengths that embeddings may be shortened to, from config.json."""
    allowed = hf_config.get("matryoshka_dimensions") or []
    if not isinstance(allowed, list) or not all(type(n) is int and n > 0 for n in allowed):
        raise ModelLoadError(
            f"config.json: matryoshka_dimensions must be a list of positive integers, got "
            f"{allowed!r:.100}"
        )
    is_any = bool(hf_config.get("is_matryoshka")) and not allowed
    return {"matryoshka_dimensions": tuple(sorted(allowed)), "is_matryoshka": is_any}
