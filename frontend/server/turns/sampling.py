"""Converts the fields of a body to SamplingParams: OpenAI's own and vLLM's extensions; and lists
the fields without effect.

Must not know: prompts, the engine's limits (InputProcessor checks those).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ....ipc.checks import INT64_MAX
from ....ipc.errors import InvalidParameterError
from ....ipc.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from ..http.call import HttpCall
from ..http.errors import invalid, refused, unsupported
from ..state import ServerState
from .response_format import (
    GUIDED,
    ConstraintBody,
    JsonOptions,
    kinds_of,
    structured_outputs_of,
)

MAX_STOPS = 16  # OpenAI allows 4; other servers allow more
MAX_LOGPROBS = 20
# OpenAI's fields that have no effect here stand with their neutral values.
IGNORED: dict[str, tuple[Any, ...]] = {
    "user": (),
    "safety_identifier": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "metadata": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "guided_decoding_backend": (),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
}
# Fields for unsupported features stand with their neutral values and the error message.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "This model generates text only: 'audio' is not supported."),
    "modalities": (
        (["text"], []),
        "This model generates text only: 'modalities' can only be [\"text\"].",
    ),
    "prediction": (
        (),
        "Predicted outputs are not supported: omit 'prediction'; the response is the same.",
    ),
    "web_search_options": (
        (),
        "'web_search_options' is not supported: this server cannot search the web.",
    ),
    "moderation": ((), "'moderation' is not supported by this server."),
    "functions": (
        ([],),
        "'functions' is deprecated and not supported; use 'tools'.",
    ),
    "function_call": (
        (),
        "'function_call' is deprecated and not supported; use 'tool_choice'.",
    ),
    "chat_template": (
        (),
        "'chat_template' is not supported in requests; the server's flag --chat-template sets it.",
    ),
    "use_beam_search": ((False,), "Beam search is not supported over HTTP; use LLM.beam_search."),
}

Number = int | float
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0, le=INT64_MAX)]
TokenId = Annotated[int, Meta(ge=0)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI pads its chunks against traffic analysis
    continuous_usage_stats: bool | None = None  # vLLM's extension: usage in every chunk


class SamplingBody(ConstraintBody, kw_only=True):
    """The fields shared by OpenAI's completions and chat, and vLLM's extensions to both.

    None: the field was not sent.
    """

    model: str | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e38)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    logit_bias: (
        dict[
            Annotated[str, Meta(pattern=r"^[0-9]{1,10}$")], Annotated[float, Meta(ge=-100, le=100)]
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # OpenAI's fields that have no effect here
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    # vLLM's extensions
    top_k: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=1e6)] | None = None
    min_tokens: Count | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    guided_decoding_backend: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    priority: Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None


# A model's authors recommend values for these fields.
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# SamplingParams take these fields as they are.
SAME = (set(SamplingBody.__struct_fields__) & set(SamplingParams.__struct_fields__)) - {
    "logit_bias",
    "structured_outputs",
}


def check_fields(body: SamplingBody, call: HttpCall) -> None:
    """Rejects fields for unsupported features, and notes fields that are ignored."""
    for name, (harmless, sentence) in UNSUPPORTED.items():
        value = getattr(body, name, None)
        if value is not None and value not in harmless:
            raise unsupported(name, sentence)
    for name, harmless in IGNORED.items():
        value = getattr(body, name, None)
        if value is not None and value not in harmless:
            call.ignored_params.append(name)
    options = (
        "disable_any_whitespace",
        "disable_additional_properties",
        "guided_whitespace_pattern",
    )
    stated = [name for name in options if getattr(body, name) is not None]
    if stated and structured_outputs_of(body) is None and not getattr(body, "tools", None):
        call.ignored_params += stated
    if body.stream_options is not None:
        if not body.stream:
            raise invalid(
                "stream_options",
                "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            )
        if body.stream_options.include_obfuscation:
            call.ignored_params.append("stream_options.include_obfuscation")
        if body.stream_options.continuous_usage_stats and not body.stream_options.include_usage:
            call.ignored_params.append("stream_options.continuous_usage_stats")
    if body.stream and body.prompt_logprobs is not None:
        raise unsupported(
            "prompt_logprobs",
            "'prompt_logprobs' are not available with 'stream'; 'echo' with 'logprobs' is, in "
            "/v1/completions.",
        )


def openai_fields(body: SamplingBody) -> dict[str, Any]:
    """Returns the fields of a body that `sampling_params` takes."""
    return {name: getattr(body, name) for name in SAME} | {"logit_bias": body.logit_bias}


def sampling_params(
    state: ServerState,
    given: dict[str, Any],
    json: JsonOptions,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    structured_outputs: StructuredOutputsParams | None = None,
    streams: bool | None = False,
    names: dict[str, str] | None = None,
    **overrides: Any,
) -> SamplingParams:
    """Builds SamplingParams from the fields of a body under SamplingParams' names, on top of the
    values that the model's authors recommend. None means that the field was not sent.

    `names` maps the engine's parameters to the body's fields. `overrides` come last.

    Raises ApiError that names the field, or InvalidParameterError if `names` is None.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if (n := given.get("n", 1)) > (most := state.server_config.max_n):
        raise invalid("n", f"'n' must be at most {most}, got {n}.", "integer_above_max_value")
    if (stop := given.get("stop")) is not None:
        if isinstance(stop, list) and len(stop) > MAX_STOPS:
            message = f"'stop' can have at most {MAX_STOPS} strings, got {len(stop)}."
            raise invalid("stop", message, "array_above_max_length")
        given["stop"] = [s for s in ([stop] if isinstance(stop, str) else stop) if s] or None
    if "seed" in given:
        given["seed"] %= INT64_MAX + 1  # the API allows negative values
    if bias := given.pop("logit_bias", None):  # keys in JSON are strings
        given["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}
    defaults = state.ready_engine().get_default_sampling_params()
    fields = {name: getattr(defaults, name) for name in RECOMMENDED} | given
    fields |= {
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "output_kind": RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY,
    }
    try:
        fields["structured_outputs"] = json.applied_to(structured_outputs)
        return SamplingParams(**fields | overrides)
    except InvalidParameterError as error:
        if names is None:
            raise
        raise refused(error.parameter, error.problem, names) from None


def field_names(body: SamplingBody) -> dict[str, str]:
    """Maps the engine's parameters to the fields of this body that set them, where the names
    differ.
    """
    if kinds_of(body.structured_outputs) is not None:
        return {}
    guided = next((name for name in GUIDED if getattr(body, name) is not None), "response_format")
    names = ("structured_outputs", *(f"structured_outputs.{kind}" for kind in GUIDED.values()))
    found = dict.fromkeys(names, guided)
    if body.guided_whitespace_pattern is not None:
        found["structured_outputs.whitespace_pattern"] = "guided_whitespace_pattern"
    return found
