"""The value checks alone: accepted values and messages. tests/test_parameter_bounds.py tests them
through the parameters.
"""

import math

import pytest
from quire import (
    BeamSearchParams,
    EngineArgs,
    InvalidParameterError,
    LoRARequest,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.ipc import checks


def problem(check, *args) -> str | None:
    try:
        check("name", *args)
    except InvalidParameterError as error:
        assert error.parameter == "name"
        return error.problem
    return None


@pytest.mark.parametrize(
    ("params", "arguments", "near"),
    [
        (SamplingParams, {"temprature": 1}, "temperature"),
        (SamplingParams, {"max_token": 1}, "max_tokens"),
        (PoolingParams, {"dimension": 3}, "dimensions"),
        (StructuredOutputsParams, {"regexp": "a"}, "regex"),
        (BeamSearchParams, {"beam_width": 1, "max_tokens": 1, "ignore_eot": True}, "ignore_eos"),
        (LoRARequest, {"lora_name": "a", "lora_int_id": 1, "lora_paht": "b"}, "lora_path"),
        (EngineArgs, {"max_model_length": 5}, "max_model_len"),
    ],
)
def test_a_misspelled_argument_names_the_nearest(params, arguments: dict, near: str) -> None:
    wrong = next(reversed(arguments))
    words = f"^{wrong}: there is no such argument; did you mean {near}\\?$"
    with pytest.raises(InvalidParameterError, match=words):
        params(**arguments)


def test_other_errors_of_a_call_stay_type_errors() -> None:
    with pytest.raises(InvalidParameterError, match="^frobnicate: there is no such argument$"):
        SamplingParams(frobnicate=1)
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(1)
    with pytest.raises(TypeError, match="lora_path"):
        LoRARequest("a", 1)


def test_integers_and_their_ranges_in_words() -> None:
    assert problem(checks.require_int, 5, 0, 5) is None
    assert problem(checks.require_int, 6, 0, 5) == "must be an integer between 0 and 5, got 6"
    assert (
        problem(checks.require_int, True, 0, checks.INT64_MAX, "0: off")
        == "must be an integer between 0 and 2**63 - 1 (0: off), got True"
    )


def test_finite_numbers() -> None:
    assert all(map(checks.is_finite, (0, -1, 1.5, 1e308, 2**1000)))
    assert not any(map(checks.is_finite, (True, "1", None, math.nan, math.inf, 10**400)))


def test_any_value_has_a_short_text() -> None:
    class RaisingRepr:
        def __repr__(self):
            raise RuntimeError

    assert (
        checks.shown("x") == "'x'" and checks.shown(RaisingRepr()) == "RaisingRepr (RuntimeError)"
    )
    assert checks.shown(10**5000) == "int (ValueError)"
    assert len(checks.shown(["x"] * 10**4)) < 110


@pytest.mark.parametrize("depth", [1, checks.MAX_DEPTH - 1])
def test_plain_data(depth) -> None:
    nested = {"a": [None, True, 5, 0.5, "é"]}
    for _ in range(depth - 3):
        nested = [nested]
    assert problem(checks.require_plain, nested) is None


def test_values_that_are_not_plain() -> None:
    too_deep = 5
    for _ in range(checks.MAX_DEPTH):
        too_deep = [too_deep]
    assert (
        problem(checks.require_plain, too_deep) == f"must be at most {checks.MAX_DEPTH} levels deep"
    )
    assert problem(checks.require_plain, {"a": {1: 2}}) == "must be a string, got 1"
    assert "got bytes" in problem(checks.require_plain, [b"x"])
    assert "lone surrogate" in problem(checks.require_plain, ["\ud800"])


def test_lists() -> None:
    assert (
        problem(checks.require_texts, ["a", "b"], 2) is None
        and problem(checks.require_token_ids, [0, 2**31 - 1]) is None
    )
    assert problem(checks.require_texts, ["a", "b", "c"], 2) == "must hold at most 2 strings, got 3"
    assert problem(checks.require_texts, [""], 2) == "must not hold an empty string"
    assert "between 0 and 2**31 - 1, got -1" in problem(checks.require_token_ids, [5, -1])


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("temprature", "temperature"),
        ("temperatur", "temperature"),
        ("prot", "port"),
        ("block", None),
        ("batch_size", None),
        ("top", None),
        ("", None),
    ],
)
def test_a_suggestion_is_close(word: str, found: str | None) -> None:
    assert checks.closest(word, ["temperature", "block_size", "port", "n", "model"]) == found
