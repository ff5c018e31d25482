"""What a request may ask for: SamplingParams and PoolingParams, under vLLM's names, meanings and defaults.
May know: names, types and ranges.
Must not know: the model, the tokenizer, or what the engine can do yet (frontend/input_processor.py checks those)."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import msgspec

from .errors import InvalidParameterError

ALL_LOGPROBS = -1  # of `logprobs` and `prompt_logprobs`: the whole vocabulary; max_logprobs of the configuration caps both
MAX_STOPS = 64


class RequestOutputKind(IntEnum):
    CUMULATIVE = 0  # every output carries all text and tokens so far
    DELTA = 1  # every output carries only what is new
    FINAL_ONLY = 2  # one output, when the request is finished


def _require(holds: bool, parameter: str, problem: str) -> None:
    if not holds:
        raise InvalidParameterError(parameter, problem)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class StructuredOutputsParams(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False, kw_only=True):
    """What the output must be, from its first token to its last; exactly one of the first five is given. vLLM's names.

    Raises InvalidParameterError on construction and on decoding. Whether the grammar itself is sound, the engine says when it compiles it.
    """

    json: str | dict[str, Any] | None = None  # a JSON schema, as text or as a dict
    regex: str | None = None  # the whole output matches
    choice: list[str] | None = None  # the output is one of these
    grammar: str | None = None  # Lark, or llguidance's own JSON
    json_object: bool = False  # any JSON object
    whitespace_pattern: str | None = None  # between JSON's tokens; a regular expression
    disable_any_whitespace: bool = False  # JSON without any

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURED_KINDS if getattr(self, name) not in (None, False)]
        _require(len(given) == 1, "structured_outputs", f"must give exactly one of {', '.join(STRUCTURED_KINDS)}, got {given or 'none'}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            _require(value is None or isinstance(value, str), f"structured_outputs.{name}", f"must be a string, got {value!r}")
        for name in ("json_object", "disable_any_whitespace"):
            _require(isinstance(getattr(self, name), bool), f"structured_outputs.{name}", "must be True or False")
        is_schema = self.json is None or isinstance(self.json, (str, dict))
        _require(is_schema, "structured_outputs.json", f"must be a schema as a dict or as text, got {type(self.json).__name__}")
        choice = self.choice
        is_choice = choice is None or isinstance(choice, list) and choice and all(isinstance(c, str) and c for c in choice)
        _require(is_choice, "structured_outputs.choice", "must be a list of strings, none of them empty, at least one")


STRUCTURED_KINDS = ("json", "regex", "choice", "grammar", "json_object")


class SamplingParams(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False, kw_only=True):
    """How the tokens of one request are chosen and when it ends. Immutable; `msgspec.structs.replace` makes a changed copy.

    Raises InvalidParameterError, naming the parameter and its range, on construction and on decoding.
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
    truncate_prompt_tokens: int | None = None  # keep the last so many tokens of the prompt; -1: as many as the context takes
    stream_interval: int = 1  # tokens between two outputs of a stream; the first token and the last come at once
    extra_args: dict[str, Any] | None = None  # for the user's own logits processors (config: logits_processors)
    bad_words_token_ids: list[list[int]] = []  # bad_words as the tokenizer writes them; filled by the InputProcessor, not by users

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            _require(is_number and math.isfinite(value), name, f"must be a finite number, got {value!r}")
        for name in ("n", "top_k", "min_tokens"):
            _require(_is_int(getattr(self, name)), name, f"must be an integer, got {getattr(self, name)!r}")
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or _is_int(value), name, f"must be an integer or None, got {value!r}")
        self._check_ranges()
        self._check_lists()

    def _check_ranges(self) -> None:
        _require(self.n >= 1, "n", f"must be at least 1, got {self.n}")
        _require(self.temperature >= 0.0, "temperature", f"must be 0 (greedy) or greater, got {self.temperature}")
        _require(0.0 < self.top_p <= 1.0, "top_p", f"must be greater than 0 and at most 1, got {self.top_p}")
        _require(self.top_k >= -1, "top_k", f"must be 0 or -1 (all tokens) or at least 1, got {self.top_k}")
        _require(0.0 <= self.min_p <= 1.0, "min_p", f"must be between 0 and 1, got {self.min_p}")
        _require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", f"must be between -2 and 2, got {self.presence_penalty}")
        _require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", f"must be between -2 and 2, got {self.frequency_penalty}")
        _require(self.repetition_penalty > 0.0, "repetition_penalty", f"must be greater than 0, got {self.repetition_penalty}")
        _require(self.seed is None or 0 <= self.seed < 2**63, "seed", f"must be between 0 and 2**63 - 1, got {self.seed}")
        at_least_one = self.max_tokens is None or self.max_tokens >= 1
        _require(at_least_one, "max_tokens", f"must be at least 1 or None (to the end of the context), got {self.max_tokens}")
        _require(self.min_tokens >= 0, "min_tokens", f"must be at least 0, got {self.min_tokens}")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens", f"must be at most max_tokens={self.max_tokens}, got {self.min_tokens}",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or value >= ALL_LOGPROBS, name, f"must be at least 0, -1 (the whole vocabulary) or None, got {value}")

    def _check_lists(self) -> None:
        stops = self.stop_list
        _require(isinstance(stops, list) and all(isinstance(s, str) for s in stops), "stop", "must be a string or a list of strings")
        _require(all(stops), "stop", "must not hold an empty string")
        _require(len(stops) <= MAX_STOPS, "stop", f"must hold at most {MAX_STOPS} strings, got {len(stops)}")
        _require(not stops or self.detokenize, "stop", "needs detokenize=True: stop strings are found in the text")
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            _require(ids is None or isinstance(ids, list) and all(_is_int(i) for i in ids), name, "must be a list of token ids")

    @property
    def stop_list(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


# Parameters that nothing in the engine applies yet. Better a refusal than an answer that ignores them: frontend, core and runner ask here.
NOT_YET = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs",
    "truncate_prompt_tokens",
)  # fmt: skip
SAMPLING_DEFAULTS = SamplingParams()


def check_supported(params: SamplingParams) -> None:
    """Raises InvalidParameterError for the first of NOT_YET that is not at its default."""
    for name in NOT_YET:
        value, default = getattr(params, name), getattr(SAMPLING_DEFAULTS, name)
        _require(value == default or value in ([], {}), name, f"is not possible yet: it must be left at {default}, got {value!r}")


class PoolingParams(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False, kw_only=True):
    """What a pooling request wants in place of tokens. The engine refuses it until it can pool."""

    task: str = "embed"
    dimensions: int | None = None
    normalize: bool = True


def child_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request with n > 1: seed + index (vLLM's rule), so completion 0 is what n = 1 would give."""
    return (seed + index) % 2**63
