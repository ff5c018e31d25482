"""Call: request ids, and invalid bodies."""

import asyncio

import msgspec
import pytest
from quire.frontend.server.app import make_app
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.http.call import HttpCall, new_request_id
from quire.frontend.server.http.errors import ApiError
from quire.frontend.server.request_body import MAX_LARGE_BODIES, decode_body
from quire.frontend.server.state import ServerState


class Inner(msgspec.Struct):
    size: int


class Body(msgspec.Struct, kw_only=True):
    name: str
    count: int | None = None
    inner: Inner | None = None


def decode(raw: bytes, **config: str) -> tuple[Body, HttpCall]:
    async def run() -> tuple[Body, HttpCall]:
        call = HttpCall("req-1", 0.0, asyncio.current_task())
        return decode_body(raw, Body, ServerConfig(**config), call), call

    return asyncio.run(run())


def test_a_good_body() -> None:
    body, call = decode(b'{"name": "x", "count": null}')
    assert body == Body(name="x") and call.headers(1.25) == [
        (b"x-request-id", b"req-1"),
        (b"openai-processing-ms", b"1250"),
    ]


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b'{"name": "\xff"}', "invalid_json", None),
        (b"[1]", "invalid_type", None),
        (b"null", "invalid_type", None),
        (b"{}", "missing_required_parameter", "name"),
        (b'{"name": 3}', "invalid_type", "name"),
        (b'{"name": "x", "count": "3"}', "invalid_type", "count"),
        (b'{"name": "x", "inner": {"size": 1.5}}', "invalid_type", "inner.size"),
        (b'{"name": "x", "inner": {}}', "missing_required_parameter", "inner.size"),
        (b'{"name": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", None, None),
    ],
)
def test_bad_bodies(raw: bytes, code: str | None, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        decode(raw)
    assert caught.value.status == 400 and caught.value.message
    if code is not None:
        assert (caught.value.code, caught.value.param) == (code, param)


def test_unknown_fields_are_listed_refused_or_allowed() -> None:
    raw = b'{"name": "x", "zeta": 1, "alpha": 2}'
    _, call = decode(raw)
    assert (b"x-unknown-params", b"alpha,zeta") in call.headers(1.0)
    assert decode(raw, unknown_params="allow")[1].unknown_params == []
    with pytest.raises(ApiError, match="alpha") as caught:
        decode(raw, unknown_params="error")
    assert (caught.value.code, caught.value.param) == ("unknown_parameter", "alpha")


def test_many_unknown_fields_are_truncated_and_cannot_break_the_header() -> None:
    names = {f"x{i:03}": 1 for i in range(100)} | {"a\r\nx-evil: 1": 2}
    (value,) = [
        value
        for name, value in decode(msgspec.json.encode({"name": "x"} | names))[1].headers(1.0)
        if name == b"x-unknown-params"
    ]
    assert (
        value.startswith(b"a\\r\\nx-evil: 1,x000")
        and value.endswith(b",and 81 more")
        and b"\n" not in value
    )


def test_request_ids() -> None:
    assert new_request_id([(b"x-request-id", b"mine-1")]) == "mine-1"
    for bad in (b"", b"a b", b"x" * 129, "ü".encode()):
        assert new_request_id([(b"x-request-id", bad)]).startswith("req-")
    assert new_request_id([]) != new_request_id([])


def test_the_total_size_of_bodies_is_bounded() -> None:
    """Each of them is small enough but not yet complete."""
    state = ServerState(ServerConfig(max_body_bytes=1000, access_log=False, page=False), "m")
    app, statuses = make_app(state), []

    async def one() -> None:
        given = iter([b"x" * 999])

        async def receive() -> dict:
            if (body := next(given, None)) is None:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": body, "more_body": True}

        async def send(message: dict) -> None:
            if message["type"] == "http.response.start":
                statuses.append((message["status"], dict(message["headers"]).get(b"retry-after")))

        path = "/v1/completions"
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [],
        }
        await app(scope, receive, send)

    async def run() -> None:
        tasks = [asyncio.create_task(one()) for _ in range(MAX_LARGE_BODIES + 3)]
        async with asyncio.timeout(60):
            while state.meters.num_body_bytes < 999 * MAX_LARGE_BODIES or len(statuses) < 3:
                await asyncio.sleep(0.01)
        # the first body left no room for another; the others continued
        assert statuses == [(503, b"5")] * 3
        assert state.meters.num_body_bytes == 999 * MAX_LARGE_BODIES
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert state.meters.num_body_bytes == 0

    asyncio.run(run())


class Writer:
    """A ChunkWriter that records its input."""

    def __init__(self, ready: bool):
        self.ready, self.written = ready, []

    def is_ready(self) -> bool:
        return self.ready

    def write(self, body: bytes) -> None:
        self.written.append(body)


def test_a_chunk_is_written_directly_only_if_the_transport_is_ready() -> None:
    async def run() -> None:
        seen: list[int] = []

        def write_down(item: int) -> bytes:
            seen.append(item)
            return b"" if item == 0 else b"%d" % item

        call = HttpCall("req-1", 0.0, asyncio.current_task())
        assert not call.push(write_down, 1)  # not one of the server's connections
        call.chunk_writer = Writer(ready=False)
        assert not call.push(write_down, 2) and seen == []  # nothing has been written
        call.chunk_writer = Writer(ready=True)
        assert call.push(write_down, 3) and call.last_sent > 0
        # an empty chunk would end the body
        assert call.push(write_down, 0) and call.chunk_writer.written == [b"3"] and seen == [3, 0]

    asyncio.run(run())
