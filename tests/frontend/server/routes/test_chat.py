"""/v1/chat/completions over HTTP.
May know: the session's server, OpenAI's shapes.
Must not know: the engine."""

import httpx2 as httpx

from quire.tests.frontend.server.routes.test_completions import events

BODY = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 16, "temperature": 0}


def test_a_stream_and_a_whole_answer_agree(server: httpx.Client) -> None:
    whole = server.post("/v1/chat/completions", json=BODY).json()
    chunks = events(server.post("/v1/chat/completions", json=BODY | {"stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None} and deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"] == "2 + 3 = 5"
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "stop"
    assert not any("usage" in chunk for chunk in chunks)
