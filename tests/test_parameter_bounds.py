"""Every request parameter at and beyond its bounds. Values in range are accepted. All others raise
an error that names the parameter and its range.
"""

from __future__ import annotations

import math
import re

import msgspec
import pytest
from quire import InvalidParameterError, RequestOutputKind, SamplingParams
from quire.core.arrivals import RequestLimits, check_request
from quire.frontend.requests.input_processor import InputProcessor
from quire.ipc.messages import EngineCoreRequest
from quire.ipc.params import MAX_BAD_WORDS, MAX_N, MAX_STOPS, StructuredOutputsParams
from quire.tests.frontend.tiny_tokenizers import text_config, tiny_tokenizer

VOCAB_SIZE, MAX_MODEL_LEN = 320, 64
INT64_MAX = 2**63 - 1
# beyond 64 bits, beyond a float, beyond the digits that Python prints
HUGE = (2**63, -(2**63) - 1, 10**400, -(10**5000))
NO_NUMBER = (None, "1", True, [1], {}, 1j, math.nan, math.inf, -math.inf, 10**400, -(10**5000))
NO_INTEGER = ("1", True, False, 1.0, 1.5, [1], math.nan, math.inf)
NO_FLAG = (None, 0, 1, "yes", 1.0)
LONE = "half \ud800"  # half of a surrogate pair
NO_IDS = ("5", 5, {5}, [True], [5.0], ["5"], [None], [[5]], [2**31], [10**5000], [-1])
DEEP: list = []
for _ in range(10_000):
    DEEP = [DEEP]
CIRCLE: dict = {}
CIRCLE["again"] = CIRCLE

