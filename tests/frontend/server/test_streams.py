"""The streams of every API: keep-alive messages, and the abort of a request when its client
disconnects.
"""

import asyncio
from typing import Any

import msgspec
import pytest
from quire.frontend.server.app import App
from quire.tests.frontend.server.scripted import ScriptedEngine, post, scripted_app

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/api/chat": {"model": "bundled", "messages": MESSAGES},
    "/api/generate": {"model": "bundled", "prompt": "hi"},
}
ENDLESS = [0.001, *["word "] * 5000, 1000.0, "end"]


@pytest.mark.parametrize(
    ("path", "breaker"),
    [
        ("/v1/responses", b"\n: keep-alive\n\n"),
        ("/v1/messages", b'\nevent: ping\ndata: {"type":"ping"}\n\n'),
        ("/api/chat", b"\n "),
        ("/api/generate", b"\n "),
    ],
)
def test_keep_alives_are_valid_in_each_api(path: str, breaker: bytes) -> None:
    app = scripted_app(ScriptedEngine([0.1, "a", 0.1, "b"]), sse_keep_alive_s=0.02)
    raw = post(app, path, BODIES[path] | {"stream": True}).content
    assert raw.count(breaker) >= 1 and (b"\n" + raw).startswith(breaker)
    if path.startswith("/api/"):
        # every line has a value
        assert all(msgspec.json.decode(line) for line in raw.removesuffix(b"\n").split(b"\n"))


def test_a_response_that_has_begun_is_kept_alive_by_events() -> None:
    """Codex ends a stream in which no event has come for five minutes, such as while a long call is
    written.
    """
    app = scripted_app(ScriptedEngine(["a", 0.2, "b"]), sse_keep_alive_s=0.02)
    raw = post(app, "/v1/responses", BODIES["/v1/responses"] | {"stream": True}).text
    events = [line.split("data: ")[1] for line in raw.split("\n\n") if "data: " in line]
    found = [msgspec.json.decode(event) for event in events]
    kinds = [event["type"] for event in found]
    assert kinds[0] == "response.created" and "keepalive" in kinds
    assert [event["sequence_number"] for event in found] == list(range(len(found)))


async def leave_after(app: App, path: str, body: dict[str, Any], num_chunks: int) -> None:
    """An ASGI client that sends the request, reads the given number of chunks (0: none, also of
    whole answers) and disconnects.
    """
    has_read, requested = asyncio.Event(), False
    num_read = 0

    async def receive() -> dict[str, Any]:
        nonlocal requested
        if not requested:
            requested = True
            return {"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}
        await (has_read.wait() if num_chunks else asyncio.sleep(0.05))
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal num_read
        num_read += bool(message.get("body"))
        if num_read >= num_chunks:
            has_read.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
        "root_path": "",
    }
    await asyncio.wait_for(app(scope, receive, send), 60)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_disconnect_aborts_the_request(path: str, stream: bool) -> None:
    engine = ScriptedEngine(ENDLESS)
    app = scripted_app(engine)

    async def run() -> None:
        asked = asyncio.create_task(
            leave_after(app, path, BODIES[path] | {"stream": stream}, 3 if stream else 0)
        )
        while not engine.num_running:
            assert not asked.done()
            await asyncio.sleep(0)
        await asked
        assert engine.num_running == 0

    asyncio.run(run())
