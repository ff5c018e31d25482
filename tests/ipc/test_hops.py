"""Messages are timed at both ends of a wire, and matched."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
from quire.ipc import hops
from quire.ipc.codec import make_codec
from quire.ipc.hops import MessageTimer
from quire.ipc.messages import (
    AbortRequests,
    ClientMessage,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineMessage,
    RequestTiming,
)
from quire.ipc.params import SamplingParams

SIZE = 2**20


def request(name: str) -> EngineCoreRequest:
    return EngineCoreRequest(name, [1, 2, 3], SamplingParams(max_tokens=2, seed=0))


def outputs(number: int, name: str, made_s: float, **more) -> EngineCoreOutputs:
    return EngineCoreOutputs(0, [name], [0], [1], [7], number=number, timestamp=made_s, **more)


def test_both_ends_see_the_same_messages_and_nothing_else_is_timed(monkeypatch):
    client, engine = make_codec(EngineMessage, SIZE), make_codec(ClientMessage, SIZE)
    untimed = client.encode, client.decode, engine.encode, engine.decode
    clock = iter(range(100))
    monkeypatch.setattr(hops, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    of_client, of_engine = MessageTimer(client), MessageTimer(engine)
    of_client.start()
    early = client.encode(request("early"))  # the engine decodes it before it times
    assert engine.decode(early).request_id == "early"
    of_engine.start()
    frames = client.encode(request("r"))
    assert engine.decode(frames) == request("r")
    engine.decode(client.encode(AbortRequests(["r"])))
    timing = RequestTiming(0, queued_time=9.0)
    sent = engine.encode(outputs(5, "r", 8.5, timings=[timing]))
    client.decode(sent)
    engine.encode(outputs(5, "other", 8.5))  # for another client of a daemon
    trace = of_client.add_hops({"coded": msgspec.to_builtins(of_engine.stop()), "steps": []})
    assert trace["coded"] == [] and trace["steps"] == []
    to_engine, from_engine = trace["hops"]
    assert (to_engine.request_id, from_engine.request_id) == ("r", "")
    assert to_engine.num_bytes == sum(len(frame) for frame in frames)
    # the clock counts a second for each look at it: encode 2 to 3, decode 4 to 5
    assert (to_engine.handed_s, to_engine.encode_begin_s, to_engine.encode_s) == (2, 2, 1)
    assert (to_engine.decode_begin_s, to_engine.decode_s, to_engine.taken_s) == (4, 1, 9)
    assert (from_engine.handed_s, from_engine.encode_begin_s, from_engine.encode_s) == (8.5, 10, 1)
    assert (from_engine.decode_begin_s, from_engine.decode_s, from_engine.taken_s) == (12, 1, 0)
    assert untimed == (client.encode, client.decode, engine.encode, engine.decode)
