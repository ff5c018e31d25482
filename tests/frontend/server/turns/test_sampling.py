"""Conversion of bodies to SamplingParams: defaults, names, refusals that name the field, and
ignored fields that are reported.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.http.call import HttpCall
from quire.frontend.server.http.errors import ApiError
from quire.frontend.server.routes.chat import ChatBody
from quire.frontend.server.turns.response_format import json_options, structured_outputs_of
from quire.frontend.server.turns.sampling import (
    IGNORED,
    UNSUPPORTED,
    SamplingBody,
    StreamOptions,
    check_fields,
    field_names,
    openai_fields,
    sampling_params,
)
from quire.ipc.errors import InvalidParameterError
from quire.ipc.params import RequestOutputKind, SamplingParams

RECOMMENDED = SamplingParams(temperature=0.6, top_k=20)


def params_of(
    body: SamplingBody,
    config: ServerConfig = ServerConfig(),
    defaults: SamplingParams = SamplingParams(),
    **options: Any,
) -> SamplingParams:
    """Those of a server with this configuration, whose model's authors recommend `defaults`."""
    engine = SimpleNamespace(get_default_sampling_params=lambda: defaults)
    state: Any = SimpleNamespace(server_config=config, ready_engine=lambda: engine)
    return sampling_params(
        state,
        openai_fields(body),
        json_options(body, config),
        structured_outputs=structured_outputs_of(body),
        streams=body.stream,
        **options,
    )


def params(names: dict[str, str] | None = None, **fields: object) -> SamplingParams:
    body = SamplingBody(**fields)
    return params_of(body, defaults=RECOMMENDED, max_tokens=5, names=names)


def test_the_models_defaults_apply_if_the_body_has_none() -> None:
    assert (params().temperature, params().top_k, params().max_tokens) == (0.6, 20, 5)
    assert (params(temperature=0).temperature, params(top_k=0).top_k) == (0.0, 0)


def test_streams_use_deltas() -> None:
    assert (
        params(stream=True).output_kind == RequestOutputKind.DELTA
        and params().output_kind == RequestOutputKind.FINAL_ONLY
    )


def test_keys_of_logit_bias_become_numbers_and_an_empty_stop_stops_nothing() -> None:
    assert params(logit_bias={"7": -100, "8": 1.5}).logit_bias == {7: -100.0, 8: 1.5}
    assert params(stop="").stop is None and params(stop=["", "a"]).stop == ["a"]


def test_a_negative_seed_is_valid() -> None:
    assert (
        params(seed=-1).seed == 2**63 - 1
        and params(seed=-(2**63)).seed == 0
        and params(seed=7).seed == 7
    )


@pytest.mark.parametrize(("fields", "param"), [({"n": 129}, "n"), ({"stop": ["a"] * 17}, "stop")])
def test_the_servers_own_limits(fields: dict, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        params(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [{"temperature": -1}, {"top_p": 0}, {"presence_penalty": 3}, {"min_tokens": 9}, {"top_k": -2}],
)
def test_the_engines_limits(fields: dict) -> None:
    with pytest.raises(ApiError) as caught:
        params(names={}, **fields)
    assert caught.value.param == next(iter(fields)) and caught.value.status == 400
    with pytest.raises(InvalidParameterError):
        params(**fields)


def test_errors_use_the_names_of_the_body() -> None:
    body = SamplingBody(guided_regex="a")
    assert (
        field_names(body)["structured_outputs.regex"] == "guided_regex"
        and field_names(SamplingBody())["structured_outputs"] == "response_format"
    )
    with pytest.raises(ApiError) as caught:
        params_of(body, max_tokens=0, names={"max_tokens": "max_completion_tokens"})
    assert caught.value.param == "max_completion_tokens"


def checked(**fields: Any) -> HttpCall:
    async def run() -> HttpCall:
        call = HttpCall("req-1", 0.0, asyncio.current_task())
        check_fields(ChatBody(messages=[], **fields), call)
        return call

    return asyncio.run(run())


def test_ignored_fields_are_reported() -> None:
    call = checked(
        user="me",
        metadata={"a": "b"},
        store=True,
        service_tier="flex",
        verbosity="low",
        prompt_cache_key="k",
    )
    assert call.ignored_params == [
        "user",
        "prompt_cache_key",
        "metadata",
        "store",
        "service_tier",
        "verbosity",
    ]
    assert (
        b"x-ignored-params",
        b"user,prompt_cache_key,metadata,store,service_tier,verbosity",
    ) in call.headers(1.0)
    assert (
        checked(store=False, service_tier="auto", metadata={}, verbosity="medium").ignored_params
        == []
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"audio": {"voice": "x"}},
        {"modalities": ["text", "audio"]},
        {"prediction": {}},
        {"web_search_options": {}},
        {"moderation": {"model": "x"}},
        {"functions": [{}]},
        {"function_call": "auto"},
        {"chat_template": "{{ 1 }}"},
        {"use_beam_search": True},
    ],
)
def test_unsupported_fields_of_the_api_are_refused(fields: dict) -> None:
    with pytest.raises(ApiError) as caught:
        checked(**fields)
    assert (caught.value.status, caught.value.code, caught.value.param) == (
        400,
        "unsupported_value",
        next(iter(fields)),
    )
    assert checked(modalities=["text"], functions=[], use_beam_search=False).ignored_params == []


def test_every_ignored_or_refused_field_is_a_field_of_the_body() -> None:
    fields = set(ChatBody.__struct_fields__)
    assert not IGNORED.keys() & UNSUPPORTED.keys() and IGNORED.keys() | UNSUPPORTED.keys() <= fields


def test_stream_options_need_a_stream() -> None:
    with pytest.raises(ApiError) as caught:
        checked(stream_options=StreamOptions(include_usage=True))
    assert caught.value.param == "stream_options"
    assert checked(
        stream=True, stream_options=StreamOptions(include_obfuscation=True)
    ).ignored_params == ["stream_options.include_obfuscation"]
    assert checked(
        stream=True, stream_options=StreamOptions(continuous_usage_stats=True)
    ).ignored_params == ["stream_options.continuous_usage_stats"]
    with pytest.raises(ApiError, match="prompt_logprobs"):
        checked(stream=True, prompt_logprobs=1)
