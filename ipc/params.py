"""SamplingParams and PoolingParams, under vLLM's names, meanings and defaults.

Must not know: the model, the tokenizer, or what the engine supports
(frontend/requests/input_processor.py checks those).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
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


class CheckedParams(
    msgspec.Struct,
    metaclass=NamedArguments,
    array_like=True,
    omit_defaults=True,
    frozen=True,
    gc=False,
):
    """Parameters that users write. CHECKS has a row for each field that can be wrong. Construction
    and decoding raise InvalidParameterError, which names the parameter and its range.
    """

    def __post_init__(self) -> None:
        for name, default, check in CHECKS[type(self)]:
            if (value := getattr(self, name)) is not default:
                check(self, name, value)


class RequestOutputKind(IntEnum):
    CUMULATIVE = 0  # every output has all text and tokens so far
    DELTA = 1  # every output has only what is new
    FINAL_ONLY = 2  # one output, when the request is finished


# Whitespace between two JSON tokens by default: none, one space, or one line break and an
# indentation. Without a bound, a small model can write whitespace until its context is full.
JSON_WHITESPACE = r"( |\n[ \t]{0,20})?"


class StructuredOutputsParams(CheckedParams, frozen=True, kw_only=True):
    """Constrains the whole output; exactly one of the first five fields is given. vLLM's names.

    The engine reports an invalid grammar when it compiles it.
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
        CheckedParams.__post_init__(self)

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


class SamplingParams(CheckedParams, tag="sampling", frozen=True, kw_only=True):
    """How the tokens of one request are sampled, and when it ends.

    Immutable; `msgspec.structs.replace` makes a changed copy. As in vLLM, tuples stand for lists,
    seed=-1 for None, and keys of logit_bias may be text ("42", as JSON has them).
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
    bad_words_token_ids: list[list[int]] | None = None
    # seconds after submission, at which it ends with finish reason "timeout"; None: no limit
    timeout_s: float | None = None

    def clone(self) -> SamplingParams:
        """A copy that shares no list or dict with this one."""
        return copy.deepcopy(self)

    @property
    def stop_list(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


class PoolingParams(CheckedParams, tag="pooling", frozen=True, kw_only=True):
    """What a pooling request asks for, under vLLM's names. The engine checks what depends on the
    model.
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
    # compute all tokens of the prompt; the frontend sets it where pooling reads them all
    skip_reading_prefix_cache: bool | None = None
    # for a pair of texts, the index of the second text's first token; 0: there is one text
    second_text_start: int = 0
    # tokens in front of the text that belong to an instruction ("query: "), with what precedes it.
    # A model with include_prompt: false leaves them out of pooling
    instruction_length: int = 0
    normalize: bool | None = None  # removed from vLLM, too; refused by its new name
    must_fit: bool = False  # prompts that would be cut are refused

    @property
    def is_by_token(self) -> bool:
        """Whether the result has a row for each token of the prompt."""
        return self.task in ("token_embed", "token_classify")


POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify")
# Names of earlier versions of vLLM -> what to use.
FORMER_TASKS = {
    "score": " (a score is the task classify of a pair)",
    "encode": " (rows by token are the tasks token_embed and token_classify)",
}


def with_checked(params: SamplingParams, **values: Any) -> SamplingParams:
    """A copy with these values, which the caller has checked: msgspec.structs.replace would check
    all fields again.
    """
    changed = copy.copy(params)
    for name, value in values.items():
        _set(changed, name, value)
    return changed


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


# ---------------------------------------------------------------- checks

# Called with the parameters, and the name and value of one that is not the default. It may bring
# another form of the value into the one that is sent.
Check = Callable[[Any, str, Any], None]


def _number(low: float, high: float, words: str) -> Check:
    """A finite number in this range, which `words` describe; it becomes a float."""

    def check(params: Any, name: str, value: Any) -> None:
        if type(value) is not float or not low <= value <= high:
            require_kind(is_finite(value) and low <= value <= high, name, words, value)
            _set(params, name, float(value))

    return check


def _integer(low: int, meaning: str = "", high: int = INT64_MAX, *, or_none: bool = False) -> Check:
    """`meaning` explains special values."""

    def check(params: Any, name: str, value: Any) -> None:
        if value is not None or not or_none:
            require_int(name, value, low, high, meaning)

    return check


def _instance(type_: Any, kind: str) -> Check:
    def check(params: Any, name: str, value: Any) -> None:
        require_kind(isinstance(value, type_), name, kind, value)

    return check


