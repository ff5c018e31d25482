"""From bodies to SamplingParams: defaults, names, and what is refused by its own field.
May know: SamplingBody, SamplingParams.
Must not know: prompts, the engine."""

import pytest

from quire.frontend.server.config import ServerConfig
from quire.frontend.server.errors import ApiError
from quire.frontend.server.sampling import SamplingBody, response_format, sampling_params
from quire.ipc.errors import InvalidParameterError
from quire.ipc.params import RequestOutputKind, SamplingParams

RECOMMENDED = SamplingParams(temperature=0.6, top_k=20)


def params(**fields: object) -> SamplingParams:
    return sampling_params(SamplingBody(**fields), RECOMMENDED, ServerConfig(), max_tokens=5, logprobs=None)


def test_the_models_recommendation_stands_where_the_body_is_silent() -> None:
    assert (params().temperature, params().top_k, params().max_tokens) == (0.6, 20, 5)
    assert (params(temperature=0).temperature, params(top_k=0).top_k) == (0.0, 0)


def test_streams_want_deltas() -> None:
    assert params(stream=True).output_kind == RequestOutputKind.DELTA and params().output_kind == RequestOutputKind.FINAL_ONLY


def test_keys_of_logit_bias_become_numbers() -> None:
    assert params(logit_bias={"7": -100, "8": 1.5}).logit_bias == {7: -100.0, 8: 1.5}


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": 129}, "n"), ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"1": 101}}, "logit_bias"), ({"stop": ["a"] * 17}, "stop")],
)
def test_the_servers_own_limits(fields: dict, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        params(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("fields", [{"temperature": -1}, {"top_p": 0}, {"presence_penalty": 3}, {"seed": -1}, {"min_tokens": 9}])
def test_the_engines_limits(fields: dict) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        params(**fields)
    assert caught.value.parameter == next(iter(fields))


def test_response_formats() -> None:
    assert response_format({"type": "text"}) is None and response_format({"type": "json_object"}).json_object
    assert response_format({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}).json == {"type": "object"}
    for bad, param in [({"type": "xml"}, "response_format.type"), ({"type": "json_schema"}, "response_format.json_schema.schema")]:
        with pytest.raises(ApiError) as caught:
            response_format(bad)
        assert caught.value.param == param
