"""SamplingParams: vLLM's defaults, a named error for every bad value, the same checks after a trip over the wire.
May know: SamplingParams, PoolingParams, msgspec.
Must not know: what the engine makes of them."""

import copy
import math

import msgspec
import pytest
from quire import InvalidParameterError, PoolingParams, RequestOutputKind, SamplingParams

BAD = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("n", 0),
    ("n", True),
    ("seed", -1),
    ("seed", 2**63),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0.0),
    ("max_tokens", 0),
    ("max_tokens", 1.0),
    ("min_tokens", -1),
    ("min_tokens", 17),  # more than max_tokens
    ("logprobs", -2),
    ("logprobs", True),
    ("prompt_logprobs", -2),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", 5),
    ("stop", ["x"] * 65),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", 5),
    ("allowed_token_ids", [1.5]),
]


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.stop_list, params.ignore_eos) == (16, 0, [], False)
    assert (params.detokenize, params.skip_special_tokens, params.output_kind) == (True, True, RequestOutputKind.CUMULATIVE)
    assert not params.is_greedy and SamplingParams(temperature=0).is_greedy


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name and str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize(("name", "value"), [("temperature", -1.0), ("top_p", 2.0), ("max_tokens", 0), ("logprobs", -99), ("stop", "")])
def test_a_bad_value_is_refused_when_it_comes_over_the_wire_too(name: str, value: object) -> None:
    fields = SamplingParams.__struct_fields__
    row = [getattr(SamplingParams(), field) if field != name else value for field in fields]
    with pytest.raises((InvalidParameterError, msgspec.ValidationError), match=name):
        msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=SamplingParams)


def test_borders_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1.0, top_k=-1, min_p=1.0, seed=2**63 - 1, max_tokens=None, min_tokens=10**6, logprobs=20)
    assert SamplingParams(stop="a").stop_list == SamplingParams(stop=["a"]).stop_list == ["a"]


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidParameterError, match="stop: needs detokenize=True"):
        SamplingParams(stop="a", detokenize=False)


def test_the_wire_keeps_everything() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"], seed=3, output_kind=RequestOutputKind.DELTA, logit_bias={5: 1.5})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    pooling = PoolingParams(task="classify", dimensions=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(pooling), type=PoolingParams) == pooling


def test_a_request_cannot_change_its_parameters() -> None:
    params = SamplingParams()
    with pytest.raises(AttributeError):
        params.temperature = 2.0
    assert msgspec.structs.replace(params, temperature=0.5).temperature == 0.5 and params.temperature == 1.0
    with pytest.raises(InvalidParameterError):
        msgspec.structs.replace(params, temperature=-1.0)


def test_the_error_survives_copying() -> None:
    """A pool of workers of the user copies errors between its processes: the parameter must come along."""
    error = copy.copy(InvalidParameterError("top_p", "must be at most 1"))
    assert (error.parameter, str(error)) == ("top_p", "top_p: must be at most 1")
