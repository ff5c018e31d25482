"""InputProcessor: converts a prompt and its parameters into a validated, complete
EngineCoreRequest.

Must not know: the engine, sockets, outputs. All checks and defaults are applied here once; the
engine relies on them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import msgspec

from ...ipc.checks import (
    INT64_MAX,
    require,
    require_int,
    require_kind,
    require_owner,
    require_text,
)
from ...ipc.config import EngineConfig, resolved
from ...ipc.errors import InvalidParameterError
from ...ipc.lora import LoRARequest
from ...ipc.messages import EngineCoreRequest, ImageItem
from ...ipc.models.pooling import Pooling
from ...ipc.params import (
    ALL_LOGPROBS,
    Check,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    with_checked,
)
from ..text.tokenizer import Tokenizer
from .image_inputs import ImageInputs
from .lora_requests import placed
from .pooling_inputs import PoolingInputs
from .prompts import (
    IMAGES,
    NO_IMAGES,
    GivenImages,
    PreparedImages,
    Prompt,
    PromptParts,
    error_in_request,
    read_prompt,
)

MAX_LOGIT_BIAS = 100.0
ADAPTER_POOLS = "must be None for a request that pools; adapters change generated text only"
Result = TypeVar("Result")


@dataclass(slots=True, frozen=True)
class ProcessedRequest:
    """A request in the frontend: the user's id and text, and the request for the engine."""

    request_id: str  # the user's
    prompt: str | None
    core_request: EngineCoreRequest
    # clock_offset + time.monotonic() = seconds since 1970, by the wall clock at arrival. Later
    # times of the request are computed with it, so that setting the wall clock changes no duration.
    clock_offset: float = field(default_factory=lambda: time.time() - time.monotonic())


@dataclass(slots=True, frozen=True)
class SubmitOptions:
    """What a request carries beside its prompt and parameters; see LLMEngine.add_request."""

    arrival_time: float | None = None  # seconds since 1970; None: now
    priority: int = 0
    owner: str = ""
    owner_weight: float = 1.0

    def __post_init__(self) -> None:
        require_int("priority", self.priority, -(2**63), INT64_MAX)
        require_owner(self.owner, self.owner_weight)


DEFAULT_OPTIONS = SubmitOptions()