# Parameter, accepted values, refused values. Other parameters that a value requires are in
# REQUIRED_WITH.
TABLE = [
    ("n", (1, 2, MAX_N), (*NO_INTEGER, *HUGE, None, 0, -1, MAX_N + 1)),
    ("temperature", (0, 0.0, 1e-9, 1, 2.0, 1e38), (*NO_NUMBER, -1e-9, -0.1, 1.1e38)),
    ("top_p", (1e-300, 0.5, 1, 1.0), (*NO_NUMBER, 0, 0.0, -0.5, 1.0000001)),
    ("top_k", (-1, 0, 1, VOCAB_SIZE, VOCAB_SIZE + 1, INT64_MAX), (*NO_INTEGER, *HUGE, None, -2)),
    ("min_p", (0, 0.0, 0.5, 1), (*NO_NUMBER, -1e-9, 1.0000001)),
    ("seed", (None, -1, 0, INT64_MAX), (*NO_INTEGER, *HUGE, -2)),
    ("presence_penalty", (-2, 0, 2.0), (*NO_NUMBER, -2.000001, 2.000001)),
    ("frequency_penalty", (-2, 0, 2.0), (*NO_NUMBER, -2.000001, 2.000001)),
    ("repetition_penalty", (1e-6, 1, 1e6), (*NO_NUMBER, 0, 0.0, -1.0, 1e-7, 1.1e6)),
    ("max_tokens", (None, 1, MAX_MODEL_LEN, INT64_MAX), (*NO_INTEGER, *HUGE, 0, -1)),
    ("min_tokens", (0, 16), (*NO_INTEGER, *HUGE, None, -1, 17)),
    (
        "stop",
        (None, [], "x", ("x",), ["x"] * MAX_STOPS, ["🤖"]),
        ("", ["x", ""], 5, b"x", {"x"}, [5], [None], ["x"] * (MAX_STOPS + 1), LONE, [LONE]),
    ),
    ("stop_token_ids", (None, [], [0], (5,), [VOCAB_SIZE - 1]), (*NO_IDS, [VOCAB_SIZE])),
    ("include_stop_str_in_output", (True, False), NO_FLAG),
    ("ignore_eos", (True, False), NO_FLAG),
    ("detokenize", (True, False), NO_FLAG),
    ("skip_special_tokens", (True, False), NO_FLAG),
    ("spaces_between_special_tokens", (True, False), NO_FLAG),
    ("logprobs", (None, 0, 20), (*NO_INTEGER, *HUGE, -2, -1, 21)),
    ("prompt_logprobs", (None, 0, 20), (*NO_INTEGER, *HUGE, -2, -1, 21)),
    ("output_kind", (*RequestOutputKind, 0, 1, 2), (None, -1, 3, True, "delta", 1.0, 10**5000)),
    (
        "logit_bias",
        (None, {}, {0: 1}, {"5": 1.0}, {VOCAB_SIZE - 1: -100.0}, {5: 1e300}),
        (
            *({5: value} for value in NO_NUMBER),
            {"-5": 1.0},
            {"five": 1.0},
            {"5": 1.0, 5: 2.0},
            {True: 1.0},
            {5.0: 1.0},
            {-1: 1.0},
            {VOCAB_SIZE: 1.0},
            {2**70: 1.0},
            [5],
            "5",
            [(5, 1.0)],
        ),
    ),
    ("allowed_token_ids", (None, [0], [VOCAB_SIZE - 1], [5] * 1000), (*NO_IDS, [], [VOCAB_SIZE])),
    (
        "bad_words",
        (None, [], ["x"], [" x"], ["\n"], ["the cat"], ("x",), ["x"] * MAX_BAD_WORDS),
        ("x", 5, [5], [""], [" "], ["   "], [LONE], ["x"] * (MAX_BAD_WORDS + 1)),
    ),
    ("bad_words_token_ids", ([],), ([[5]], [[]], [5], [[2**70]], [["a"]])),
    (
        "structured_outputs",
        (None, StructuredOutputsParams(regex="a+")),
        ({"regex": "a+"}, "a+", 5, []),
    ),
    (
        "truncate_prompt_tokens",
        (None, -1, 1, MAX_MODEL_LEN - 1),
        (*NO_INTEGER, *HUGE, 0, -2, MAX_MODEL_LEN),
    ),
    (
        "timeout_s",
        (None, 1, 0.001, 1e9),
        (0, -1, 1e10, math.nan, math.inf, "1", True, [1], 10**5000),
    ),
    ("stream_interval", (1, 2, INT64_MAX), (*NO_INTEGER, *HUGE, None, 0, -1)),
    (
        "extra_args",
        (None, {}, {"a": [1, 2.5, None, True, "x", {"b": -(2**63)}]}, {"x": math.inf}),
        (
            "x",
            [1],
            5,
            {1: 2},
            {"a": object()},
            {"a": 2**63},
            {"a": 10**5000},
            {"a": LONE},
            {LONE: 1},
            {"a": b"x"},
            {"a": (1,)},
            {"a": DEEP},
            CIRCLE,
        ),
    ),
]
REQUIRED_WITH = {"min_tokens": {"max_tokens": 16}}


def cases(column: int) -> list:
    return [
        pytest.param(row[0], value, id=f"{row[0]}-{i}")
        for row in TABLE
        for i, value in enumerate(row[column])
    ]


def processed(
    prompt="a prompt", *, max_logprobs: int = 20, tokenizer=tiny_tokenizer(), priority=0, **params
) -> EngineCoreRequest:
    """Return what the engine receives. The engine accepts whatever the frontend accepts."""
    config = text_config(
        max_model_len=MAX_MODEL_LEN,
        max_logprobs=max_logprobs,
        skip_tokenizer_init=tokenizer is None,
    )
    processor = InputProcessor(config, tokenizer, [302])
    core_request = processor.process_inputs(
        "r", prompt, SamplingParams(**params), priority=priority
    ).core_request
    check_request(core_request, RequestLimits.of(config))
    return core_request


def refused(parameter: str, words: str, *args, **options) -> None:
    with pytest.raises(InvalidParameterError, match=words) as refusal:
        processed(*args, **options)
    assert refusal.value.parameter == parameter


def test_the_table_has_every_parameter() -> None:
    assert [name for name, _, _ in TABLE if name not in SamplingParams.__struct_fields__] == []
    assert {name for name, _, _ in TABLE} == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(("name", "value"), cases(1))