def _token_ids(params: Any, name: str, value: Any) -> None:
    require_token_ids(name, _as_list(params, name, value))


def _as_list(params: Any, name: str, value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    _set(params, name, list(value))
    return list(value)


def _check_seed(params: SamplingParams, name: str, value: Any) -> None:
    if value == -1:
        _set(params, name, None)
    else:
        require_int(name, value, 0, INT64_MAX, "-1 or None: drawn")


def _check_min_tokens(params: SamplingParams, name: str, value: Any) -> None:
    require_int(name, value, 0, INT64_MAX)
    fits = params.max_tokens is None or value <= params.max_tokens
    require(fits, name, f"must be at most max_tokens={params.max_tokens}, got {value}")


def _check_truncation(params: Any, name: str, value: Any) -> None:
    if isinstance(params, SamplingParams):
        meaning = "-1: as many as the context takes; not 0"
        words = "at least 1, -1 (as many as the context takes) or None"
    else:
        meaning, words = "", "-1, or at least 1"
    require_int(name, value, -1, INT64_MAX, meaning)
    require_kind(value != 0, name, words, value)


def _check_output_kind(params: SamplingParams, name: str, value: Any) -> None:
    if type(value) is not RequestOutputKind:  # a message has its number
        is_kind = is_int(value) and value in frozenset(RequestOutputKind)
        require_kind(is_kind, name, "a RequestOutputKind", value)


def _check_stop(params: SamplingParams, name: str, value: Any) -> None:
    value = _as_list(params, name, value)
    kind = "a string or a list of strings"
    require_kind(isinstance(value, (str, list)), name, kind, value)
    require_texts(name, params.stop_list, MAX_STOPS)
    problem = "needs detokenize=True: stop strings are found in the text"
    require(not value or params.detokenize, name, problem)


def _check_bad_words(params: SamplingParams, name: str, value: Any) -> None:
    words = _as_list(params, name, value)
    require_texts(name, words, MAX_BAD_WORDS)
    require(all(w.strip(" ") for w in words), name, "must not hold a string of spaces alone")


def _check_allowed(params: SamplingParams, name: str, value: Any) -> None:
    _token_ids(params, name, value)
    require(value, name, "must not be empty: no token would be left to sample")


def _check_logit_bias(params: SamplingParams, name: str, value: Any) -> None:
    require_kind(isinstance(value, dict), name, "a dict from token ids to numbers", value)
    if any(isinstance(key, str) for key in value):  # as JSON writes ids
        changed = {
            int(k) if isinstance(k, str) and k.isascii() and k.isdigit() else k: bias
            for k, bias in value.items()
        }
        problem = "must give each token id once, as a number or as text"
        require(len(changed) == len(value), name, problem)
        _set(params, name, changed)
        value = changed
    require_token_ids(name, list(value))
    for token_id, bias in value.items():
        if not is_finite(bias):
            problem = f"must hold finite numbers, got {shown(bias)} for token {token_id}"
            raise InvalidParameterError(name, problem)


def _check_bad_words_token_ids(params: SamplingParams, name: str, value: Any) -> None:
    require(isinstance(value, list), name, "must be a list of lists of token ids")
    for token_ids in value:
        require_token_ids(name, token_ids)
        require(token_ids, name, "must not hold an empty list")


def _check_extra_args(params: SamplingParams, name: str, value: Any) -> None:
    require_kind(isinstance(value, dict), name, "a dict", value)
    require_plain(name, value)


def _check_structured_outputs(params: SamplingParams, name: str, value: Any) -> None:
    problem = f"must be StructuredOutputsParams, got {type(value).__name__}"
    require(isinstance(value, StructuredOutputsParams), name, problem)
    for text in STRUCTURED_TEXTS:
        require_plain(f"{name}.{text}", getattr(value, text))


def _structured(holds: Callable[[Any], object], problem: str) -> Check:
    """A check of one field of StructuredOutputsParams."""

    def check(params: Any, name: str, value: Any) -> None:
        if value is None or not holds(value):
            got = problem.format(shown=shown(value), type=type(value).__name__)
            raise InvalidParameterError(f"structured_outputs.{name}", got)

    return check


def _is_choice(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(c, str) and c for c in value)


def _check_task(params: PoolingParams, name: str, value: Any) -> None:
    hint = FORMER_TASKS.get(value, "") if isinstance(value, str) else ""
    kind = f"one of {', '.join(POOLING_TASKS)}{hint}"
    require_kind(value in POOLING_TASKS, name, kind, value)


def _refuse_normalize(params: PoolingParams, name: str, value: Any) -> None:
    raise InvalidParameterError(name, "was removed; use use_activation")


def _rows(type_: type[CheckedParams], checks: dict[str, Check]) -> list[tuple[str, Any, Check]]:
    defaults = {field.name: field.default for field in msgspec.structs.fields(type_)}
    flags = {name: FLAG for name, default in defaults.items() if isinstance(default, bool)}
    all_checks = checks | {name: flag for name, flag in flags.items() if name not in checks}
    return [(name, defaults[name], check) for name, check in all_checks.items()]


_set = msgspec.structs.force_setattr  # while the object is made: it is frozen afterwards
MAX_TIMEOUT_S = 1e9
ABOVE_ZERO = math.ulp(0.0)  # the least float
FLAG = _instance(bool, "True or False")
STRUCTURED_TEXT = _structured(lambda value: isinstance(value, str), "must be a string, got {shown}")
STRUCTURED_FLAG = _structured(lambda value: isinstance(value, bool), "must be True or False")
# The engine uses 32-bit floats.
CHECKS: dict[type, list[tuple[str, Any, Check]]] = {
    SamplingParams: _rows(
        SamplingParams,
        {
            "temperature": _number(0.0, 1e38, "0 (greedy) or greater, at most 1e38"),
            "top_p": _number(ABOVE_ZERO, 1.0, "greater than 0 and at most 1"),
            "min_p": _number(0.0, 1.0, "between 0 and 1"),
            "presence_penalty": _number(-2.0, 2.0, "between -2 and 2"),
            "frequency_penalty": _number(-2.0, 2.0, "between -2 and 2"),
            "repetition_penalty": _number(
                1e-6, 1e6, "greater than 0 (1: off; between 1e-6 and 1e6)"
            ),
            "n": _integer(1, high=MAX_N),
            "top_k": _integer(-1, "0 or -1: all tokens"),
            "seed": _check_seed,
            "max_tokens": _integer(1, "None: to the end of the context", or_none=True),
            "min_tokens": _check_min_tokens,
            "logprobs": _integer(-1, "-1: the whole vocabulary; None: off"),
            "prompt_logprobs": _integer(-1, "-1: the whole vocabulary; None: off"),
            "truncate_prompt_tokens": _check_truncation,
            "stream_interval": _integer(1),
            "timeout_s": _number(
                ABOVE_ZERO,
                MAX_TIMEOUT_S,
                f"greater than 0 and at most {MAX_TIMEOUT_S:g} (None: no limit)",
            ),
            "output_kind": _check_output_kind,
            "stop": _check_stop,
            "bad_words": _check_bad_words,
            "stop_token_ids": _token_ids,
            "allowed_token_ids": _check_allowed,
            "logit_bias": _check_logit_bias,
            "bad_words_token_ids": _check_bad_words_token_ids,
            "extra_args": _check_extra_args,
            "structured_outputs": _check_structured_outputs,
        },
    ),
    StructuredOutputsParams: _rows(
        StructuredOutputsParams,
        {
            "regex": STRUCTURED_TEXT,
            "grammar": STRUCTURED_TEXT,
            "whitespace_pattern": STRUCTURED_TEXT,
            "json_object": STRUCTURED_FLAG,
            "disable_any_whitespace": STRUCTURED_FLAG,
            "disable_additional_properties": STRUCTURED_FLAG,
            "json": _structured(
                lambda value: isinstance(value, (str, dict)),
                "must be a schema as a dict or as text, got {type}",
            ),
            "choice": _structured(
                _is_choice, "must be a list of strings, none of them empty, at least one"
            ),
        },
    ),
    PoolingParams: _rows(
        PoolingParams,
        {
            "normalize": _refuse_normalize,
            "task": _check_task,
            "use_activation": _instance(bool, "True, False or None"),
            "skip_reading_prefix_cache": _instance(bool, "True, False or None"),
            "dimensions": _integer(1),
            "truncate_prompt_tokens": _check_truncation,
            "timeout_s": _number(
                ABOVE_ZERO,
                MAX_TIMEOUT_S,
                f"greater than 0 and at most {MAX_TIMEOUT_S:.0f} seconds",
            ),
            "second_text_start": _integer(0),
            "instruction_length": _integer(0),
        },
    ),
}
