"""SamplingParams and PoolingParams, under vLLM's names, meanings and defaults.

Must not know: the model, the tokenizer, or what the engine supports
(frontend/requests/input_processor.py checks those).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import msgspec

from .checks import (
    INT64_MAX,
    NamedArguments,
    is_finite,
    is_int,
    require,
    require_int,
    require_kind,
    require_plain,
    require_texts,
    require_token_ids,
    shown,
)
from .errors import InvalidParameterError

# value of `logprobs` and `prompt_logprobs` for the whole vocabulary; the configuration's
# max_logprobs limits both
ALL_LOGPROBS = -1
MAX_N = 16384  # vLLM's
MAX_STOPS = 64
MAX_BAD_WORDS = 1024


class RequestOutputKind(IntEnum):
    CUMULATIVE = 0  # every output has all text and tokens so far
    DELTA = 1  # every output has only what is new
    FINAL_ONLY = 2  # one output, when the request is finished


# Whitespace between two JSON tokens by default: none, one space, or one line break and an
# indentation. Without a bound, a small model can write whitespace until its context is full.
JSON_WHITESPACE = r"( |\n[ \t]{0,20})?"


class StructuredOutputsParams(
    msgspec.Struct,
    metaclass=NamedArguments,
    array_like=True,
    omit_defaults=True,
    frozen=True,
    gc=False,
    kw_only=True,
):
    """Constrains the whole output; exactly one of the first five fields is given. vLLM's names.

    Raises InvalidParameterError on construction and on decoding. The engine reports an invalid
    grammar when it compiles it.
    """

    json: str | dict[str, Any] | None = None  # a JSON schema, as text or as a dict
    regex: str | None = None  # the whole output matches
    choice: list[str] | None = None  # the output is one of these
    grammar: str | None = None  # Lark, or llguidance's own JSON
    json_object: bool = False  # any JSON object
    # a regular expression between two JSON tokens, instead of JSON_WHITESPACE
    whitespace_pattern: str | None = None
    # no whitespace between JSON tokens, unless whitespace_pattern is given
    disable_any_whitespace: bool = False
    # objects of a JSON schema have only the properties that it lists, unless it states otherwise
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURED_KINDS if getattr(self, name) not in (None, False)]
        require(
            len(given) == 1,
            "structured_outputs",
            f"must give exactly one of {', '.join(STRUCTURED_KINDS)}, got {given or 'none'}",
        )
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            require(
                value is None or isinstance(value, str),
                f"structured_outputs.{name}",
                f"must be a string, got {shown(value)}",
            )
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            require(
                isinstance(getattr(self, name), bool),
                f"structured_outputs.{name}",
                "must be True or False",
            )
        is_schema = self.json is None or isinstance(self.json, (str, dict))
        require(
            is_schema,
            "structured_outputs.json",
            f"must be a schema as a dict or as text, got {type(self.json).__name__}",
        )
        choice = self.choice
        is_choice = choice is None or (
            isinstance(choice, list) and choice and all(isinstance(c, str) and c for c in choice)
        )
        require(
            is_choice,
            "structured_outputs.choice",
            "must be a list of strings, none of them empty, at least one",
        )

    def json_options(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a JSON schema, under its key "x-guidance".

        `own` are those that the schema itself holds. The request's come first, then the schema's,
        then the default.
        """
        if self.whitespace_pattern is not None:
            return {**own, "whitespace_pattern": self.whitespace_pattern}
        if self.disable_any_whitespace:
            return {**own, "whitespace_flexible": False, "whitespace_pattern": None}
        if "whitespace_flexible" in own or "whitespace_pattern" in own:
            return dict(own)
        return {**own, "whitespace_pattern": JSON_WHITESPACE}


STRUCTURED_KINDS = ("json", "regex", "choice", "grammar", "json_object")
STRUCTURED_TEXTS = ("json", "regex", "choice", "grammar", "whitespace_pattern")


