"""InputProcessor: a prompt and its parameters become one checked, complete EngineCoreRequest.
May know: the tokenizer, the resolved configuration, what the engine cannot do yet.
Must not know: the engine, sockets, outputs. Every check and every default happens here, once; the engine trusts what it gets."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from ..ipc.config import EngineConfig
from ..ipc.errors import InvalidParameterError
from ..ipc.messages import EngineCoreRequest
from ..ipc.params import PoolingParams, RequestOutputKind, SamplingParams, check_supported
from .tokenizer import Tokenizer

# A prompt is text, token ids, or a dict with these keys.
Prompt = str | list[int] | dict[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")

FLAGS = tuple(field.name for field in msgspec.structs.fields(SamplingParams) if isinstance(field.default, bool))


@dataclass(slots=True, frozen=True)
class ProcessedRequest:
    """A request as the frontend keeps it: the user's id and text, and what the engine is sent."""

    request_id: str  # the user's
    prompt: str | None
    core_request: EngineCoreRequest


class InputProcessor:
    """`eos_token_ids`: every id that ends a sequence of this model. One instance per frontend: it counts requests to draw their seeds."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, eos_token_ids: list[int]):
        self._model_config = config.model_config
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        # The rows of the embedding, which may be more than the tokenizer has tokens.
        self._vocab_size: int | None = config.model_config.hf_config.get("vocab_size") or (tokenizer and tokenizer.vocab_size)
        self._num_requests = 0

    def process_inputs(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> ProcessedRequest:
        """Checks everything, tokenizes, and fills in seed and max_tokens. Raises InvalidParameterError; then nothing has happened."""
        _require(isinstance(request_id, str), "request_id", f"must be a string, got {request_id!r}")
        _require_text("request_id", request_id)
        _require(_is_id(priority) and -(2**63) <= priority < 2**63, "priority", f"must be a 64-bit integer, got {priority!r}")
        self._check_params(params)
        text, token_ids, cache_salt = self._read_prompt(prompt)
        self._check_prompt(token_ids)
        core_request = EngineCoreRequest(
            request_id=f"{request_id}-{secrets.token_hex(8)}",  # the user's ids need not be unique over clients, or over time
            prompt_token_ids=token_ids,
            sampling_params=self._complete(params, len(token_ids)),
            eos_token_ids=[] if params.ignore_eos else self._eos_token_ids,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            priority=priority,
            cache_salt=cache_salt,
        )
        return ProcessedRequest(request_id, text, core_request)

    # ------------------------------------------------------------ prompt

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        """(text, token ids, cache salt) of any form of prompt. Given both, the ids count and the text is for show."""
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        elif isinstance(prompt, list):
            prompt = {"prompt_token_ids": prompt}
        _require(isinstance(prompt, dict), "prompt", f"must be a string, a list of token ids or a dict, got {type(prompt).__name__}")
        for key in prompt:
            _require(key in PROMPT_KEYS, "prompt", f"has the unknown key {key!r}; the keys are {', '.join(PROMPT_KEYS)}")
        text, token_ids, salt = (prompt.get(key) for key in PROMPT_KEYS)
        _require(text is None or isinstance(text, str), "prompt", f"must be a string, got {type(text).__name__}")
        _require(salt is None or isinstance(salt, str) and salt, "cache_salt", f"must be a string that is not empty, got {salt!r}")
        _require_text("prompt", text or "")
        _require_text("cache_salt", salt or "")
        if token_ids is None:
            _require(text is not None, "prompt", "must hold `prompt` or `prompt_token_ids`")
            _require(self._tokenizer is not None, "prompt", "must be token ids: this engine runs with skip_tokenizer_init=True")
            token_ids = self._tokenizer.encode(text)
        return text, token_ids.copy() if isinstance(token_ids, list) else token_ids, salt

    def _check_prompt(self, token_ids: Any) -> None:
        _require(isinstance(token_ids, list) and all(map(_is_id, token_ids)), "prompt_token_ids", "must be a list of integers")
        _require(len(token_ids) > 0, "prompt", "must not be empty")
        most = self._model_config.max_model_len - 1  # one token is left for the output
        problem = f"is {len(token_ids)} tokens long; with max_model_len={most + 1} it can have at most {most}"
        _require(len(token_ids) <= most, "prompt", problem)
        self._check_range("prompt_token_ids", token_ids)

    def _check_range(self, name: str, token_ids: list[int]) -> None:
        if not token_ids or self._vocab_size is None:
            return
        for extreme in (min(token_ids), max(token_ids)):
            problem = f"must be ids between 0 and {self._vocab_size - 1}, the model's vocabulary, got {extreme}"
            _require(0 <= extreme < self._vocab_size, name, problem)

    # ------------------------------------------------------------ parameters

    def _check_params(self, params: SamplingParams | PoolingParams) -> None:
        _require(not isinstance(params, PoolingParams), "params", "pooling is not possible yet; give SamplingParams")
        _require(isinstance(params, SamplingParams), "params", f"must be SamplingParams, got {type(params).__name__}")
        check_supported(params)
        _require(params.n == 1, "n", f"is not possible yet: it must be left at 1, got {params.n}")  # the engine can, OutputProcessor cannot
        for name in FLAGS:
            _require(isinstance(getattr(params, name), bool), name, f"must be True or False, got {getattr(params, name)!r}")
        _require(params.output_kind in tuple(RequestOutputKind), "output_kind", f"must be a RequestOutputKind, got {params.output_kind!r}")
        if params.stop_list:
            _require(self._tokenizer is not None, "stop", "needs a tokenizer: this engine runs with skip_tokenizer_init=True")
        _require_text("stop", "".join(params.stop_list))
        self._check_range("stop_token_ids", params.stop_token_ids or [])

    def _complete(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Resolves the seed and cuts max_tokens to what the context leaves."""
        room = self._model_config.max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        # Drawn for every request, so that a request's seed depends on its place in the script alone.
        drawn = derive_seed(self._model_config.seed, self._num_requests)
        self._num_requests += 1
        return msgspec.structs.replace(
            params,
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            seed=drawn if params.seed is None else params.seed,
        )


def derive_seed(base: int, index: int) -> int:
    """Seed number `index` of the sequence that starts at `base`, in [0, 2**63). SplitMix64 (Steele, Lea, Flood: OOPSLA 2014)."""
    mask = 2**64 - 1
    z = (base + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(holds: object, parameter: str, problem: str) -> None:
    if not holds:
        raise InvalidParameterError(parameter, problem)


def _require_text(parameter: str, text: str) -> None:
    """Python's strings may hold half characters, which neither the tokenizer nor a message can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameterError(parameter, f"must be text that UTF-8 can hold; character {error.start} is a lone surrogate") from None
