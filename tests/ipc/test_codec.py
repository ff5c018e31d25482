"""The codec: messages round-trip, large arrays are not copied, and any invalid bytes raise one
exception type.
"""

from __future__ import annotations

import os
import random

import msgspec
import pytest
from quire.ipc.codec import (
    INLINE_BYTES,
    BadFrameError,
    MessageDecoder,
    MessageEncoder,
    MessageTooLargeError,
    sender_id,
)
from quire.ipc.messages import (
    AbortRequests,
    Array,
    ClientMessage,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineMessage,
    Finished,
    FinishReason,
    Ready,
    TokenLogprobs,
    UtilityCall,
    UtilityResult,
)
from quire.ipc.params import PoolingParams, SamplingParams
from quire.tests.fakes import make_config
from quire.tests.frames import CLIENT_MESSAGES, ENGINE_MESSAGES, NUM_FRAMES, mutations

LIMIT = 2**24


def outputs_with(data) -> EngineCoreOutputs:
    num_items = memoryview(data).nbytes // 4
    large, small = Array("f4", (num_items,), data), Array("i4", (2, 1), b"12345678")
    return EngineCoreOutputs(
        3,
        ["a"],
        [0],
        [1],
        [7],
        [Finished(0, FinishReason.STOP, stop_reason=5)],
        [TokenLogprobs(0, small, large, small)],
    )


@pytest.mark.parametrize("message", CLIENT_MESSAGES, ids=lambda m: type(m).__name__)
def test_client_messages_round_trip(message):
    assert (
        MessageDecoder(ClientMessage, LIMIT).decode(MessageEncoder(LIMIT).encode(message))
        == message
    )


@pytest.mark.parametrize("message", ENGINE_MESSAGES, ids=lambda m: type(m).__name__)
def test_engine_messages_round_trip(message):
    assert (
        MessageDecoder(EngineMessage, LIMIT).decode(MessageEncoder(LIMIT).encode(message))
        == message
    )


def test_the_configuration_round_trips():
    ready = Ready(make_config(max_model_len=99), 5, 6)
    assert MessageDecoder(EngineMessage, LIMIT).decode(MessageEncoder(LIMIT).encode(ready)) == ready


def test_a_large_array_is_a_frame_and_not_copied():
    data = bytearray(os.urandom(INLINE_BYTES))
    frames = MessageEncoder(LIMIT).encode(outputs_with(data))
    assert len(frames) == 2 and frames[1].obj is data
    decoded = MessageDecoder(EngineMessage, LIMIT).decode(frames)
    received = decoded.logprobs[0].logprobs
    assert isinstance(received.data, memoryview) and received.data == data
    data[0] ^= 255
    assert received.data[0] == data[0]  # the same memory


def test_a_small_array_is_inside_the_message():
    frames = MessageEncoder(LIMIT).encode(outputs_with(bytes(INLINE_BYTES - 4)))
    assert len(frames) == 1
    assert MessageDecoder(EngineMessage, LIMIT).decode(frames).logprobs[0].logprobs.data == bytes(
        INLINE_BYTES - 4
    )


def test_an_empty_array():
    decoded = MessageDecoder(EngineMessage, LIMIT).decode(
        MessageEncoder(LIMIT).encode(outputs_with(b""))
    )
    assert decoded.logprobs[0].logprobs == Array("f4", (0,), b"")


def test_several_large_arrays_keep_their_order():
    one, two = (
        Array("u1", (INLINE_BYTES,), bytes([1]) * INLINE_BYTES),
        Array("u1", (INLINE_BYTES,), bytes([2]) * INLINE_BYTES),
    )
    message = EngineCoreOutputs(0, ["a"], [0], [0], [], logprobs=[TokenLogprobs(0, one, two, one)])
    frames = MessageEncoder(LIMIT).encode(message)
    assert len(frames) == 4 and MessageDecoder(EngineMessage, LIMIT).decode(frames) == message


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: f[:1],
        lambda f: [*f, b"more"],
        lambda f: [f[0], f[1][4:]],
        lambda f: [],
        lambda f: f[::-1],
    ],
)
def test_wrong_frames(damage):
    frames = MessageEncoder(LIMIT).encode(outputs_with(bytes(INLINE_BYTES)))
    decoder = MessageDecoder(EngineMessage, LIMIT)
    with pytest.raises(BadFrameError):
        decoder.decode(damage(frames))
    assert decoder.decode(frames).epoch == 3  # the next message is not affected


@pytest.mark.parametrize("index", [0, 2, -1, 2**40])
def test_an_array_may_not_name_another_frame(index):
    array = ["f4", [1], index]
    head = msgspec.msgpack.encode(
        ["outputs", 0, ["a"], [0], [0], [], [], [[0, array, array, array]]]
    )
    with pytest.raises(BadFrameError):
        MessageDecoder(EngineMessage, LIMIT).decode([head, b"1234"])


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"\x92\xa3add\xa2\xff\xfe",
        b"\xdd\xff\xff\xff\xff",
        msgspec.msgpack.encode(["add", "a", [1], [99] * 3]),
    ],
    ids=["empty", "no msgpack", "deep", "no utf-8", "cut off", "bad params"],
)
def test_every_kind_of_failure_is_one_exception(head):
    with pytest.raises(BadFrameError):
        MessageDecoder(ClientMessage, LIMIT).decode([head])


