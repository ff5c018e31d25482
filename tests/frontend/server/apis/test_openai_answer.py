"""What OpenAI's completions and chat have in common: chunks of plain text, usage in a stream."""

from typing import Any

import msgspec
import pytest
from quire.tests.frontend.server.scripted import ScriptedEngine, post, scripted_app

PATHS = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}
TEXTS = ["a", 'quote " and \\ and é', "c", "d"]


def chunks(path: str, **fields: Any) -> list[dict[str, Any]]:
    body = PATHS[path] | {"stream": True} | fields
    text = post(scripted_app(ScriptedEngine(TEXTS), "{{ messages }}"), path, body).text
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [msgspec.json.decode(event.removeprefix("data: ")) for event in events]


def text_of(chunk: dict[str, Any]) -> str:
    (choice,) = chunk["choices"]
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


@pytest.mark.parametrize("path", PATHS)
def test_chunks_of_plain_text_are_like_all_others(path: str) -> None:
    """Token ids take the long way."""
    plain, others = chunks(path), chunks(path, return_token_ids=True)
    ids = ("token_ids", "prompt_token_ids")
    for chunk in others:
        chunk.pop("prompt_token_ids", None)
        chunk["choices"] = [
            {name: value for name, value in choice.items() if name not in ids}
            for choice in chunk["choices"]
        ]
    num_more = len(others) - len(plain)  # completions send the ids of the prompt first
    for chunk in (*plain, *others):
        assert chunk.pop("created") and chunk.pop("id")
    assert others[num_more:] == plain
    assert "".join(map(text_of, plain)) == "".join(TEXTS)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({}, []),
        ({"include_usage": True}, [4]),
        ({"include_usage": True, "continuous_usage_stats": True}, [1, 2, 3, 4, 4]),
    ],
)
def test_usage_comes_at_the_end_or_always(path: str, options: dict, counts: list[int]) -> None:
    found = chunks(path, stream_options=options)
    assert all(("usage" in chunk) is bool(options) for chunk in found)
    told = [chunk["usage"]["completion_tokens"] for chunk in found if chunk.get("usage")]
    assert sorted(set(told)) == sorted(set(counts)) and told == sorted(told)
    assert (found[-1]["choices"] == []) is bool(options)
