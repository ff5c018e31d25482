"""The output thread: order, readers that do not read, messages that cannot be encoded, and a close
that does not block.
"""

import array
import errno
import os
import queue
import time

import pytest
import zmq
from quire.ipc import engine_output
from quire.ipc.codec import INLINE_BYTES, MessageDecoder, make_codec
from quire.ipc.engine_output import EngineOutput
from quire.ipc.messages import (
    Array,
    ClientMessage,
    EngineCoreOutputs,
    EngineDead,
    EngineMessage,
    FinishReason,
    TokenLogprobs,
    UtilityResult,
)
from quire.ipc.sockets import OUTPUT_HIGH_WATER_MARK, Wire, make_context, receive
from quire.tests.fake_engine import wait_until
from quire.tests.wires import ClientEnds

LIMIT = 2**22


class Reader:
    def __init__(self, context):
        self.ends = ClientEnds(context, LIMIT)
        self.wire, self.pull = self.ends.wire, self.ends.pull
        self.decoder = MessageDecoder(EngineMessage, LIMIT)

    def read(self, timeout_s: float = 5.0):
        return self.decoder.decode(receive(self.pull)) if self.pull.poll(timeout_s * 1000) else None


@pytest.fixture
def context():
    with make_context() as made:
        yield made


@pytest.fixture
def readers(context):
    made = [Reader(context) for i in range(2)]
    yield made
    for reader in made:
        reader.ends.close()


@pytest.fixture
def start_output(context, readers):
    """Makes an output that both readers are connected to, with these callbacks."""
    made = []

    def start(**callbacks) -> EngineOutput:
        output = EngineOutput(
            context, make_codec(ClientMessage, LIMIT), max_backlog_bytes=100_000, **callbacks
        )
        made.append(output)
        output.start()
        for i, reader in enumerate(readers):
            output.connect(i, reader.wire)
        return output

    yield start
    for output in made:
        output.close(0)


@pytest.fixture
def output(start_output):
    return start_output()


def rows(text: str) -> EngineCoreOutputs:
    return EngineCoreOutputs(0, [text], [0], [0], [])


def test_each_reader_gets_its_messages_in_order(output, readers):
    for i in range(200):
        output.send(i % 2, UtilityResult(i))
    assert [readers[0].read().call_id for _ in range(100)] == list(range(0, 200, 2))
    assert [readers[1].read().call_id for _ in range(100)] == list(range(1, 200, 2))


def test_large_arrays_arrive(output, readers):
    data = array.array("i", range(INLINE_BYTES))
    large = Array("i4", (INLINE_BYTES,), data)
    output.send(
        0,
        EngineCoreOutputs(0, ["a"], [0], [0], [], logprobs=[TokenLogprobs(0, large, large, large)]),
    )
    assert readers[0].read().logprobs[0].ranks == large


def test_a_slow_reader_blocks_the_engine_and_loses_nothing(start_output, readers):
    drained: queue.SimpleQueue = queue.SimpleQueue()
    output = start_output(on_drained=lambda: drained.put(output.is_full))
    num_sent = 0
    while not output.is_full:
        for _ in range(50):
            output.send(0, rows(f"{num_sent:0500d}"))
            num_sent += 1
        time.sleep(0.001)
    assert num_sent > OUTPUT_HIGH_WATER_MARK
    output.send(1, rows("the other one is served"))
    assert readers[1].read().request_ids == ["the other one is served"]
    assert [int(readers[0].read().request_ids[0]) for _ in range(num_sent)] == list(range(num_sent))
    assert drained.get(timeout=60) is False and not output.is_full and drained.empty()


def test_a_daemon_drops_the_slow_reader_and_reports_it(start_output, readers):
    dropped: queue.SimpleQueue = queue.SimpleQueue()
    output = start_output(on_overflow=dropped.put)
    num_sent = 0
    while dropped.empty():
        for _ in range(50):
            output.send(0, rows(f"{num_sent:0500d}"))
            num_sent += 1
        time.sleep(0.001)
    assert dropped.get() == 0 and not output.is_full
    num_read = 0
    while isinstance(message := readers[0].read(), EngineCoreOutputs):
        assert int(message.request_ids[0]) == num_read
        num_read += 1
    assert isinstance(message, EngineDead) and "did not read" in message.cause
    assert readers[0].read(0.05) is None and dropped.empty()


def test_a_reader_that_left(output, readers):
    output.disconnect(0)
    output.disconnect(0)
    output.send(0, rows("to nobody"))
    output.send(1, rows("to you"))
    assert readers[1].read().request_ids == ["to you"]
    assert readers[0].read(0.05) is None


def test_a_client_that_cannot_be_connected_is_reported_and_the_others_are_served(
    start_output, readers, monkeypatch
):
    def no_descriptors(context, address):
        raise zmq.ZMQError(errno.EMFILE)

    dropped: queue.SimpleQueue[int] = queue.SimpleQueue()
    output = start_output(on_overflow=dropped.put)
    wait_until(lambda: len(output._readers) == len(readers))
    monkeypatch.setattr(engine_output, "connect_push", no_descriptors)
    output.connect(7, Wire("nowhere", b""))
    assert dropped.get(timeout=60) == 7
    output.send(7, UtilityResult(1))
    output.send(0, UtilityResult(2))
    assert readers[0].read().call_id == 2


def test_a_message_that_cannot_be_encoded_becomes_an_error(start_output, readers):
    lost: queue.SimpleQueue = queue.SimpleQueue()
    errors: queue.SimpleQueue = queue.SimpleQueue()
    output = start_output(on_lost=lambda *args: lost.put(args), on_fatal=errors.put)
    output.send(0, UtilityResult(5, object()))
    assert readers[0].read().failure.error_type == "TypeError"
    bad = Array("f4", (3,), b"1234")
    output.send(
        0,
        EngineCoreOutputs(
            7, ["a", "b"], [3, 4], [1, 1], [8, 9], logprobs=[TokenLogprobs(0, bad, bad, bad)]
        ),
    )
    message = readers[0].read()
    assert (message.epoch, message.request_ids, message.first_indices, message.token_ids) == (
        7,
        ["a", "b"],
        [3, 4],
        [],
    )
    assert [(end.row, end.reason) for end in message.finished] == [
        (0, FinishReason.ERROR),
        (1, FinishReason.ERROR),
    ]
    assert lost.get() == (0, ["a", "b"]) and output.num_lost_outputs == 2
    # even the error is too large, which must be reported
    output.send(0, EngineCoreOutputs(0, ["x" * LIMIT], [0], [0], []))
    assert "max_message_bytes" in str(errors.get(timeout=60))


def test_close_sends_the_rest(context, readers):
    output = EngineOutput(context, make_codec(ClientMessage, LIMIT))
    output.start()
    output.connect(0, readers[0].wire)
    for i in range(500):
        output.send(0, UtilityResult(i))
    output.close(60)
    assert [readers[0].read().call_id for _ in range(500)] == list(range(500))


def test_close_does_not_wait_for_a_reader_forever(context, readers):
    fds = len(os.listdir("/proc/self/fd"))
    output = EngineOutput(context, make_codec(ClientMessage, LIMIT))
    output.start()
    output.connect(0, readers[0].wire)
    for _ in range(4 * OUTPUT_HIGH_WATER_MARK):
        output.send(0, rows("x" * 1000))
    begin = time.monotonic()
    output.close(0.2)
    assert time.monotonic() - begin < 30
    # the connection closes when the reader next polls
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= fds + 1)
