"""The contract of EngineClient for every form: each field of each message arrives as it was sent.

The messages are made from their definitions, so a new field is tested by existing.
"""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from msgspec.structs import fields
from quire.frontend.clients.inproc_client import InprocClient
from quire.ipc import messages as m
from quire.ipc.codec import MessageDecoder, MessageEncoder
from quire.ipc.errors import InvalidParameterError, ModelLoadError
from quire.ipc.params import PoolingParams, SamplingParams
from quire.tests.fake_engine import record_messages
from quire.tests.frontend.clients.driver import Driver
from quire.tests.message_variations import OUTPUTS, variations

# a message -> the test that shows that the clients carry each of its fields
SHOWN = {
    m.EngineCoreRequest: "test_requests_arrive_whole",
    m.AbortRequests: "test_aborts_and_paces_arrive_whole",
    m.PaceOutputs: "test_aborts_and_paces_arrive_whole",
    m.UtilityCall: "test_calls_and_results_arrive_whole",
    m.UtilityResult: "test_calls_and_results_arrive_whole",
    m.EngineCoreOutputs: "test_outputs_arrive_whole",
    # These have no method of EngineClient.
    m.Config: "tests/frontend/clients/test_client.py",
    m.Ready: "tests/frontend/clients/test_client.py",
    m.Shutdown: "tests/frontend/clients/test_mp_client.py",
    m.EngineDead: "tests/frontend/clients/test_client.py",
    m.Hello: "tests/ipc/test_handshake.py",
    m.Progress: "tests/ipc/test_handshake.py",
    m.Failed: "tests/ipc/test_handshake.py",
    m.StartWave: "tests/test_expert_parallel.py",
    m.WaveReport: "tests/test_expert_parallel.py",
}
# which engine a message comes from and the how-manieth it is; clients check and set these
NUMBERING = {"epoch", "engine_index", "number"}


def plain_request(request_id: str = "a") -> m.EngineCoreRequest:
    return m.EngineCoreRequest(request_id, [1, 2, 3], SamplingParams(seed=1, max_tokens=4))


def every_request() -> list[m.EngineCoreRequest]:
    """Requests that differ from a plain one in a field each; their ids differ too."""
    plain = plain_request()
    pooling = msgspec.structs.replace(plain, params=PoolingParams())
    return [
        msgspec.structs.replace(changed, request_id=f"r{i}-{name}")
        for i, (name, changed) in enumerate([*variations(plain), *variations(pooling)])
    ]


@pytest.fixture
def open_recording(open_driver, monkeypatch):
    """Opens a driver whose engines keep what they receive and do nothing."""
    record_messages(monkeypatch.setattr)
    return lambda: open_driver(hf_overrides={"records": True})


def received(driver: Driver, kind: type) -> list[list]:
    """The messages of one kind that each engine has received."""
    decoder = MessageDecoder(m.ClientMessage, 2**24)
    engines = driver.call("collective_rpc", "received")
    messages = [[decoder.decode([frame]) for frame in engine] for engine in engines]
    return [[one for one in engine if isinstance(one, kind)] for engine in messages]


def test_every_message_has_its_test():
    assert SHOWN.keys() == {*get_args(m.ClientMessage), *get_args(m.EngineMessage)}


def test_requests_arrive_whole(open_recording):
    driver, requests = open_recording(), every_request()
    for request in requests:
        driver.client.add_request(request)
    arrived = {
        request.request_id: request
        for engine in received(driver, m.EngineCoreRequest)
        for request in engine
    }
    for request in requests:
        assert arrived.pop(request.request_id) == request
    assert not arrived and len(requests) > 80


def test_aborts_and_paces_arrive_whole(open_recording):
    driver, ids = open_recording(), [f"r{i}" for i in range(6)]
    for request_id in ids:
        driver.client.add_request(plain_request(request_id))
    for request_ids in (ids[:3], ids[4:]):
        driver.client.abort_requests(request_ids)
    for rows_per_s in (2000, 600, 0):
        driver.client.pace_outputs(rows_per_s)
    aborted = {
        request_id
        for engine in received(driver, m.AbortRequests)
        for abort in engine  # each is applied twice where it overtakes other messages
        for request_id in abort.request_ids
    }
    assert aborted == {*ids} - {ids[3]}
    paces = received(driver, m.PaceOutputs)  # replicas have their shares of it
    assert [sum(pace.rows_per_s for pace in together) for together in zip(*paces)] == [2000, 600, 0]


def test_calls_and_results_arrive_whole(open_recording):
    driver = open_recording()
    args = [None, True, -(2**40), 1.5, "text", b"bytes", [1, [2]], {"a": {"b": [None]}}]
    assert driver.call("collective_rpc", "same", args) == [args] * driver.num_engines
    with pytest.raises(InvalidParameterError, match="^top_p: must be low$") as caught:
        driver.call("collective_rpc", "refuse", ["InvalidParameterError", "top_p", "must be low"])
    assert caught.value.parameter == "top_p"
    assert "in refuse" in str(caught.value.__cause__)  # the engine's traceback
    with pytest.raises(ModelLoadError, match="^no weights$"):
        driver.call("collective_rpc", "refuse", ["ModelLoadError", "no weights"])


def test_outputs_arrive_whole(open_recording):
    driver = open_recording()
    for request_id in OUTPUTS.request_ids:  # of replicas, the first engine has one, the second one
        driver.client.add_request(plain_request(request_id))
    encoder = MessageEncoder(2**24)
    for name, outputs in [("", OUTPUTS), *variations(OUTPUTS)]:
        if name not in NUMBERING:
            driver.call("collective_rpc", "send", encoder.encode(outputs))
            for _ in range(driver.num_engines):
                arrived = driver.get_output()
                own = {field: getattr(arrived, field) for field in NUMBERING}
                assert arrived == msgspec.structs.replace(outputs, **own), name


@pytest.mark.parametrize("name", [field.name for field in fields(m.EngineCoreRequest)])
def test_a_client_that_drops_a_field_is_found(name, monkeypatch):
    """The test of the test: for each field, it fails with a client that forgets it."""
    plain, add_request = plain_request(), InprocClient.add_request
    lost = {name: "lost" if name == "request_id" else getattr(plain, name)}
    if name == "prompt_token_ids":
        lost = {name: []}
    monkeypatch.setattr(
        InprocClient,
        "add_request",
        lambda self, request: add_request(self, msgspec.structs.replace(request, **lost)),
    )
    record_messages(monkeypatch.setattr)
    drivers = []

    def open_() -> Driver:
        drivers.append(Driver("inproc", None, hf_overrides={"records": True}))
        return drivers[0]

    with pytest.raises((AssertionError, KeyError)):
        test_requests_arrive_whole(open_)
    drivers[0].close()
