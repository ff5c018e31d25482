"""The publisher of KV events: frames, replay, numbers, and addresses that are in use."""

import socket
from contextlib import closing, contextmanager

import pytest
import zmq
from quire.ipc.errors import InvalidParameterError
from quire.ipc.kv_event_publisher import KVEventPublisher, make_publisher
from quire.ipc.kv_events import CPU, BlockRemoved, KVEventsConfig, decode_batch
from quire.tests.fakes import make_config

WAIT_MS = 20_000
END = b"\xff" * 8


def make_events_config(tmp_path, **fields) -> KVEventsConfig:
    names = {
        "endpoint": f"ipc://{tmp_path}/live",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
    }
    return KVEventsConfig(enable_kv_cache_events=True, **names | fields)


@contextmanager
def connected(kind: int, endpoint: str):
    with zmq.Context(io_threads=1) as context, context.socket(kind) as made:
        made.linger = 0
        made.connect(endpoint)
        if kind == zmq.SUB:
            made.subscribe(b"kv")
        yield made


def receive(source) -> list[bytes]:
    assert source.poll(WAIT_MS), "nothing came"
    return source.recv_multipart()


def replay(source, first: int) -> list[int]:
    """Return the numbers that are kept from `first` on."""
    source.send_multipart((b"", first.to_bytes(8, "big")))
    numbers = []
    while True:
        empty, number, payload = receive(source)
        assert empty == b""
        if number == END:
            assert payload == b""
            return numbers
        assert decode_batch(payload).events
        numbers.append(int.from_bytes(number, "big"))


def removed(number: int) -> list:
    return [BlockRemoved([number], CPU)]


def test_batches_are_sent_numbered_and_repeated(tmp_path):
    config = make_events_config(tmp_path, topic="kv@pod@model", buffer_steps=4)
    with closing(KVEventPublisher(config, engine_index=0)) as publisher:
        with (
            connected(zmq.SUB, config.endpoint) as live,
            connected(zmq.DEALER, config.replay_endpoint) as asker,
        ):
            publisher.publish(removed(0))
            number = 1
            while not live.poll(20):  # until the subscription has arrived
                publisher.publish(removed(number))
                number += 1
            publisher.publish([])
            frames = receive(live)
            assert len(frames) == 3 and frames[0] == b"kv@pod@model"
            first = int.from_bytes(frames[1], "big")
            batch = decode_batch(frames[2])
            assert batch.events == removed(first) and batch.data_parallel_rank == 0
            for more in range(number, number + 6):
                publisher.publish(removed(more))
            while int.from_bytes(receive(live)[1], "big") < number + 5:
                pass
            last = number + 5
            assert replay(asker, 0) == [last - 3, last - 2, last - 1, last]
            assert replay(asker, last) == [last] and replay(asker, last + 1) == []
            asker.send_multipart((b"", b"short"))
            asker.send(b"?")
            assert replay(asker, last) == [last]


def test_numbers_rise_with_the_epoch(tmp_path):
    config = make_events_config(tmp_path)
    with closing(KVEventPublisher(config, epoch=3, engine_index=2)) as publisher:
        publisher.publish(removed(1))
        publisher.publish(removed(2))
        with connected(zmq.DEALER, config.replay_endpoint + ".2") as asker:
            assert replay(asker, 5) == [3 * 2**40, 3 * 2**40 + 1]


def test_an_address_in_use_is_taken_when_it_is_free(tmp_path, caplog):
    config = make_events_config(tmp_path)
    first = KVEventPublisher(config)
    with closing(KVEventPublisher(config, epoch=1)) as second:
        assert "live is in use" in caplog.text
        second.publish(removed(1))
        with connected(zmq.DEALER, config.replay_endpoint) as asker:
            assert replay(asker, 0) == []
            first.close()
            first.close()
            for _ in range(100):
                if numbers := replay(asker, 0):
                    break
            assert numbers == [2**40]


def test_an_address_that_cannot_be_used_is_an_error(tmp_path):
    config = make_events_config(tmp_path, endpoint=f"ipc://{tmp_path}/missing/live")
    with pytest.raises(
        InvalidParameterError, match=r"kv_events_config: cannot use ipc://.*missing"
    ):
        KVEventPublisher(config)


def test_it_connects_where_no_address_is_to_be_bound(tmp_path):
    with zmq.Context(io_threads=1) as context, context.socket(zmq.SUB) as live:
        live.linger = 0
        port = live.bind_to_random_port("tcp://127.0.0.1")
        live.subscribe(b"")
        config = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{port}")
        with closing(KVEventPublisher(config)) as publisher:
            number = 0
            while not live.poll(20):
                publisher.publish(removed(number))
                number += 1
            assert decode_batch(receive(live)[2]).events[0].medium == CPU


def test_a_tcp_port_is_bound_and_freed():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://*:{port}")
    for _ in range(2):
        publisher = KVEventPublisher(config)
        assert not publisher._to_bind
        publisher.close()


def test_none_without_the_option(tmp_path):
    assert make_publisher(make_config()) is None
    assert make_publisher(make_config(kv_events_config=KVEventsConfig())) is None
    made = make_publisher(make_config(kv_events_config=make_events_config(tmp_path)), 1, 1)
    made.close()