class InputProcessor:
    """`eos_token_ids`: every id that ends a sequence of this model.

    One instance per frontend: request seeds are derived from its request counter.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        eos_token_ids: list[int],
        images: ImageInputs | None = None,
    ):
        self.images = images or ImageInputs(config, tokenizer)
        self._has_places = self.images.reads_images  # for images in prompts
        self._model_config = config.model_config
        self._generates = config.model_config.runner != "pooling"
        self._enable_lora = config.lora_config.enable_lora
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        # The number of rows of the embedding, which may exceed the tokenizer's number of tokens.
        num_tokens = None if tokenizer is None else tokenizer.vocab_size
        self._vocab_size: int | None = config.model_config.hf_config.get("vocab_size") or num_tokens
        self._max_model_len = resolved(config.model_config.max_model_len)
        self._max_prompt_len = self._max_model_len - 1  # leaves room for one output token
        self._num_requests = 0
        self._pooling_inputs = PoolingInputs(config.model_config, tokenizer)
        self._checks = self._parameter_checks()

    @property
    def pooling(self) -> Pooling:
        """How the model pools. Raises InvalidParameterError if it does not."""
        return self._pooling_inputs.pooling

    def complete(self, params: PoolingParams) -> PoolingParams:
        """The parameters as they are sent: with the task that they leave to the model."""
        return self._pooling_inputs.complete(params)

    def process_inputs(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        *,
        prompt_name: str | None = None,
        lora_request: LoRARequest | None = None,
        output_kind: RequestOutputKind | None = None,
        **options: Any,
    ) -> ProcessedRequest:
        """Checks and tokenizes the request and sets its seed and max_tokens.

        `prompt_name`: see process_batch. `lora_request`: the caller has reloaded what has
        load_inplace. `output_kind`: replaces the one of SamplingParams. `options`: of
        SubmitOptions. Raises InvalidParameterError without changing any state.
        """
        if isinstance(params, PoolingParams):
            require(lora_request is None, "lora_request", ADAPTER_POOLS)
            [request] = self.process_batch(
                [request_id], [prompt], params, prompt_name=prompt_name, **options
            )
            return request
        began = time.monotonic()
        require_text("request_id", request_id)
        carried = SubmitOptions(**options) if options else DEFAULT_OPTIONS
        self._check_params(params)
        require(prompt_name is None, "prompt_name", "must not be given with SamplingParams")
        parts = read_prompt(prompt)
        require(parts.text_pair is None, "text_pair", "must not be given with SamplingParams")
        token_ids, items = self._read(parts, params.truncate_prompt_tokens)
        if lora_request is not None:
            lora_request = self._check_lora(lora_request)
        return _made_request(
            request_id,
            parts.text,
            token_ids,
            self._complete(params, len(token_ids), output_kind),
            carried,
            began,
            cache_salt=parts.cache_salt,
            images=items,
            eos_token_ids=[] if params.ignore_eos else self._eos_token_ids,
            lora_request=lora_request,
        )

    def process_batch(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Prompt],
        params: PoolingParams,
        *,
        prompt_name: str | None = None,
        part: tuple[int, int | None] | None = None,
        **options: Any,
    ) -> list[ProcessedRequest]:
        """Checks and tokenizes requests that pool, with the same parameters. Their texts are
        tokenized together, without the GIL.

        `prompt_name`: the model's prompt to put in front of each text; None: its default, if any.
        `part`: the index of the first prompt, and the number of prompts, of which these are a part
        (None: unknown). `options`: of SubmitOptions.
        Raises InvalidParameterError, with the index of the request if there are several.
        """
        began, carried = time.monotonic(), SubmitOptions(**options)
        inputs = self._pooling_inputs
        params = inputs.complete(params)
        first, num_prompts = part or (0, len(prompts))
        read = [
            self._at(first + i, num_prompts, read_prompt, prompt)
            for i, prompt in enumerate(prompts)
        ]
        requests, longest = [], inputs.longest(params)
        for i, (text, token_ids, cache_salt, own) in enumerate(
            inputs.tokenize(read, params, prompt_name)
        ):
            require_text("request_id", request_ids[i])
            limit = params.truncate_prompt_tokens
            token_ids, items = self._at(
                *(first + i, num_prompts, self._with_images, token_ids, read[i], limit, longest)
            )
            completed = msgspec.structs.replace(params, **own) if own else params
            requests.append(
                _made_request(
                    *(request_ids[i], text, token_ids, completed, carried, began),
                    cache_salt=cache_salt,
                    images=items,
                )
            )
        return requests

    @staticmethod
    def _at(
        index: int, num_prompts: int | None, check: Callable[..., Result], *args: Any
    ) -> Result:
        """`check(*args)`, whose error names the request if there are several."""
        try:
            return check(*args)
        except InvalidParameterError as error:
            raise error_in_request(error, index, num_prompts) from None

    # ------------------------------------------------------------ prompt

    async def prepared(self, prompt: Prompt) -> Prompt:
        """Returns a prompt with images in the form that process_inputs takes without blocking.
        Raises InvalidParameterError.
        """
        parts = read_prompt(prompt)
        if not isinstance(parts.images, GivenImages):
            return prompt
        require(parts.text_pair is None, "text_pair", "must not be given with images")
        if parts.token_ids is not None:
            self._check_token_ids(parts.token_ids, self._max_prompt_len)
        unread = (parts.text or "") if parts.token_ids is None else parts.token_ids
        token_ids, items = await self.images.prepare_async(unread, parts.images)
        given = {"prompt": parts.text, "cache_salt": parts.cache_salt}
        return given | {"prompt_token_ids": token_ids, IMAGES: PreparedImages(items)}

    def _read(
        self, parts: PromptParts, truncated_to: int | None
    ) -> tuple[list[int], list[ImageItem]]:
        """Returns the token ids of a prompt for SamplingParams, and its images."""
        if parts.images is not None and parts.images != NO_IMAGES:
            return self._read_images(parts, truncated_to)
        text, token_ids = parts.text or "", parts.token_ids
        token_ids = self._encode("prompt", text) if token_ids is None else token_ids
        if truncated_to is not None:
            token_ids = self._truncated(token_ids, truncated_to)
        self._check_token_ids(token_ids, self._max_prompt_len)
        if self._has_places:
            self._check_places(parts, token_ids)
        return token_ids, []

    def _check_places(self, parts: PromptParts, token_ids: list[int]) -> None:
        """Requires of a prompt without images that it has no place for one."""
        if parts.images is None:
            name = "prompt" if parts.token_ids is None else "prompt_token_ids"
            self.images.refuse_places(name, token_ids)

    def _read_images(
        self, parts: PromptParts, truncated_to: int | None
    ) -> tuple[list[int], list[ImageItem]]:
        """Returns the token ids of a prompt with those of its images, and the images."""
        most = self._max_prompt_len
        if parts.token_ids is not None or not isinstance(parts.images, GivenImages):
            return self._with_images(parts.token_ids, parts, truncated_to, most)
        _check_whole(truncated_to)
        token_ids, items = self.images.prepare(parts.text or "", parts.images)
        self._check_token_ids(token_ids, most)
        return token_ids, items

    def _with_images(
        self, token_ids: Any, parts: PromptParts, truncated_to: int | None, most: int
    ) -> tuple[list[int], list[ImageItem]]:
        """Returns a prompt's token ids, checked, with those of its images, and the images."""
        self._check_token_ids(token_ids, most)
        if parts.images is None or parts.images == NO_IMAGES:
            self._check_places(parts, token_ids)
            return token_ids, []
        _check_whole(truncated_to)
        if isinstance(parts.images, PreparedImages):
            return token_ids, parts.images.items
        token_ids, items = self.images.prepare(token_ids, parts.images)
        self._check_token_ids(token_ids, most)
        return token_ids, items

    def _encode(self, parameter: str, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._tokenizer is None:
            raise InvalidParameterError(
                parameter, "must be token ids: this engine runs with skip_tokenizer_init=True"
            )
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _truncated(self, token_ids: Any, num_kept: int) -> Any:
        """The last `num_kept` ids (SamplingParams.truncate_prompt_tokens)."""
        most = self._max_prompt_len
        require(
            num_kept <= most,
            "truncate_prompt_tokens",
            f"must be -1 or at most {most}, the longest prompt, got {num_kept}",
        )
        if not isinstance(token_ids, list):
            return token_ids
        return token_ids[-(most if num_kept == -1 else num_kept) :]

    def _check_token_ids(self, token_ids: Any, most: int) -> None:
        """Requires a list of at least one and at most `most` ids of the vocabulary."""
        is_list = isinstance(token_ids, list) and set(map(type, token_ids)) <= {int}
        require(is_list, "prompt_token_ids", "must be a list of integers")
        require(token_ids, "prompt", "must not be empty")
        if len(token_ids) > most:
            self._refuse_length(len(token_ids), most)
        self._check_range("prompt_token_ids", token_ids)

    def _refuse_length(self, num_tokens: int, most: int) -> NoReturn:
        reads = f"with max_model_len={self._max_model_len} it can have"
        if most < self._max_prompt_len:  # of a request that pools and must fit
            reads = "without being cut it can have"
        problem = f"is {num_tokens} tokens long; {reads} at most {most}"
        raise InvalidParameterError("prompt", problem)

    def _check_range(self, name: str, token_ids: Iterable[int]) -> None:
        """Requires that `token_ids` is not empty."""
        if self._vocab_size is None:
            return
        for extreme in (min(token_ids), max(token_ids)):
            if not 0 <= extreme < self._vocab_size:
                raise InvalidParameterError(
                    name,
                    f"must be ids between 0 and {self._vocab_size - 1}, the model's vocabulary, "
                    f"got {extreme}",
                )

    # ------------------------------------------------------------ parameters

    def _check_lora(self, lora_request: Any) -> LoRARequest:
        problem = "needs an engine that was started with enable_lora=True"
        require(self._enable_lora, "lora_request", problem)
        return msgspec.structs.replace(placed(lora_request), load_inplace=False)

    def _parameter_checks(self) -> list[tuple[str, Check]]:
        """Those that depend on the model, for parameters that are not false. SamplingParams itself
        makes the others.
        """
        checks: list[tuple[str, Check]] = []
        if self._tokenizer is None:
            needing = ("stop", "bad_words", "structured_outputs")
            checks += [(name, _refuse_without_tokenizer) for name in needing]
        checks.append(("structured_outputs", self._check_structured_outputs))
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            checks.append((name, lambda params, name, ids: self._check_range(name, ids)))
        checks.append(("bad_words_token_ids", _refuse_token_ids))
        for name in ("logprobs", "prompt_logprobs"):
            checks.append((name, self._check_num_logprobs))
        return checks

    def _check_params(self, params: Any) -> None:
        if not isinstance(params, SamplingParams) or not self._generates:
            self._refuse_kind(params)
        if params.n > 1:
            _check_completions_differ(params)
        for name, check in self._checks:
            if value := getattr(params, name):
                check(params, name, value)

    def _refuse_kind(self, params: Any) -> NoReturn:
        problem = f"must be SamplingParams or PoolingParams, got {type(params).__name__}"
        if isinstance(params, SamplingParams):
            problem = (
                "must be PoolingParams: this engine runs with runner=pooling and generates no text"
            )
        raise InvalidParameterError("params", problem)

    def _check_structured_outputs(self, params: SamplingParams, name: str, value: Any) -> None:
        require(
            not params.ignore_eos,
            "ignore_eos",
            "must be False with structured_outputs: an end-of-sequence token ends a structured "
            "output",
        )
        self._check_end_token()

    def _check_end_token(self) -> None:
        """Requires an end-of-sequence token that the model can sample, because it ends a structured
        output.
        """
        ids, vocab_size = self._eos_token_ids, self._vocab_size
        can_end = any(vocab_size is None or 0 <= token_id < vocab_size for token_id in ids)
        require(
            can_end,
            "structured_outputs",
            "needs an end-of-sequence token: eos_token_id of generation_config.json or "
            f"config.json must be between 0 and {(vocab_size or 0) - 1}, the model's vocabulary, "
            f"got {ids or None}",
        )

    def _check_num_logprobs(self, params: SamplingParams, name: str, value: int) -> None:
        """A max_logprobs of -1 means the whole vocabulary."""
        cap, vocab_size = self._model_config.max_logprobs, self._vocab_size or 2**31 - 1
        most = vocab_size if cap == ALL_LOGPROBS else min(cap, vocab_size)
        wanted = vocab_size if value == ALL_LOGPROBS else value
        words = (
            f"-1 (the whole vocabulary) or at most {vocab_size}"
            if most == vocab_size
            else f"at most {most}, which max_logprobs allows"
        )
        require(wanted <= most, name, f"must be {words}, got {value}")

    def _complete(
        self, params: SamplingParams, num_prompt_tokens: int, output_kind: RequestOutputKind | None
    ) -> SamplingParams:
        """Sets the seed, limits max_tokens to the remaining context, converts the other values."""
        room = self._max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        changes = self._converted(params) if params.logit_bias or params.bad_words else {}
        # Drawn for every request, so that a request's seed depends only on its position in
        # the sequence of requests.
        drawn = derive_seed(self._model_config.seed, self._num_requests)
        self._num_requests += 1
        return with_checked(
            params,
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            output_kind=params.output_kind if output_kind is None else output_kind,
            seed=drawn if params.seed is None else params.seed,
            **changes,
        )

    def _converted(self, params: SamplingParams) -> dict[str, Any]:
        """logit_bias within vLLM's limits, and the tokens of bad_words."""
        changes: dict[str, Any] = {}
        if params.logit_bias:
            changes["logit_bias"] = {
                i: min(MAX_LOGIT_BIAS, max(-MAX_LOGIT_BIAS, float(bias)))
                for i, bias in params.logit_bias.items()
            }
        if params.bad_words:
            changes["bad_words_token_ids"] = self._bad_words_token_ids(params.bad_words)
        return changes

    def _bad_words_token_ids(self, words: list[str]) -> list[list[int]]:
        """The token ids of each word at the beginning of a text and after a space. They often
        differ.

        vLLM drops the second form if the two differ in length, and the word can then appear. Quire
        keeps both.
        """
        written: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(" "), " " + word.lstrip(" ")):
                token_ids = self._encode("bad_words", text, add_special_tokens=False)
                require_kind(token_ids, "bad_words", "words that the tokenizer knows", word)
                self._check_range("bad_words", token_ids)
                written[tuple(token_ids)] = None
        return [list(token_ids) for token_ids in written]


