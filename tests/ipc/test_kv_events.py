"""The messages of KV events byte by byte, and which addresses an engine accepts for them."""

import msgspec
import pytest
from quire.ipc.errors import InvalidParameterError
from quire.ipc.kv_events import (
    CPU,
    GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Endpoint,
    EventBatch,
    KVEventsConfig,
    check_kv_events,
    decode_batch,
    encode_batch,
    hash_for_routers,
    parse_endpoint,
)


def test_messages_are_arrays_in_the_order_of_vllm():
    stored = BlockStored([2**64 - 1, 7], 5, [1, 2, 3, 4], 2, None, GPU, "sql", [("sql",), None], 1)
    batch = EventBatch(1.5, [stored, BlockRemoved([7], CPU), AllBlocksCleared()], 3)
    payload = encode_batch(batch)
    assert msgspec.msgpack.decode(payload) == [
        1.5,
        [
            ["BlockStored", [2**64 - 1, 7], 5, [1, 2, 3, 4], 2, None, "GPU", "sql"]
            + [[["sql"], None], 1, None, None],
            ["BlockRemoved", [7], "CPU", None],
            ["AllBlocksCleared"],
        ],
        3,
    ]
    assert decode_batch(payload) == batch
    # of an older version, without the later fields
    old = [
        0.0,
        [["BlockStored", [1], None, [9], 1, None, "GPU", None], ["BlockRemoved", [1], None]],
    ]
    assert decode_batch(msgspec.msgpack.encode(old)).events[1] == BlockRemoved([1], None)
    for wrong in ([0.0, [["BlockMoved", [1]]]], [0.0, [["BlockStored", ["x"]]]], [], 5):
        with pytest.raises(msgspec.ValidationError):
            decode_batch(msgspec.msgpack.encode(wrong))


def test_a_hash_is_its_last_eight_bytes():
    assert hash_for_routers(bytes(range(32))) == 0x18191A1B1C1D1E1F
    assert hash_for_routers(bytes(range(32)) + b"\0\1") == 0x18191A1B1C1D1E1F


@pytest.mark.parametrize(
    ("endpoint", "index", "expected"),
    [
        ("tcp://*:5557", 0, Endpoint("tcp://*:5557", True)),
        ("tcp://*:5557", 2, Endpoint("tcp://*:5559", True)),
        ("tcp://[::]:5557", 0, Endpoint("tcp://[::]:5557", True)),
        ("tcp://router.local:5557", 1, Endpoint("tcp://router.local:5558", False)),
        ("ipc:///tmp/events", 0, Endpoint("ipc:///tmp/events", True)),
        ("ipc:///tmp/events", 1, Endpoint("ipc:///tmp/events.1", True)),
    ],
)
def test_endpoints(endpoint, index, expected):
    assert parse_endpoint(endpoint, index) == expected
    assert parse_endpoint(endpoint, index, must_bind=True).is_bound


@pytest.mark.parametrize(
    "endpoint",
    ["", "tcp://*", "tcp://*:0", "tcp://:5", "tcp://*:70000", "udp://*:5", "inproc://x", "ipc://"]
    + ["ipc://@name", "tcp://*:5557x", "5557"],
)
def test_other_endpoints_are_refused(endpoint):
    for config in (
        KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint),
        KVEventsConfig(enable_kv_cache_events=True, replay_endpoint=endpoint),
    ):
        with pytest.raises(InvalidParameterError, match="kv_events_config: an endpoint must be"):
            check_kv_events(config, has_prefix_cache=True)


def test_when_events_are_published():
    assert not KVEventsConfig().is_enabled
    assert KVEventsConfig(enable_kv_cache_events=True).is_enabled
    assert not KVEventsConfig(enable_kv_cache_events=True, publisher="null").is_enabled
    check_kv_events(None, has_prefix_cache=False)
    check_kv_events(KVEventsConfig(), has_prefix_cache=False)
    with pytest.raises(InvalidParameterError, match="needs enable_kv_cache_events"):
        check_kv_events(KVEventsConfig(publisher="zmq"), has_prefix_cache=True)
    with pytest.raises(InvalidParameterError, match="enable_prefix_caching"):
        check_kv_events(KVEventsConfig(enable_kv_cache_events=True), has_prefix_cache=False)