def test_in_range(name: str, value: object) -> None:
    params = processed(**{**REQUIRED_WITH.get(name, {}), name: value}).sampling_params
    # a message can hold it
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(("name", "value"), cases(2))
def test_out_of_range(name: str, value: object) -> None:
    with pytest.raises(InvalidParameterError) as refusal:
        processed(**{**REQUIRED_WITH.get(name, {}), name: value})
    assert refusal.value.parameter == name
    words = str(refusal.value)
    assert (
        words.startswith(f"{name}: ") and re.search("must|needs|is not", words) and len(words) < 400
    )
    words.encode()


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_numpy_like_numbers_become_plain(name) -> None:
    class Float64(float):
        """Like numpy.float64: a subclass of float that no message can hold."""

    value = getattr(SamplingParams(**{name: Float64(0.5)}), name)
    assert (
        value == 0.5
        and type(value) is float
        and type(getattr(SamplingParams(**{name: 1}), name)) is float
    )


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("regex", (LONE, 5)),
        ("grammar", (LONE, [])),
        ("choice", ([], "a", [""], [5], [LONE])),
        ("json", (LONE, {"a": LONE}, {1: 2}, {"a": DEEP}, {"a": 2**70}, 5)),
        ("json_object", (1, "yes")),
    ],
)
def test_structured_outputs_become_plain_text(field, values) -> None:
    for value in values:
        with pytest.raises(InvalidParameterError) as refusal:
            SamplingParams(structured_outputs=StructuredOutputsParams(**{field: value}))
        assert (
            refusal.value.parameter.startswith("structured_outputs")
            and len(str(refusal.value)) < 400
        )


# ---------------------------------------------------------------- what depends on something else


def test_bounds_that_depend_on_another_parameter() -> None:
    refused("min_tokens", "must be at most max_tokens=3, got 4", max_tokens=3, min_tokens=4)
    refused("stop", "needs detokenize=True", stop="x", detokenize=False)
    refused(
        "n",
        r"must be 1 with temperature=0 \(greedy\), where all completions are the same, got 3",
        n=3,
        temperature=0.0,
    )
    grammar = StructuredOutputsParams(regex="a")
    refused(
        "ignore_eos",
        "must be False with structured_outputs",
        ignore_eos=True,
        structured_outputs=grammar,
    )
    cut = processed(max_tokens=None, min_tokens=1000).sampling_params
    assert cut.min_tokens == cut.max_tokens < MAX_MODEL_LEN


@pytest.mark.parametrize("name", ["stop", "bad_words", "structured_outputs"])
def test_parameters_that_need_a_tokenizer(name) -> None:
    value = StructuredOutputsParams(regex="a") if name == "structured_outputs" else ["x"]
    refused(
        name,
        "needs a tokenizer: this engine runs with skip_tokenizer_init=True",
        [1, 2],
        tokenizer=None,
        **{name: value},
    )
    processed([1, 2], tokenizer=None, stop=[], bad_words=[], stop_token_ids=[5])


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_max_logprobs_limits_the_request(name) -> None:
    refused(
        name, "must be at most 5, which max_logprobs allows, got 6", max_logprobs=5, **{name: 6}
    )
    refused(
        name, "must be at most 5, which max_logprobs allows, got -1", max_logprobs=5, **{name: -1}
    )
    for unlimited in (-1, VOCAB_SIZE, VOCAB_SIZE + 1):
        for value in (-1, 0, VOCAB_SIZE):
            assert (
                getattr(processed(max_logprobs=unlimited, **{name: value}).sampling_params, name)
                == value
            )
        refused(
            name,
            rf"must be -1 \(the whole vocabulary\) or at most {VOCAB_SIZE}, got 321",
            max_logprobs=unlimited,
            **{name: 321},
        )


@pytest.mark.parametrize(
    "priority", [None, "high", 1.5, True, 2**63, -(2**63) - 1, pytest.param(10**5000, id="huge")]
)
def test_priority_is_64_bit(priority) -> None:
    refused("priority", "must be an integer between", priority=priority)
    assert processed(priority=-(2**63)).priority == -(2**63)


