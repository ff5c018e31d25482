"""A template tells an empty list of tools from none at all, as in transformers, in every API."""

import pytest
from quire.tests.frontend.server.scripted import ScriptedEngine, post, scripted_app

TEMPLATE = "{% if tools is none %}none{% else %}{{ tools | length }}{% endif %}"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", MESSAGES),
        ("/v1/messages", MESSAGES | {"max_tokens": 5}),
        ("/v1/responses", {"input": "hi"}),
        ("/api/chat", MESSAGES | {"model": "bundled"}),
    ],
)
@pytest.mark.parametrize(("fields", "prompt"), [({}, "none"), ({"tools": []}, "0")])
def test_an_empty_list_of_tools_is_not_none(
    path: str, body: dict, fields: dict, prompt: str
) -> None:
    engine = ScriptedEngine(["a"])
    assert post(scripted_app(engine, TEMPLATE), path, body | fields).status_code == 200
    assert engine.prompts == [prompt]
