"""Checks of a configuration and of requests before the core accepts them.

Must not know: what becomes of a request, queues, text. The frontend makes the same checks with
messages for users; these are for clients that did not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..ipc.checks import is_finite, require_owner
from ..ipc.config import EngineConfig, resolved
from ..ipc.errors import InvalidParameterError, NotEnoughMemoryError
from ..ipc.messages import EngineCoreRequest
from ..ipc.models.memory_plan import fitting_tokens
from ..ipc.params import ALL_LOGPROBS, PoolingParams, SamplingParams


def check_config(config: EngineConfig) -> None:
    """Checks what the frontend guarantees, and without which a request could wait forever."""
    _require(
        "vocab_size" in config.model_config.hf_config,
        "hf_config",
        "must hold the model's vocab_size",
    )
    scheduling, max_model_len = config.scheduler_config, config.model_config.max_model_len
    _require(
        max_model_len is not None, "max_model_len", "must be resolved by the frontend, got None"
    )
    budget = scheduling.max_num_batched_tokens
    _require(
        budget is not None, "max_num_batched_tokens", "must be resolved by the frontend, got None"
    )
    assert max_model_len is not None and budget is not None
    _require(
        scheduling.enable_chunked_prefill or budget >= max_model_len,
        "max_num_batched_tokens",
        f"must be at least max_model_len={max_model_len} without enable_chunked_prefill, got "
        f"{budget}",
    )


def check_num_blocks(config: EngineConfig, num_blocks: int, windows: Sequence[int] = (0,)) -> None:
    """Checks that one sequence of max_model_len fits the cache: otherwise it could never finish.

    `windows`: see KVLayout.
    """
    block_size = config.cache_config.block_size
    max_model_len = resolved(config.model_config.max_model_len)
    capacity = fitting_tokens(config, num_blocks, windows)
    if capacity < max_model_len:
        raise NotEnoughMemoryError(
            "max_model_len",
            f"must be at most {capacity}, the tokens that fit a KV cache of {num_blocks} "
            f"blocks of {block_size} (one is reserved), "
            f"got {max_model_len}; a larger kv_cache_memory_bytes or gpu_memory_utilization makes "
            f"room for more",
        )


def check_request(request: EngineCoreRequest, config: EngineConfig) -> None:
    """Refuses requests that the engine cannot serve.

    Raises InvalidParameterError, naming the parameter and its range.
    """
    _require(
        isinstance(request.request_id, str),
        "request_id",
        f"must be a string, got {request.request_id!r}",
    )
    params = request.params
    if isinstance(params, PoolingParams):
        _check_pooling(params, config)
    else:
        _require(
            isinstance(params, SamplingParams),
            "params",
            f"must be SamplingParams or PoolingParams, got {type(params).__name__}",
        )
        _require(
            config.model_config.runner != "pooling",
            "params",
            "must be PoolingParams: this engine runs with runner=pooling and generates no text",
        )
        _check_params(params, config)
    _check_token_ids(request, config)
    vocab_size = config.model_config.hf_config["vocab_size"]
    if request.structured_outputs is not None:
        _require(
            not request.sampling_params.ignore_eos,
            "ignore_eos",
            "must be False with structured_outputs, whose end is an end-of-sequence token",
        )
        _require(
            any(0 <= token_id < vocab_size for token_id in request.eos_token_ids),
            "structured_outputs",
            f"needs an end-of-sequence token between 0 and {vocab_size - 1}, the model's "
            f"vocabulary, to end with; got {request.eos_token_ids}",
        )
    _require(
        type(request.priority) is int, "priority", f"must be an integer, got {request.priority!r}"
    )
    _require(
        request.lora_request is None or config.lora_config.enable_lora,
        "lora_request",
        "needs an engine that was started with enable_lora",
    )
    _require(is_finite(request.deadline), "deadline", "must be a finite number")
    require_owner(request.owner, request.owner_weight)
    _require(
        request.cache_salt is None or isinstance(request.cache_salt, str),
        "cache_salt",
        "must be a string or None",
    )


def _check_pooling(params: PoolingParams, config: EngineConfig) -> None:
    pooling = config.model_config.pooling
    if pooling is None:
        raise InvalidParameterError(
            "params", "must be SamplingParams: the model generates text and cannot pool"
        )
    _require(
        params.task in pooling.tasks,
        "task",
        f"must be one of {', '.join(pooling.tasks)} for this model, got {params.task}",
    )


def _check_params(params: SamplingParams, config: EngineConfig) -> None:
    _require(params.seed is not None, "seed", "must be resolved by the frontend, got None")
    _require(
        params.max_tokens is not None, "max_tokens", "must be resolved by the frontend, got None"
    )
    vocab_size, cap = config.model_config.hf_config["vocab_size"], config.model_config.max_logprobs
    most = vocab_size if cap == ALL_LOGPROBS else min(cap, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        wanted = vocab_size if value == ALL_LOGPROBS else value or 0
        _require(
            wanted <= most,
            name,
            f"must be at most {most} (max_logprobs={cap}, a vocabulary of {vocab_size}), got "
            f"{value}",
        )
    bad_words = [token_id for token_ids in params.bad_words_token_ids for token_id in token_ids]
    _require(
        bool(bad_words) == bool(params.bad_words),
        "bad_words_token_ids",
        "must be resolved by the frontend: bad_words as token ids",
    )
    lists = (params.stop_token_ids, params.allowed_token_ids, params.logit_bias, bad_words)
    for name, token_ids in zip(
        ("stop_token_ids", "allowed_token_ids", "logit_bias", "bad_words_token_ids"),
        lists,
        strict=True,
    ):
        if token_ids:
            _check_vocabulary(name, token_ids, vocab_size)


def _check_token_ids(request: EngineCoreRequest, config: EngineConfig) -> None:
    vocab_size, max_model_len = (
        config.model_config.hf_config["vocab_size"],
        resolved(config.model_config.max_model_len),
    )
    for name in ("prompt_token_ids", "resume_tokens", "eos_token_ids"):
        token_ids = getattr(request, name)
        _require(
            isinstance(token_ids, list) and set(map(type, token_ids)) <= {int},
            name,
            "must be a list of token ids",
        )
        if token_ids and name != "eos_token_ids":  # an id that no token has ends nothing
            _check_vocabulary(name, token_ids, vocab_size)
    num_prompt_tokens, num_resumed_tokens = (
        len(request.prompt_token_ids),
        len(request.resume_tokens),
    )
    is_one = request.num_completions == 1 or not num_resumed_tokens
    _require(
        is_one,
        "resume_tokens",
        "must be empty with n > 1: each child is resumed as a request of its own",
    )
    _require(num_prompt_tokens > 0, "prompt_token_ids", "must not be empty")
    if isinstance(request.params, PoolingParams):
        _require(
            num_prompt_tokens <= max_model_len and not num_resumed_tokens,
            "prompt_token_ids",
            f"must be at most max_model_len={max_model_len} tokens, and none in resume_tokens, got "
            f"{num_prompt_tokens} and {num_resumed_tokens}",
        )
        return
    _require(
        num_prompt_tokens + num_resumed_tokens < max_model_len,
        "prompt_token_ids",
        f"must leave room for an output token in max_model_len={max_model_len}, got "
        f"{num_prompt_tokens + num_resumed_tokens} tokens",
    )
    max_tokens = resolved(request.sampling_params.max_tokens)
    _require(
        num_resumed_tokens < max_tokens,
        "resume_tokens",
        f"must be fewer than max_tokens={max_tokens}, got {num_resumed_tokens}",
    )


def _check_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Checks `token_ids`, which are not empty."""
    for extreme in (min(token_ids), max(token_ids)):
        if not 0 <= extreme < vocab_size:
            raise InvalidParameterError(
                name, f"token ids must be between 0 and {vocab_size - 1}, got {extreme}"
            )


def _require(holds: bool, parameter: str, problem: str) -> None:
    if not holds:
        raise InvalidParameterError(parameter, problem)
