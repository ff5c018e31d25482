"""InputProcessor: a prompt and its parameters become one checked, complete EngineCoreRequest.

Must not know: the engine, sockets, outputs. Every check and every default happens here, once; the
engine trusts what it gets.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..ipc.checks import INT64_MAX, require, require_int, require_text, shown
from ..ipc.config import EngineConfig
from ..ipc.errors import InvalidParameterError
from ..ipc.messages import EngineCoreRequest
from ..ipc.params import ALL_LOGPROBS, PoolingParams, SamplingParams
from .text.tokenizer import Tokenizer

# A prompt is text, token ids, or a dict with these keys.
Prompt = str | list[int] | dict[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
MAX_LOGIT_BIAS = 100.0


@dataclass(slots=True, frozen=True)
class ProcessedRequest:
    """A request as the frontend keeps it: the user's id and text, and what the engine is sent."""

    request_id: str  # the user's
    prompt: str | None
    core_request: EngineCoreRequest
    # clock_offset + time.monotonic() = seconds since 1970, by the wall clock at arrival. Later
    # moments of the request are taken this way, so that a clock that is set changes no duration.
    clock_offset: float = field(default_factory=lambda: time.time() - time.monotonic())


class InputProcessor:
    """`eos_token_ids`: every id that ends a sequence of this model.

    One instance per frontend: it counts requests to draw their seeds.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, eos_token_ids: list[int]):
        self._model_config = config.model_config
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        # The rows of the embedding, which may be more than the tokenizer has tokens.
        self._vocab_size: int | None = config.model_config.hf_config.get("vocab_size") or (
            tokenizer and tokenizer.vocab_size
        )
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
        """Checks everything, tokenizes, and fills in seed and max_tokens.

        Raises InvalidParameterError; then nothing has happened.
        """
        require_text("request_id", request_id)
        require_int("priority", priority, -(2**63), INT64_MAX)
        self._check_params(params)
        text, token_ids, cache_salt = self._read_prompt(prompt)
        token_ids = self._check_prompt(token_ids, params.truncate_prompt_tokens)
        clock_offset = time.time() - time.monotonic()
        if arrival_time is None:
            arrival_time = clock_offset + time.monotonic()
        core_request = EngineCoreRequest(
            # the user's ids need not be unique over clients, or over time
            request_id=f"{request_id}-{secrets.token_hex(8)}",
            prompt_token_ids=token_ids,
            params=self._complete(params, len(token_ids)),
            eos_token_ids=[] if params.ignore_eos else self._eos_token_ids,
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
        )
        return ProcessedRequest(request_id, text, core_request, clock_offset)

    # ------------------------------------------------------------ prompt

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        """(text, token ids, cache salt) of any form of prompt.

        Given both, the ids count and the text is for show.
        """
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        elif isinstance(prompt, list):
            prompt = {"prompt_token_ids": prompt}
        require(
            isinstance(prompt, dict),
            "prompt",
            f"must be a string, a list of token ids or a dict, got {type(prompt).__name__}",
        )
        for key in prompt:
            require(
                key in PROMPT_KEYS,
                "prompt",
                f"has the unknown key {shown(key)}; the keys are {', '.join(PROMPT_KEYS)}",
            )
        text, token_ids, salt = (prompt.get(key) for key in PROMPT_KEYS)
        require(
            text is None or isinstance(text, str),
            "prompt",
            f"must be a string, got {type(text).__name__}",
        )
        require(
            salt is None or (isinstance(salt, str) and salt),
            "cache_salt",
            f"must be a string that is not empty, got {shown(salt)}",
        )
        require_text("prompt", text or "")
        require_text("cache_salt", salt or "")
        if token_ids is None:
            require(text is not None, "prompt", "must hold `prompt` or `prompt_token_ids`")
            require(
                self._tokenizer is not None,
                "prompt",
                "must be token ids: this engine runs with skip_tokenizer_init=True",
            )
            token_ids = self._tokenizer.encode(text)
        return text, token_ids, salt

    def _check_prompt(self, token_ids: Any, num_kept: int | None) -> list[int]:
        """A copy of the ids, of which the last `num_kept` count
        (SamplingParams.truncate_prompt_tokens).
        """
        is_list = isinstance(token_ids, list) and set(map(type, token_ids)) <= {int}
        require(is_list, "prompt_token_ids", "must be a list of integers")
        require(len(token_ids) > 0, "prompt", "must not be empty")
        most = self._model_config.max_model_len - 1  # one token is left for the output
        if num_kept is not None:
            require(
                num_kept <= most,
                "truncate_prompt_tokens",
                f"must be -1 or at most {most}, the longest prompt, got {num_kept}",
            )
            token_ids = token_ids[-(most if num_kept == -1 else num_kept) :]
        problem = f"is {len(token_ids)} tokens long; with max_model_len={most + 1} it can have at most {most}"
        require(len(token_ids) <= most, "prompt", problem)
        self._check_range("prompt_token_ids", token_ids)
        return token_ids.copy()

    def _check_range(self, name: str, token_ids: Iterable[int]) -> None:
        """`token_ids` are not empty."""
        if self._vocab_size is None:
            return
        for extreme in (min(token_ids), max(token_ids)):
            problem = f"must be ids between 0 and {self._vocab_size - 1}, the model's vocabulary, got {extreme}"
            require(0 <= extreme < self._vocab_size, name, problem)

    # ------------------------------------------------------------ parameters

    def _check_params(self, params: SamplingParams | PoolingParams) -> None:
        """What depends on the model; the rest SamplingParams has checked itself."""
        require(
            not isinstance(params, PoolingParams),
            "params",
            "pooling is not possible yet; give SamplingParams",
        )
        require(
            isinstance(params, SamplingParams),
            "params",
            f"must be SamplingParams, got {type(params).__name__}",
        )
        is_useful = params.n == 1 or not params.is_greedy  # vLLM refuses it too
        require(
            is_useful,
            "n",
            f"must be 1 with temperature=0 (greedy), where all completions are the same, got "
            f"{params.n}",
        )
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(params, name) and self._tokenizer is None:
                raise InvalidParameterError(
                    name, "needs a tokenizer: this engine runs with skip_tokenizer_init=True"
                )
        can_end = params.structured_outputs is None or not params.ignore_eos
        require(
            can_end,
            "ignore_eos",
            "must be False with structured_outputs: an end-of-sequence token is how such an output "
            "ends",
        )
        if params.structured_outputs is not None:
            self._check_end_token()
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if ids := getattr(params, name):
                self._check_range(name, ids)
        require(
            not params.bad_words_token_ids,
            "bad_words_token_ids",
            "is not for requests to give: bad_words takes the words themselves",
        )
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(params, name)) is not None:
                self._check_num_logprobs(name, value)

    def _check_end_token(self) -> None:
        """A structured output ends with an end-of-sequence token that the model can sample."""
        ids, vocab_size = self._eos_token_ids, self._vocab_size
        can_end = any(vocab_size is None or 0 <= token_id < vocab_size for token_id in ids)
        require(
            can_end,
            "structured_outputs",
            "needs an end-of-sequence token to end with: eos_token_id of generation_config.json or "
            f"config.json must be between 0 and {(vocab_size or 0) - 1}, the model's vocabulary, "
            f"got {ids or None}",
        )

    def _check_num_logprobs(self, name: str, value: int) -> None:
        """max_logprobs counts the whole vocabulary as what it is."""
        cap, vocab_size = self._model_config.max_logprobs, self._vocab_size or 2**31 - 1
        most = vocab_size if cap == ALL_LOGPROBS else min(cap, vocab_size)
        wanted = vocab_size if value == ALL_LOGPROBS else value
        words = (
            f"-1 (the whole vocabulary) or at most {vocab_size}"
            if most == vocab_size
            else f"at most {most}, which max_logprobs allows"
        )
        require(wanted <= most, name, f"must be {words}, got {value}")

    def _complete(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Resolves the seed, cuts max_tokens to what the context leaves, and brings the rest into
        the form the engine takes.
        """
        room = self._model_config.max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        changes: dict[str, Any] = {
            "max_tokens": max_tokens,
            "min_tokens": min(params.min_tokens, max_tokens),
        }
        if params.logit_bias:  # vLLM's limits
            changes["logit_bias"] = {
                i: min(MAX_LOGIT_BIAS, max(-MAX_LOGIT_BIAS, float(bias)))
                for i, bias in params.logit_bias.items()
            }
        if params.bad_words:
            changes["bad_words_token_ids"] = self._bad_words_token_ids(params.bad_words)
        # Drawn for every request, so that a request's seed depends on its place in the script
        # alone.
        drawn = derive_seed(self._model_config.seed, self._num_requests)
        self._num_requests += 1
        changes["seed"] = drawn if params.seed is None else params.seed
        return msgspec.structs.replace(params, **changes)

    def _bad_words_token_ids(self, words: list[str]) -> list[list[int]]:
        """Each word as the tokenizer writes it at the beginning of a text and behind a space, which
        often is another token.

        vLLM drops the second writing where the two differ in length; the word would then come
        through. Here both are kept.
        """
        written: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(" "), " " + word.lstrip(" ")):
                token_ids = self._tokenizer.encode(text, add_special_tokens=False)
                require(
                    token_ids,
                    "bad_words",
                    f"must be words that the tokenizer knows, got {shown(word)}",
                )
                self._check_range("bad_words", token_ids)
                written[tuple(token_ids)] = None
        return [list(token_ids) for token_ids in written]


def derive_seed(base: int, index: int) -> int:
    """Seed number `index` of the sequence that starts at `base`, in [0, 2**63).

    SplitMix64 (Steele, Lea, Flood: OOPSLA 2014).
    """
    mask = 2**64 - 1
    z = (base + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
