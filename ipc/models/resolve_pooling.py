"""Decides what a model does, generate or pool, and how it pools: from its files, its architecture
and what the user changes.

Must not know: tensors' values, torch, requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..errors import InvalidParameterError, ModelLoadError
from ..json_files import read_json
from .architectures import ENCODERS, NATIVE
from .decoder_config import is_bidirectional
from .encoder_config import EncoderConfig
from .encoders import is_fallback_encoder, parse_fallback_encoder
from .fallback_architectures import QUIRE, choose_implementation
from .forms import CLASSIFY, CLASSIFY_TOKENS, EMBED, GENERATE, form_of, in_form, label_names
from .pooling import STORED_POOLING, PoolerConfig, Pooling
from .sentence_transformers import activation_named, has_modules, read_matryoshka, read_modules

_MODES = {"CLS": "cls", "LAST": "lasttoken", "MEAN": "mean"}
_STORED_MODES: dict[Any, str | None] = {None: None, 0: None, 1: "mean", 2: "cls", 3: "lasttoken"}
_PROBLEMS = {  # problem_type of config.json -> activation
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


class Resolved(NamedTuple):
    runner: str  # "generate" or "pooling"
    convert: str  # "none", "embed" or "classify"
    pooling: Pooling
    hf_config: dict[str, Any]  # with the architecture in the form that runs


def resolve_pooling(
    directory: Path,
    hf_config: dict[str, Any],
    runner: str = "auto",
    convert: str = "auto",
    config: PoolerConfig | None = None,
    model_impl: str = "auto",
) -> Resolved:
    """directory: of the model's files, or the path of a GGUF file.

    runner="auto" pools where there is a modules.json, where a GGUF file names a pooling type, and
    where the architecture is an encoder's or a classifier's. Raises InvalidParameterError for what
    the model cannot do, ModelLoadError for files that cannot be read.
    """
    name = _native_name(hf_config, model_impl)
    form, is_encoder = form_of(hf_config), encoder_config(hf_config, model_impl) is not None
    has_files, stored = has_modules(directory), _stored_mode(hf_config)
    is_headless = name is not None and form != GENERATE
    must_pool = is_encoder or is_headless or is_bidirectional(hf_config)
    if runner == "auto":
        says_so = has_files or stored is not None or convert != "auto"
        runner = "pooling" if must_pool or says_so else "generate"
    if runner == "generate":
        _check_generates(must_pool, convert)
        pooling = _with_size(Pooling(), hf_config)
        return Resolved(runner, "none", _changed(pooling, config), hf_config)
    convert, hf_config = _converted(hf_config, convert, model_impl)
    form = form_of(hf_config)
    if form in (CLASSIFY, CLASSIFY_TOKENS):
        hf_config = _with_score_tokens(directory, hf_config)
        pooling = _classifier(hf_config, form, name)
    elif has_files:
        pooling = read_modules(directory, hf_config)
    else:
        own = "mean" if is_encoder or is_bidirectional(hf_config) else "lasttoken"
        modes = (stored or own,)
        pooling = Pooling(modes=modes, **read_matryoshka(hf_config))  # type: ignore[arg-type]
    pooling = _with_size(pooling, hf_config)
    parsed = encoder_config(hf_config, model_impl)
    if parsed is None and name is not None:
        parsed = NATIVE[name].parse(hf_config)
    if parsed is not None:
        pooling = msgspec.structs.replace(
            _with_size(pooling, {"hidden_size": parsed.hidden_size}),
            is_bidirectional=parsed.is_bidirectional,
            has_token_types=isinstance(parsed, EncoderConfig) and parsed.has_pair_types,
        )
    return Resolved(runner, convert, _changed(pooling, config), hf_config)


def _converted(
    hf_config: dict[str, Any], convert: str, model_impl: str
) -> tuple[str, dict[str, Any]]:
    """`convert` of a model that pools, resolved, and hf_config with the architecture in that
    form.
    """
    form = form_of(hf_config)
    if convert == "auto":
        convert = "embed" if form == GENERATE else "none"
    if convert == "none":
        if form == GENERATE:
            raise InvalidParameterError(
                "convert", "must be embed or classify for a model that generates text, got none"
            )
        return convert, hf_config
    wanted = {"embed": EMBED, "classify": CLASSIFY}[convert]
    converted = in_form(hf_config, wanted)
    if _native_name(converted, model_impl):
        return convert, converted
    if wanted == CLASSIFY or form != GENERATE:
        raise InvalidParameterError(
            "convert", f"{convert} is not supported for a model in transformers' code"
        )
    return convert, hf_config


def _stored_mode(hf_config: Mapping[str, Any]) -> str | None:
    """The mode that a GGUF file names, if any."""
    number = hf_config.get(STORED_POOLING)
    if type(number) not in (int, type(None)) or number not in _STORED_MODES:
        raise ModelLoadError(
            f"pooling_type={number!r:.20} of the GGUF file is not supported; supported: 0 (none), "
            f"1 (mean), 2 (cls), 3 (last)"
        )
    return _STORED_MODES[number]


def _with_size(pooling: Pooling, hf_config: Mapping[str, Any]) -> Pooling:
    """Adds the length of an embedding, as far as config.json has it under this name."""
    hidden = hf_config.get("hidden_size")
    size = hidden * len(pooling.modes) if isinstance(hidden, int) else 0
    size = pooling.dense[-1].out_features if pooling.dense else size
    return msgspec.structs.replace(pooling, embedding_size=size)


def _native_name(hf_config: dict[str, Any], model_impl: str) -> str | None:
    """The architecture of the tables; None of a model in transformers' code or a registered one."""
    try:
        implementation, name = choose_implementation(hf_config, model_impl)
    except ModelLoadError:
        return None
    return name if implementation == QUIRE else None


