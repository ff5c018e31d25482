"""RequestStream: unread outputs are merged, failures come after them, and outputs taken by a
callback wake no reader.
"""

from __future__ import annotations

import asyncio

import pytest
from quire import CompletionOutput, EngineDeadError, RequestOutput
from quire.frontend.outputs import RequestMetrics
from quire.frontend.requests.request_stream import RequestStream


def output(text: str, *token_ids: int, finished: bool = False) -> RequestOutput:
    completion = CompletionOutput(0, text, list(token_ids), None, None, None, None)
    return RequestOutput(
        "r", None, [1], [completion], finished, RequestMetrics(0.0), kind_is_delta=True
    )


def run(scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


def test_unread_outputs_become_one() -> None:
    async def scenario() -> None:
        stream = RequestStream()
        for text, token_id in (("a", 1), ("b", 2), ("c", 3)):
            stream.put(output(text, token_id))
        merged = (await stream.get()).outputs[0]
        assert (merged.text, merged.token_ids) == ("abc", [1, 2, 3])

    run(scenario())


def test_a_reader_waits_and_a_failure_comes_after_earlier_outputs() -> None:
    async def scenario() -> None:
        stream = RequestStream()
        reader = asyncio.ensure_future(stream.get())
        await asyncio.sleep(0)
        stream.put(output("a", 1))
        stream.fail(EngineDeadError("gone"))
        assert (await reader).outputs[0].text == "a"
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="gone"):
                await stream.get()

    run(scenario())


def test_a_taken_output_does_not_wake_the_reader() -> None:
    async def scenario() -> None:
        taken = []
        stream = RequestStream(lambda o: taken.append(o.outputs[0].text) is None)
        stream.put(output("a", 1))  # no reader waits, so it is kept
        assert (await stream.get()).outputs[0].text == "a"
        reader = asyncio.ensure_future(stream.get())
        await asyncio.sleep(0)
        stream.put(output("b", 2))
        await asyncio.sleep(0)
        assert taken == ["b"] and not reader.done()
        stream.put(output("c", 3, finished=True))  # the last output is always read
        assert (await reader).outputs[0].text == "c"

    run(scenario())


def test_an_error_of_the_callback_reaches_the_reader() -> None:
    def broken(output: RequestOutput) -> bool:
        raise ValueError("mine")

    async def scenario() -> None:
        stream = RequestStream(broken)
        reader = asyncio.ensure_future(stream.get())
        await asyncio.sleep(0)
        stream.put(output("a", 1))
        with pytest.raises(ValueError, match="mine"):
            await reader

    run(scenario())
