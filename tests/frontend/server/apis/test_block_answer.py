"""An answer in blocks: whole and streamed responses read the same events, also where they fail."""

import asyncio
from typing import Any

from quire.frontend.server.apis.block_answer import BlockAnswer
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.http.errors import ApiError
from quire.frontend.server.state import ServerState
from quire.frontend.server.turns.answer_run import ChoiceDelta
from quire.frontend.server.turns.chat_turn import ChatTurn, prepare_chat
from quire.ipc.params import RequestOutputKind, SamplingParams
from quire.tests.frontend.server.scripted import ScriptedEngine, a_call


class ListAnswer(BlockAnswer):
    """Encodes each event as a line, and shows the texts of all blocks."""

    def _write(self, delta: ChoiceDelta) -> bytes:
        return b"".join(
            f"{what} {block.kind} {text}\n".encode() for what, block, text in self._take(delta)
        )

    def _whole(self, last: ChoiceDelta) -> dict[str, Any]:
        return {block.kind: block.text for block in self._blocks.blocks} | {
            "end": last.finish_reason
        }

    def _error_event(self, error: ApiError) -> bytes:
        return b"failed %d\n" % error.status


def respond(pieces: list[Any], streams: bool) -> bytes:
    state = ServerState(ServerConfig(chat_template="{{ '</think>' }}"), "m", ScriptedEngine(pieces))

    async def run() -> bytes:
        params = SamplingParams(output_kind=RequestOutputKind.DELTA)
        turn = ChatTurn("r", [{"role": "user", "content": "hi"}], params)
        call = a_call()
        answer = ListAnswer(state, call, await prepare_chat(state, call, turn))
        response = await answer.respond(streams=streams)
        if not streams:
            return response.body
        sent: list[bytes] = []

        async def send(message: dict) -> None:
            sent.append(message.get("body", b""))

        await response({}, None, send)
        return b"".join(sent)

    return asyncio.run(run())


def test_a_stream_and_the_whole() -> None:
    pieces = ["<think>a", "b</think>", "c", "d"]
    assert respond(pieces, False) == b'{"reasoning":"ab","text":"cd","end":"stop"}'
    assert respond(pieces, True).decode().splitlines() == [
        "start reasoning ",
        "delta reasoning a",
        "delta reasoning b",
        "stop reasoning ",
        "start text ",
        "delta text c",
        "delta text d",
        "stop text ",
    ]


def test_a_stream_that_fails_ends_in_the_event_of_its_api() -> None:
    said = respond(["<think>", "c", RuntimeError("secret")], True).decode().splitlines()
    assert said[-1] == "failed 500" and "secret" not in "".join(said)