def test_an_array_must_fit_its_shape():
    for bad in (Array("f4", (3,), b"1234"), Array("f4", (1,), memoryview(b"12345678")[::2])):
        with pytest.raises(ValueError):
            MessageEncoder(LIMIT).encode(
                EngineCoreOutputs(0, [], [], [], [], logprobs=[TokenLogprobs(0, bad, bad, bad)])
            )


@pytest.mark.parametrize(
    "columns",
    [
        [["a", "b"], [0, 0], [2, 1], [7, 8]],  # one token missing
        [["a", "b"], [0, 0], [1, 0], [7, 8]],  # one extra token
        [["a", "b"], [0, 0], [3, -1], [7, 8]],
        [["a", "b"], [0], [1, 1], [7, 8]],
        [["a"], [0, 0], [1, 1], [7, 8]],
        [["a", "b"], [0, 0], [1, 1], [7, 8], [[2, 0]]],  # of a row that does not exist
        [["a", "b"], [0, 0], [1, 1], [7, 8], [[-1, 0]]],
    ],
)
def test_columns_must_fit_each_other(columns):
    """A row with the tokens of another request would be a wrong answer."""
    decoder = MessageDecoder(EngineMessage, LIMIT)
    good = ["outputs", 0, ["a", "b"], [0, 0], [1, 1], [7, 8], [[1, 0]]]
    assert decoder.decode([msgspec.msgpack.encode(good)]).token_ids == [7, 8]
    with pytest.raises(BadFrameError, match="EngineCoreOutputs"):
        decoder.decode([msgspec.msgpack.encode(["outputs", 0, *columns])])


@pytest.mark.parametrize(
    "step_times, token_steps",
    [([1.0, 2.0], [0]), ([1.0, 2.0], [0, 2]), ([1.0, 2.0], [-1, 0]), ([], [0, 0])],
)
def test_token_timings_must_refer_to_existing_steps(step_times, token_steps):
    good = EngineCoreOutputs(0, ["a"], [0], [2], [7, 8], step_times=[1.0, 2.0], token_steps=[0, 1])
    assert MessageDecoder(EngineMessage, LIMIT).decode(MessageEncoder(LIMIT).encode(good)) == good
    fields = msgspec.to_builtins(good)
    num_before = 1 + EngineCoreOutputs.__struct_fields__.index("step_times")  # the tag is first
    with pytest.raises(BadFrameError, match="tokens' steps"):
        MessageDecoder(EngineMessage, LIMIT).decode(
            [msgspec.msgpack.encode([*fields[:num_before], step_times, token_steps])]
        )


@pytest.mark.parametrize("params", [SamplingParams(seed=3, n=2), PoolingParams(dimensions=8)])
def test_a_request_has_params_of_one_kind(params):
    message = EngineCoreRequest("a", [1], params)
    [frame] = MessageEncoder(LIMIT).encode(message)
    received = MessageDecoder(ClientMessage, LIMIT).decode([frame])
    assert received == message and type(received.params) is type(params)
    for missing in (None, ["neither"], {}):
        with pytest.raises(BadFrameError):
            MessageDecoder(ClientMessage, LIMIT).decode(
                [msgspec.msgpack.encode(["add", "a", [1], missing])]
            )
    if isinstance(params, PoolingParams):
        with pytest.raises(TypeError, match="params: must be SamplingParams, got PoolingParams"):
            assert received.sampling_params
    else:
        assert received.sampling_params == params


def test_sizes_are_bounded_at_both_ends():
    message = EngineCoreRequest("a", list(range(1000)), SamplingParams())
    with pytest.raises(MessageTooLargeError, match="max_message_bytes=1000"):
        MessageEncoder(1000).encode(message)
    with pytest.raises(BadFrameError, match="max_message_bytes"):
        MessageDecoder(ClientMessage, 1000).decode(MessageEncoder(LIMIT).encode(message))


def test_values_that_cannot_be_encoded_are_named():
    with pytest.raises(TypeError, match="a set cannot|object"):
        MessageEncoder(LIMIT).encode(UtilityResult(1, object()))


def test_the_sender_of_a_bad_frame():
    assert (
        sender_id(
            MessageEncoder(LIMIT).encode(EngineCoreRequest("mine", [1, "two"], SamplingParams()))
        )
        == "mine"
    )
    assert sender_id([msgspec.msgpack.encode(["call", 17, {}])]) == 17
    for frames in (
        [],
        [b""],
        [b"\xc1"],
        [msgspec.msgpack.encode(["add"])],
        [msgspec.msgpack.encode(["add", 5])],
        MessageEncoder(LIMIT).encode(AbortRequests(["x"])),
    ):
        assert sender_id(frames) is None


@NUM_FRAMES
@pytest.mark.parametrize(
    ("type_", "corpus"),
    [(ClientMessage, CLIENT_MESSAGES), (EngineMessage, ENGINE_MESSAGES)],
    ids=["to engine", "to client"],
)
def test_fuzz_raises_nothing_else(type_, corpus, num_frames):
    decoder, num_bad = MessageDecoder(type_, LIMIT), 0
    for frames in mutations(corpus, random.Random(1), num_frames):
        try:
            assert decoder.decode(frames) is not None
        except BadFrameError:
            num_bad += 1
            sender_id(frames)
    assert num_bad > num_frames // 2  # otherwise the frames were hardly damaged
    call = UtilityCall(1, "ping", [None])
    assert MessageDecoder(ClientMessage, LIMIT).decode(MessageEncoder(LIMIT).encode(call)) == call