class SamplingParams(
    msgspec.Struct,
    metaclass=NamedArguments,
    tag="sampling",
    array_like=True,
    omit_defaults=True,
    frozen=True,
    gc=False,
    kw_only=True,
):
    """How the tokens of one request are sampled, and when it ends.

    Immutable; `msgspec.structs.replace` makes a changed copy. As in vLLM, tuples stand for lists,
    seed=-1 for None, and keys of logit_bias may be text ("42", as JSON has them). Raises
    InvalidParameterError, naming the parameter and its range, on construction and on decoding.
    """

    n: int = 1
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 16  # None: to the end of the context
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    # keep this many of the prompt's last tokens; -1: as many as the context holds
    truncate_prompt_tokens: int | None = None
    # tokens between two outputs of a stream; the first and the last token are sent at once
    stream_interval: int = 1
    # for user-defined logits processors (config: logits_processors)
    extra_args: dict[str, Any] | None = None
    # bad_words in tokens; set by the InputProcessor, not by users
    bad_words_token_ids: list[list[int]] = []
    # seconds after submission, at which it ends with finish reason "timeout"; None: no limit
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        self._normalize()
        self._check_numbers()
        for name in FLAGS:
            if type(value := getattr(self, name)) is not bool:
                raise InvalidParameterError(name, f"must be True or False, got {shown(value)}")
        if not (is_int(self.output_kind) and self.output_kind in OUTPUT_KINDS):
            raise InvalidParameterError(
                "output_kind", f"must be a RequestOutputKind, got {shown(self.output_kind)}"
            )
        self._check_texts()
        self._check_token_ids()
        self._check_objects()

    def clone(self) -> SamplingParams:
        """A copy that shares no list or dict with this one."""
        return copy.deepcopy(self)

    def _normalize(self) -> None:
        """Brings vLLM's other forms of a value into the one that is checked and sent."""
        if self.seed == -1:
            msgspec.structs.force_setattr(self, "seed", None)
        for name in LISTS:
            if isinstance(value := getattr(self, name), tuple):
                msgspec.structs.force_setattr(self, name, list(value))
        if isinstance(bias := self.logit_bias, dict) and any(isinstance(k, str) for k in bias):
            changed = {_token_id(key): value for key, value in bias.items()}
            require(
                len(changed) == len(bias),
                "logit_bias",
                "must give each token id once, as a number or as text",
            )
            msgspec.structs.force_setattr(self, "logit_bias", changed)

    def _check_numbers(self) -> None:
        """Checks the common case fast: this runs for every request, twice."""
        for name, (low, high, words) in NUMBER_RANGES.items():
            value = getattr(self, name)
            if type(value) is float and low <= value <= high:
                continue
            require(
                is_finite(value) and low <= value <= high,
                name,
                f"must be {words}, got {shown(value)}",
            )
            # an int, or another library's float
            msgspec.structs.force_setattr(self, name, float(value))
        for name, (low, high, meaning) in INTEGER_RANGES.items():
            value = getattr(self, name)
            if (type(value) is int and low <= value <= high) or (
                value is None and name in MAY_BE_NONE
            ):
                continue
            require_int(name, value, low, high, meaning)
        if self.timeout_s is not None:
            in_range = is_finite(self.timeout_s) and 0 < self.timeout_s <= MAX_TIMEOUT_S
            require(
                in_range,
                "timeout_s",
                f"must be greater than 0 and at most {MAX_TIMEOUT_S:g} (None: no limit), got "
                f"{shown(self.timeout_s)}",
            )
            msgspec.structs.force_setattr(self, "timeout_s", float(self.timeout_s))
        fits = self.max_tokens is None or self.min_tokens <= self.max_tokens
        require(
            fits,
            "min_tokens",
            f"must be at most max_tokens={self.max_tokens}, got {self.min_tokens}",
        )
        require(
            self.truncate_prompt_tokens != 0,
            "truncate_prompt_tokens",
            "must be at least 1, -1 (as many as the context takes) or None, got 0",
        )

    def _check_texts(self) -> None:
        if self.stop is not None:
            if not isinstance(self.stop, (str, list)):
                raise InvalidParameterError(
                    "stop", f"must be a string or a list of strings, got {shown(self.stop)}"
                )
            require_texts("stop", self.stop_list, MAX_STOPS)
            require(
                not self.stop or self.detokenize,
                "stop",
                "needs detokenize=True: stop strings are found in the text",
            )
        if self.bad_words is not None:
            require_texts("bad_words", self.bad_words, MAX_BAD_WORDS)
            require(
                all(word.strip(" ") for word in self.bad_words),
                "bad_words",
                "must not hold a string of spaces alone",
            )

    def _check_token_ids(self) -> None:
        if self.stop_token_ids is not None:
            require_token_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            require_token_ids("allowed_token_ids", self.allowed_token_ids)
            require(
                self.allowed_token_ids,
                "allowed_token_ids",
                "must not be empty: no token would be left to sample",
            )
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise InvalidParameterError(
                    "logit_bias",
                    f"must be a dict from token ids to numbers, got {shown(self.logit_bias)}",
                )
            require_token_ids("logit_bias", list(self.logit_bias))
            for token_id, bias in self.logit_bias.items():
                if not is_finite(bias):
                    raise InvalidParameterError(
                        "logit_bias",
                        f"must hold finite numbers, got {shown(bias)} for token {token_id}",
                    )
        if self.bad_words_token_ids:
            require(
                isinstance(self.bad_words_token_ids, list),
                "bad_words_token_ids",
                "must be a list of lists of token ids",
            )
            for token_ids in self.bad_words_token_ids:
                require_token_ids("bad_words_token_ids", token_ids)
                require(token_ids, "bad_words_token_ids", "must not hold an empty list")

    def _check_objects(self) -> None:
        if self.extra_args is not None:
            require(
                isinstance(self.extra_args, dict),
                "extra_args",
                f"must be a dict, got {shown(self.extra_args)}",
            )
            require_plain("extra_args", self.extra_args)
        if self.structured_outputs is not None:
            is_ours = isinstance(self.structured_outputs, StructuredOutputsParams)
            require(
                is_ours,
                "structured_outputs",
                f"must be StructuredOutputsParams, got {type(self.structured_outputs).__name__}",
            )
            for name in STRUCTURED_TEXTS:
                require_plain(f"structured_outputs.{name}", getattr(self.structured_outputs, name))

    @property
    def stop_list(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _token_id(key: Any) -> Any:
    """A key of logit_bias as JSON writes it; what is no id is left for the check to refuse."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key


MAX_TIMEOUT_S = 1e9
LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
OUTPUT_KINDS = frozenset(RequestOutputKind)
FLAGS = tuple(
    field.name
    for field in msgspec.structs.fields(SamplingParams)
    if isinstance(field.default, bool)
)
# Name -> least, greatest, the range in words. The engine uses 32-bit floats.
NUMBER_RANGES = {
    "temperature": (0.0, 1e38, "0 (greedy) or greater, at most 1e38"),
    "top_p": (math.ulp(0.0), 1.0, "greater than 0 and at most 1"),
    "min_p": (0.0, 1.0, "between 0 and 1"),
    "presence_penalty": (-2.0, 2.0, "between -2 and 2"),
    "frequency_penalty": (-2.0, 2.0, "between -2 and 2"),
    "repetition_penalty": (1e-6, 1e6, "greater than 0 (1: off; between 1e-6 and 1e6)"),
}
# Name -> least, greatest, what special values mean.
INTEGER_RANGES = {
    "n": (1, MAX_N, ""),
    "top_k": (-1, INT64_MAX, "0 or -1: all tokens"),
    "seed": (0, INT64_MAX, "-1 or None: drawn"),
    "max_tokens": (1, INT64_MAX, "None: to the end of the context"),
    "min_tokens": (0, INT64_MAX, ""),
    "logprobs": (-1, INT64_MAX, "-1: the whole vocabulary; None: off"),
    "prompt_logprobs": (-1, INT64_MAX, "-1: the whole vocabulary; None: off"),
    "truncate_prompt_tokens": (-1, INT64_MAX, "-1: as many as the context takes; not 0"),
    "stream_interval": (1, INT64_MAX, ""),
}
MAY_BE_NONE = frozenset(
    {"seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"}
)


class PoolingParams(
    msgspec.Struct,
    metaclass=NamedArguments,
    tag="pooling",
    array_like=True,
    omit_defaults=True,
    frozen=True,
    gc=False,
    kw_only=True,
):
    """What a pooling request asks for, under vLLM's names.

    Raises InvalidParameterError on construction and on decoding; the engine checks what depends on
    the model.
    """

    # one of POOLING_TASKS; None: the first that the model supports
    task: str | None = None
    # the length of an embedding, for models that were trained with several (Matryoshka)
    dimensions: int | None = None
    # whether embeddings are normalised, and classes pass through sigmoid or softmax. None: as the
    # model says
    use_activation: bool | None = None
    # -1: as many as the model can read; None: as many as the model's files say (max_seq_length); if
    # they do not say, longer prompts are refused
    truncate_prompt_tokens: int | None = None
    timeout_s: float | None = None  # from submission; then it ends with finish_reason "timeout"
    # compute all tokens of the prompt; resolved by the frontend where pooling reads them all
    skip_reading_prefix_cache: bool | None = None
    # of a pair of texts: the index of the first token of the second; 0: there is one text
    second_text_start: int = 0
    # tokens in front of the text that belong to an instruction ("query: "), with what precedes it.
    # A model with include_prompt: false leaves them out of pooling
    instruction_length: int = 0
    normalize: bool | None = None  # removed from vLLM, too; refused by its new name
    must_fit: bool = False  # prompts that would be cut are refused

    def __post_init__(self) -> None:
        require(self.normalize is None, "normalize", "was removed; use use_activation")
        hint = FORMER_TASKS.get(self.task, "") if isinstance(self.task, str) else ""
        is_task = self.task is None or self.task in POOLING_TASKS
        require_kind(is_task, "task", f"one of {TASKS_IN_WORDS}{hint}", self.task)
        for name in ("use_activation", "skip_reading_prefix_cache"):
            value = getattr(self, name)
            is_valid = value is None or isinstance(value, bool)
            require_kind(is_valid, name, "True, False or None", value)
        require_kind(isinstance(self.must_fit, bool), "must_fit", "True or False", self.must_fit)
        if self.dimensions is not None:
            require_int("dimensions", self.dimensions, 1, INT64_MAX)
        if self.truncate_prompt_tokens is not None:
            require_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, INT64_MAX)
            require(
                self.truncate_prompt_tokens != 0,
                "truncate_prompt_tokens",
                "must be -1, or at least 1, got 0",
            )
        if self.timeout_s is not None:
            require(
                is_finite(self.timeout_s) and 0 < self.timeout_s <= MAX_TIMEOUT_S,
                "timeout_s",
                f"must be greater than 0 and at most {MAX_TIMEOUT_S:.0f} seconds, got "
                f"{shown(self.timeout_s)}",
            )
        require_int("second_text_start", self.second_text_start, 0, INT64_MAX)
        require_int("instruction_length", self.instruction_length, 0, INT64_MAX)

    @property
    def is_by_token(self) -> bool:
        """Whether the result has a row for each token of the prompt."""
        return self.task in ("token_embed", "token_classify")


POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify")
TASKS_IN_WORDS = ", ".join(POOLING_TASKS)
# Names of earlier versions of vLLM -> what to use.
FORMER_TASKS = {
    "score": " (a score is the task classify of a pair)",
    "encode": " (rows by token are the tasks token_embed and token_classify)",
}


def require_sampling(params: SamplingParams | PoolingParams) -> SamplingParams:
    """`params`, which must be SamplingParams: raises TypeError for others."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params: must be SamplingParams, got {type(params).__name__}")
    return params


def child_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request with n > 1: seed + index, as in vLLM.

    Completion 0 is therefore the result of n = 1.
    """
    return (seed + index) % 2**63