def encoder_config(hf_config: dict[str, Any], model_impl: str = "auto") -> EncoderConfig | None:
    """The configuration of a text encoder; None for other models."""
    name = _native_name(hf_config, model_impl)
    if name in ENCODERS:
        return ENCODERS[name].parse(hf_config)
    if name is None and model_impl != QUIRE and is_fallback_encoder(hf_config):
        return parse_fallback_encoder(hf_config)
    return None


def positions_of(hf_config: dict[str, Any]) -> int | None:
    """The longest text of an encoder, in tokens; None of other models."""
    config = encoder_config(hf_config)
    return None if config is None else config.max_position_embeddings


def _check_generates(must_pool: bool, convert: str) -> None:
    if must_pool:
        raise InvalidParameterError(
            "runner", "must be pooling: the model generates no text, got generate"
        )
    if convert not in ("auto", "none"):
        raise InvalidParameterError(
            "convert", f"must be none with runner=generate, got {convert}; set runner=pooling"
        )


def _changed(pooling: Pooling, config: PoolerConfig | None) -> Pooling:
    """Applies what the user changes."""
    if config is None:
        return pooling
    changes: dict[str, Any] = {}
    if config.task is not None:
        if config.task not in pooling.tasks:
            raise InvalidParameterError(
                "pooler_config",
                f"task must be one of {', '.join(pooling.tasks)} for this model, got {config.task}",
            )
        others = tuple(task for task in pooling.tasks if task != config.task)
        changes["tasks"] = (config.task, *others)
    if (kind := config.seq_pooling_type or config.pooling_type) is not None:
        changes["modes"] = (_MODES[kind],)
        if not pooling.dense:
            changes["embedding_size"] = pooling.embedding_size // len(pooling.modes)
    if config.use_activation is not None:
        default = "normalize" if "embed" in pooling.tasks else pooling.activation
        changes["activation"] = default if config.use_activation else "identity"
    if config.dimensions is not None:
        check_dimensions(config.dimensions, pooling)
        changes["dimensions"] = config.dimensions
    if config.logit_mean is not None:
        changes["logit_mean"] = config.logit_mean
    if config.logit_sigma is not None:
        changes["logit_sigma"] = config.logit_sigma
    return msgspec.structs.replace(pooling, **changes)