@pytest.mark.parametrize("salt", ["", 5, b"x", ["x"], LONE])
def test_cache_salt_is_text(salt) -> None:
    refused("cache_salt", "must be", {"prompt": "x", "cache_salt": salt})


def test_truncated_prompts_keep_their_end() -> None:
    prompt = list(range(100))
    refused("prompt", "is 100 tokens long", prompt)
    assert processed(prompt, truncate_prompt_tokens=3).prompt_token_ids == [97, 98, 99]
    assert processed(prompt, truncate_prompt_tokens=-1).prompt_token_ids == prompt[-63:]
    for more_than_there_are in (-1, 9):
        assert processed([5, 6], truncate_prompt_tokens=more_than_there_are).prompt_token_ids == [
            5,
            6,
        ]
    text = processed("the end of it", truncate_prompt_tokens=2)
    assert text.prompt_token_ids == tiny_tokenizer().encode("the end of it")[-2:]


def test_logit_bias_is_clamped_as_in_vllm() -> None:
    assert processed(logit_bias={1: 1e300, 2: -101, 3: 5}).sampling_params.logit_bias == {
        1: 100.0,
        2: -100.0,
        3: 5.0,
    }


def test_bad_words_apply_with_and_without_a_leading_space() -> None:
    tokenizer = tiny_tokenizer()
    token_ids = processed(bad_words=["the", " the", "x"]).sampling_params.bad_words_token_ids
    assert token_ids == [tokenizer.encode(text) for text in ("the", " the", "x", " x")]
    # both count, whatever their lengths
    assert len(tokenizer.encode("the")) != len(tokenizer.encode(" the"))


# ---------------------------------------------------------------- past the frontend


@pytest.mark.parametrize(
    ("parameter", "params"),
    [
        ("logprobs", {"logprobs": 21}),
        ("logprobs", {"logprobs": -1}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("stop_token_ids", {"stop_token_ids": [VOCAB_SIZE]}),
        ("allowed_token_ids", {"allowed_token_ids": [VOCAB_SIZE]}),
        ("logit_bias", {"logit_bias": {VOCAB_SIZE: 1.0}}),
        ("bad_words_token_ids", {"bad_words": ["x"]}),
        ("bad_words_token_ids", {"bad_words_token_ids": [[5]]}),
        ("bad_words_token_ids", {"bad_words": ["x"], "bad_words_token_ids": [[VOCAB_SIZE]]}),
        ("seed", {"seed": None}),
        ("max_tokens", {"max_tokens": None}),
    ],
)
def test_the_engine_refuses_bad_values_from_a_client(parameter, params) -> None:
    request = EngineCoreRequest("r", [1, 2], SamplingParams(**{"seed": 1, **params}))
    with pytest.raises(InvalidParameterError) as refusal:
        check_request(request, RequestLimits.of(text_config()))
    assert refusal.value.parameter == parameter


@pytest.mark.parametrize(("name", "value"), cases(2))
def test_what_the_constructor_refuses_does_not_decode(name: str, value: object) -> None:
    try:
        SamplingParams(**{**REQUIRED_WITH.get(name, {}), name: value})
    except InvalidParameterError as error:
        refusal = error
    else:
        return  # depends on the model: see the test above
    row = [
        value if field == name else getattr(SamplingParams(**REQUIRED_WITH.get(name, {})), field)
        for field in SamplingParams.__struct_fields__
    ]
    try:
        encoded = msgspec.msgpack.encode(row)
    except (UnicodeEncodeError, OverflowError, RecursionError, TypeError):
        return  # no message can hold it
    try:
        params = msgspec.msgpack.decode(encoded, type=SamplingParams)
    except (msgspec.ValidationError, InvalidParameterError, RecursionError):
        return
    # encoding turned it into a legal value
    assert getattr(params, name) != value, f"{name}={value!r} came through, though {refusal}"
