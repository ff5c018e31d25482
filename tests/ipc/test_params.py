"""SamplingParams: vLLM's defaults, and the same checks after decoding.
tests/test_parameter_bounds.py has every bound.
"""

import copy

import msgspec
import pytest
from quire import InvalidParameterError, PoolingParams, RequestOutputKind, SamplingParams


def test_defaults_equal_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (
        1,
        1.0,
        1.0,
        0,
        0.0,
    )
    assert (params.max_tokens, params.min_tokens, params.stop_list, params.ignore_eos) == (
        16,
        0,
        [],
        False,
    )
    assert (params.detokenize, params.skip_special_tokens, params.output_kind) == (
        True,
        True,
        RequestOutputKind.CUMULATIVE,
    )
    assert not params.is_greedy and SamplingParams(temperature=0).is_greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("top_p", 2.0), ("max_tokens", 0), ("logprobs", -99), ("stop", "")],
)
def test_a_bad_value_is_refused_when_decoded(name: str, value: object) -> None:
    fields = SamplingParams.__struct_fields__
    values = [getattr(SamplingParams(), field) if field != name else value for field in fields]
    row = ["sampling", *values]
    with pytest.raises((InvalidParameterError, msgspec.ValidationError), match=name):
        msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=SamplingParams)


def test_bounds_are_allowed() -> None:
    SamplingParams(
        temperature=0,
        top_p=1.0,
        top_k=-1,
        min_p=1.0,
        seed=2**63 - 1,
        max_tokens=None,
        min_tokens=10**6,
        logprobs=20,
    )
    assert SamplingParams(stop="a").stop_list == SamplingParams(stop=["a"]).stop_list == ["a"]


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidParameterError, match="stop: needs detokenize=True"):
        SamplingParams(stop="a", detokenize=False)


def test_the_wire_keeps_all_fields() -> None:
    params = SamplingParams(
        temperature=0.5,
        stop=["a"],
        seed=3,
        output_kind=RequestOutputKind.DELTA,
        logit_bias={5: 1.5},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    pooling = PoolingParams(task="classify", dimensions=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(pooling), type=PoolingParams) == pooling


def test_a_request_cannot_change_its_parameters() -> None:
    params = SamplingParams()
    with pytest.raises(AttributeError):
        params.temperature = 2.0
    assert (
        msgspec.structs.replace(params, temperature=0.5).temperature == 0.5
        and params.temperature == 1.0
    )
    with pytest.raises(InvalidParameterError):
        msgspec.structs.replace(params, temperature=-1.0)


def test_the_error_survives_copying() -> None:
    """A user's process pool copies errors between processes, so the parameter must be part of the
    copy.
    """
    error = copy.copy(InvalidParameterError("top_p", "must be at most 1"))
    assert (error.parameter, str(error)) == ("top_p", "top_p: must be at most 1")
