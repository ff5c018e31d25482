"""From the fields of a body to SamplingParams: OpenAI's own and the extensions that vLLM's users know.
May know: SamplingParams, what the APIs call its fields.
Must not know: prompts, the engine's limits (the InputProcessor knows those)."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ...ipc.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from .config import ServerConfig
from .errors import invalid, missing, unsupported

MAX_STOPS = 16  # OpenAI allows 4; its clients' users of other servers are used to more
# The fields that mean in SamplingParams what they mean in a body.
SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "stop",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "allowed_token_ids",
    "bad_words", "truncate_prompt_tokens", "prompt_logprobs",
)  # fmt: skip
Number = int | float


class SamplingBody(msgspec.Struct, kw_only=True):
    """The fields that OpenAI's completions and chat share, and vLLM's extensions to both. None: as if it had not been sent."""

    model: str | None = None
    n: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    seed: int | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, Number] | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    # what vLLM's users know
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI pads its chunks against eavesdroppers; accepted and not needed here
    continuous_usage_stats: bool | None = None  # vLLM's: usage in every chunk


def sampling_params(
    body: SamplingBody,
    defaults: SamplingParams,
    config: ServerConfig,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structured_outputs: StructuredOutputsParams | None = None,
) -> SamplingParams:
    """`defaults`: what the model's authors recommend; `structured_outputs`: what wins over the body's own (a forced tool call).

    Raises ApiError, or InvalidParameterError naming the field.
    """
    given = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    if body.n is not None and body.n > config.max_n:
        raise invalid("n", f"'n' must be at most {config.max_n}, got {body.n}.", "integer_above_max_value")
    if isinstance(body.stop, list) and len(body.stop) > MAX_STOPS:
        raise invalid("stop", f"'stop' can have at most {MAX_STOPS} strings, got {len(body.stop)}.", "array_above_max_length")
    if "stop" in given:
        given["stop"] = [text for text in ([body.stop] if isinstance(body.stop, str) else body.stop) if text] or None
    if body.logit_bias:
        given["logit_bias"] = _logit_bias(body.logit_bias)
    wanted = structured_outputs or _structured_outputs(body)
    start = {field: getattr(defaults, field) for field in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    return SamplingParams(
        **start | given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        structured_outputs=wanted,
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
    )


def _logit_bias(bias: dict[str, Number]) -> dict[int, float]:
    """JSON has only strings as keys."""
    converted = {}
    for key, value in bias.items():
        if not key.lstrip("-").isdigit():
            raise invalid("logit_bias", f"The keys of 'logit_bias' must be token ids, got {key!r:.40}.")
        if not -100 <= value <= 100:
            raise invalid("logit_bias", f"The values of 'logit_bias' must be between -100 and 100, got {value} for token {key}.")
        converted[int(key)] = float(value)
    return converted


def _structured_outputs(body: SamplingBody) -> StructuredOutputsParams | None:
    own = body.structured_outputs
    wanted = response_format(body.response_format)
    if own is None:
        return wanted
    if wanted is not None:
        raise invalid("structured_outputs", "Give 'structured_outputs' or 'response_format', not both.")
    if unknown := own.keys() - set(StructuredOutputsParams.__struct_fields__):
        raise invalid("structured_outputs", f"'structured_outputs' has no {min(unknown)!r}; it has {', '.join(StructuredOutputsParams.__struct_fields__)}.")
    return StructuredOutputsParams(**own)


def response_format(wanted: dict[str, Any] | None) -> StructuredOutputsParams | None:
    """OpenAI's `response_format` object."""
    kind = None if wanted is None else wanted.get("type")
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        raise unsupported("response_format.type", f"'response_format.type' must be text, json_object or json_schema, got {json.dumps(kind)}.")
    inner = wanted.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise missing("response_format.json_schema.schema")
    return StructuredOutputsParams(json=schema)
