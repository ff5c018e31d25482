"""/v1/completions over HTTP.
May know: the session's server, OpenAI's shapes.
Must not know: the engine."""

import json

import httpx2 as httpx

BODY = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


def events(answer: httpx.Response) -> list[dict]:
    """The stream's events without [DONE], which must be the last."""
    lines = [line for line in answer.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_a_stream_and_a_whole_answer_agree(server: httpx.Client) -> None:
    whole = server.post("/v1/completions", json=BODY).json()
    chunks = events(server.post("/v1/completions", json=BODY | {"stream": True, "stream_options": {"include_usage": True}}))
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == whole["choices"][0]["text"] != ""
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert all(c["usage"] is None for c in chunks[:-1])
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-1] == whole["choices"][0]["finish_reason"] == "length"
    assert whole["object"] == "text_completion" and whole["id"].startswith("cmpl-")


def test_several_prompts_and_completions(server: httpx.Client) -> None:
    answer = server.post("/v1/completions", json=BODY | {"prompt": ["One day", [5, 6, 7]], "n": 2, "temperature": 1, "seed": 3}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