def _check_whole(truncated_to: int | None) -> None:
    problem = "must be None for a prompt with images"
    require(truncated_to is None, "truncate_prompt_tokens", problem)


def _made_request(
    request_id: str,
    text: str | None,
    token_ids: list[int],
    params: SamplingParams | PoolingParams,
    options: SubmitOptions,
    began: float,
    **fields: Any,
) -> ProcessedRequest:
    """`began`: the start of the request by time.monotonic(). `fields`: of EngineCoreRequest."""
    clock_offset = time.time() - time.monotonic()
    arrival_time = options.arrival_time
    core_request = EngineCoreRequest(
        # user ids need not be unique across clients or over time
        request_id=f"{request_id}-{secrets.token_hex(8)}",
        prompt_token_ids=token_ids.copy(),  # the caller may change its list
        params=params,
        arrival_time=clock_offset + time.monotonic() if arrival_time is None else arrival_time,
        priority=options.priority,
        owner=options.owner,
        owner_weight=options.owner_weight,
        deadline=0.0 if params.timeout_s is None else began + params.timeout_s,
        **fields,
    )
    return ProcessedRequest(request_id, text, core_request, clock_offset)


def _check_completions_differ(params: SamplingParams) -> None:
    if params.is_greedy:  # vLLM raises an error too
        raise InvalidParameterError(
            "n",
            f"must be 1 with temperature=0 (greedy), where all completions are the same, got "
            f"{params.n}",
        )


def _refuse_without_tokenizer(params: SamplingParams, name: str, value: Any) -> None:
    problem = "needs a tokenizer: this engine runs with skip_tokenizer_init=True"
    raise InvalidParameterError(name, problem)


def _refuse_token_ids(params: SamplingParams, name: str, value: Any) -> None:
    raise InvalidParameterError(name, "must not be set in a request; use bad_words")


def derive_seed(base: int, index: int) -> int:
    """Returns seed number `index` of the sequence that starts at `base`, in [0, 2**63).

    SplitMix64 (Steele, Lea, Flood: OOPSLA 2014).
    """
    mask = 2**64 - 1
    z = (base + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