def check_dimensions(dimensions: int, pooling: Pooling) -> None:
    """Raises InvalidParameterError unless embeddings may be shortened to `dimensions`."""
    allowed, size = pooling.matryoshka_dimensions, pooling.embedding_size
    if size and dimensions > size:
        raise InvalidParameterError("dimensions", f"must be at most {size}, got {dimensions}")
    if dimensions in allowed or (pooling.is_matryoshka and not allowed):
        return
    if allowed:
        raise InvalidParameterError(
            "dimensions", f"must be one of {', '.join(map(str, allowed))}, got {dimensions}"
        )
    raise InvalidParameterError(
        "dimensions",
        "must be left out: the model was not trained for shorter embeddings (its config.json has "
        "neither matryoshka_dimensions nor is_matryoshka)",
    )


def _classifier(hf_config: dict[str, Any], form: str, name: str | None) -> Pooling:
    labels = label_names(hf_config)
    if hf_config.get("score_token_ids"):
        labels = labels[:1]
    modes = ("cls",) if name in ENCODERS else ("lasttoken",)
    if name == "ModernBertModel" and hf_config.get("classifier_pooling") == "mean":
        modes = ("mean",)
    return Pooling(
        tasks=("classify",) if form == CLASSIFY else ("token_classify",),
        modes=modes,  # type: ignore[arg-type]
        activation=_class_activation(hf_config, len(labels)),  # type: ignore[arg-type]
        num_labels=len(labels),
        labels=labels,
    )


def _class_activation(hf_config: Mapping[str, Any], num_labels: int) -> str:
    """What makes scores or probabilities of a classifier's logits: as sentence-transformers' files
    say, or problem_type; else sigmoid for one class and softmax for several.
    """
    own = hf_config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or hf_config.get("sbert_ce_default_activation_function")
    if named is not None:
        activation = activation_named(named, "config.json")
        if activation not in ("identity", "sigmoid"):
            raise ModelLoadError(f"config.json: activation {named!r:.100} is not supported")
        return activation
    problem = hf_config.get("problem_type")
    if problem is not None and problem not in _PROBLEMS:
        raise ModelLoadError(
            f"config.json: problem_type={problem!r:.60} is not supported; supported: "
            f"{', '.join(_PROBLEMS)}"
        )
    return _PROBLEMS[problem] if problem else "sigmoid" if num_labels == 1 else "softmax"


def _with_score_tokens(directory: Path, hf_config: dict[str, Any]) -> dict[str, Any]:
    """hf_config with the ids of classifier_from_token, if it has that key.

    The tokens are (no, yes), whose logits' difference is the class's logit: sigmoid of it is the
    softmax of both. A single token's logit is the class's with method=no_post_processing.
    """
    tokens = hf_config.get("classifier_from_token")
    if tokens is None:
        return hf_config
    two = hf_config.get("method") == "from_2_way_softmax"
    two = two or bool(hf_config.get("is_original_qwen3_reranker"))
    count = 2 if two else 1
    is_list = isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)
    if not is_list or len(tokens) != count:
        raise ModelLoadError(
            f"classifier_from_token must be a list of {count} tokens, (no, yes) with "
            f"is_original_qwen3_reranker or method=from_2_way_softmax, got {tokens!r:.100}"
        )
    vocabulary = _vocabulary(directory / "tokenizer.json")
    if missing := [token for token in tokens if token not in vocabulary]:
        raise ModelLoadError(
            f"classifier_from_token: the tokenizer has no token {missing[0]!r:.60}"
        )
    return hf_config | {"score_token_ids": [vocabulary[token] for token in tokens]}


def _vocabulary(path: Path) -> dict[str, int]:
    file = read_json(path)
    model = file.get("model")
    known = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(known, list):  # with a score for each
        known = {entry[0]: i for i, entry in enumerate(known)}
    vocabulary = dict(known or {})
    for token in file.get("added_tokens") or []:
        vocabulary[token.get("content")] = token.get("id")
    return vocabulary
