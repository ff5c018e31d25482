"""/v1/responses over HTTP: stored conversations, their owners, and the same text as
OpenAI's chat.
"""

from typing import Any

import httpx2 as httpx
import pytest
from quire.tests.frontend.server.scripted import (
    WITH_THOUGHT_AND_CALL,
    ScriptedEngine,
    named_events,
    post,
    scripted_app,
    talk,
)

URL = "/v1/responses"
BODY = {"input": "What is 2 + 3?"}
TOOLS = {"tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_continues_from_a_stored_response(stream: bool) -> None:
    engine = ScriptedEngine(WITH_THOUGHT_AND_CALL)

    async def speak(client: httpx.AsyncClient) -> None:
        answer = await client.post(
            URL, json=BODY | TOOLS | {"instructions": "be brief", "stream": stream}
        )
        first = named_events(answer)[-1][1]["response"] if stream else answer.json()
        call = first["output"][-1]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
        second = (
            await client.post(
                URL, json=TOOLS | {"input": [result], "previous_response_id": first["id"]}
            )
        ).json()
        assert second["previous_response_id"] == first["id"] and second["instructions"] is None
        listed = (
            await client.get(f"{URL}/{second['id']}/input_items", params={"order": "asc"})
        ).json()
        assert [item["type"] for item in listed["data"]] == [
            "message",
            "reasoning",
            "message",
            "function_call",
            "function_call_output",
        ]
        assert (await client.get(f"{URL}/{first['id']}")).json() == first

    talk(scripted_app(engine), speak)
    assert "be brief" not in engine.prompts[1]
    order = [
        engine.prompts[1].index(text)
        for text in ("What is 2 + 3?", "<think>Well.</think>", '"a": 1', "<|im_start|>tool\n5")
    ]
    assert order == sorted(order)


def test_lists_are_paginated() -> None:
    items = [{"role": "user", "content": f"number {i}"} for i in range(5)]

    async def speak(client: httpx.AsyncClient) -> list[Any]:
        response_id = (await client.post(URL, json={"input": items})).json()["id"]
        pages, after = [], {}
        while True:
            page = (
                await client.get(f"{URL}/{response_id}/input_items", params={"limit": 2, **after})
            ).json()
            assert (page["object"], page["first_id"], page["last_id"]) == (
                "list",
                page["data"][0]["id"],
                page["data"][-1]["id"],
            )
            pages.append([item["content"][0]["text"][-1] for item in page["data"]])
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
        for bad in ({"limit": 0}, {"limit": "x"}, {"order": "up"}, {"after": "nobody"}):
            refusal = await client.get(f"{URL}/{response_id}/input_items", params=bad)
            assert refusal.status_code == 400 and refusal.json()["error"]["param"] in bad
        return pages

    assert talk(scripted_app(ScriptedEngine(["a"])), speak) == [["4", "3"], ["2", "1"], ["0"]]


def test_deleted_or_unstored_responses_are_not_found() -> None:
    async def speak(client: httpx.AsyncClient) -> None:
        kept = (await client.post(URL, json=BODY)).json()
        refusal = await client.post(f"{URL}/{kept['id']}/cancel")
        assert refusal.status_code == 400 and "background" in refusal.json()["error"]["message"]
        assert (
            await client.get(f"{URL}/{kept['id']}", params={"stream": "true"})
        ).status_code == 400
        assert (await client.delete(f"{URL}/{kept['id']}")).json() == {
            "id": kept["id"],
            "object": "response",
            "deleted": True,
        }
        assert set((await client.put(f"{URL}/x")).headers["allow"].split(", ")) >= {"GET", "DELETE"}
        unkept = (await client.post(URL, json=BODY | {"store": False})).json()
        for response_id in (kept["id"], unkept["id"], "resp_nobody"):
            for answer in (
                await client.get(f"{URL}/{response_id}"),
                await client.delete(f"{URL}/{response_id}"),
            ):
                assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"
            refusal = (
                await client.post(URL, json=BODY | {"previous_response_id": response_id})
            ).json()["error"]
            assert (refusal["code"], refusal["param"]) == (
                "previous_response_not_found",
                "previous_response_id",
            )

    talk(scripted_app(ScriptedEngine(["a"])), speak)


def test_another_key_does_not_find_a_response() -> None:
    app = scripted_app(ScriptedEngine(["a"]), api_key=["mine", "theirs"])
    response_id = post(app, URL, BODY, authorization="Bearer mine").json()["id"]

    def status(key: str) -> int:
        return talk(
            app, lambda client: client.get(f"{URL}/{response_id}"), authorization=f"Bearer {key}"
        ).status_code

    assert (status("theirs"), status("mine")) == (404, 200)
    refusal = post(
        app, URL, BODY | {"previous_response_id": response_id}, authorization="Bearer theirs"
    )
    assert refusal.json()["error"]["code"] == "previous_response_not_found"


def test_a_server_that_stores_nothing() -> None:
    app = scripted_app(ScriptedEngine(["a"]), max_stored_responses=0)
    assert post(app, URL, BODY).json()["store"] is False
    refusal = post(app, URL, BODY | {"store": True})
    assert refusal.status_code == 400 and refusal.json()["error"]["param"] == "store"


def test_items_can_be_referred_to() -> None:
    engine = ScriptedEngine(["a thing"])

    async def speak(client: httpx.AsyncClient) -> None:
        item = (await client.post(URL, json=BODY)).json()["output"][0]
        items = [{"type": "item_reference", "id": item["id"]}, {"role": "user", "content": "go on"}]
        assert (await client.post(URL, json={"input": items})).status_code == 200
        for ids, code, param in (
            (["msg_nobody"], "item_not_found", "input[0].id"),
            ([item["id"]] * 2, "invalid_value", "input[1].id"),
        ):
            items = [{"type": "item_reference", "id": item_id} for item_id in ids]
            refusal = (await client.post(URL, json={"input": items})).json()["error"]
            assert (refusal["code"], refusal["param"]) == (code, param)

    talk(scripted_app(engine), speak)
    assert "assistant\na thing<|im_end|>" in engine.prompts[1]


def test_truncation_leaves_out_the_oldest() -> None:
    engine = ScriptedEngine(["a"])
    app = scripted_app(engine)
    items = [
        {"role": role, "content": f"{role} {i} " + "word " * 60}
        for i in range(6)
        for role in ("user", "assistant")
    ][:-1]
    body = {"input": items, "instructions": "be brief", "max_output_tokens": 20}
    assert post(app, URL, body).json()["error"]["code"] == "context_length_exceeded"
    assert post(app, URL, body | {"truncation": "auto"}).status_code == 200
    assert (
        "be brief" in engine.prompts[-1]
        and "user 5" in engine.prompts[-1]
        and "user 0" not in engine.prompts[-1]
    )
    first = next(i for i in range(6) if f"user {i}" in engine.prompts[-1])
    longer = [{"role": "system", "content": "be brief"}, *items[2 * (first - 1) :]]
    # another turn would not have fitted
    assert post(app, URL, {"input": longer, "max_output_tokens": 20}).status_code == 400
    assert (
        post(app, URL, {"input": "word " * 600, "truncation": "auto"}).json()["error"]["param"]
        == "input"
    )


def test_the_same_log_probabilities_as_openais_chat(server: httpx.Client) -> None:
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    chat = server.post(
        "/v1/chat/completions",
        json={
            "messages": messages,
            "max_tokens": 16,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 2,
        },
    )
    body = {
        "input": messages,
        "max_output_tokens": 16,
        "temperature": 0,
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }
    whole = server.post(URL, json=body).json()["output"][0]["content"][0]
    assert (
        whole["logprobs"] == chat.json()["choices"][0]["logprobs"]["content"]
        and len(whole["logprobs"][0]["top_logprobs"]) == 2
    )
    events = named_events(server.post(URL, json=body | {"stream": True}))
    told = [
        one
        for name, data in events
        if name == "response.output_text.delta"
        for one in data["logprobs"]
    ]
    done = next(data for name, data in events if name == "response.output_text.done")
    assert (
        told
        == done["logprobs"]
        == events[-1][1]["response"]["output"][0]["content"][0]["logprobs"]
        == whole["logprobs"]
    )
    assert events[2][1]["item"]["content"] == [] and events[3][1]["part"]["logprobs"] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("probe", [{"input": []}, {"generate": False}])
def test_a_probe_is_answered_without_generation(probe: dict[str, Any], stream: bool) -> None:
    engine = ScriptedEngine(["a"])
    answer = post(scripted_app(engine), URL, BODY | TOOLS | probe | {"stream": stream})
    if stream:
        names, events = zip(*named_events(answer), strict=True)
        assert names == ("response.created", "response.completed")
        said = events[-1]["response"]
    else:
        said = answer.json()
    assert (said["status"], said["output"], said["usage"]["total_tokens"]) == ("completed", [], 0)
    assert not engine.prompts


def test_a_conversation_is_compacted_and_goes_on() -> None:
    """What the user said stays as it is; the model's summary stands for the rest."""
    engine = ScriptedEngine(["We added."])
    said = [
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "five"},
    ]

    async def speak(client: httpx.AsyncClient) -> list[Any]:
        made = (await client.post(f"{URL}/compact", json={"input": said})).json()
        assert made["object"] == "response.compaction" and made["usage"]["output_tokens"] == 1
        kept, summary = made["output"]
        assert (kept["content"][0]["text"], summary["type"]) == ("What is 2 + 3?", "compaction")
        go_on = [*made["output"], {"role": "user", "content": "And 4?"}]
        assert (await client.post(URL, json={"input": go_on})).status_code == 200
        foreign = summary | {"encrypted_content": "gAAAA"}
        refusals = [
            await client.post(URL, json={"input": [foreign]}),
            await client.post(f"{URL}/compact", json={"input": []}),
        ]
        return [answer.json()["error"]["param"] for answer in refusals]

    assert talk(scripted_app(engine), speak) == ["input[0].encrypted_content", "input"]
    asked, continued = engine.prompts
    assert "five" in asked and "Summarize the conversation" in asked
    assert "five" not in continued and "Summarize" not in continued
    order = [continued.index(text) for text in ("What is 2 + 3?", "We added.", "And 4?")]
    assert order == sorted(order)


def test_errors_have_openais_format() -> None:
    app = scripted_app(ScriptedEngine(["a"]))
    for change, param in (
        ({"background": True}, "background"),
        ({"model": "other"}, "model"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ):
        error = post(app, URL, BODY | change).json()["error"]
        assert error.keys() == {"message", "type", "param", "code"} and error["param"] == param
    assert post(app, URL, BODY | {"colour": 1}).headers["x-unknown-params"] == "colour"


@pytest.mark.parametrize("stream", [False, True])
def test_the_same_text_as_openais_chat(server: httpx.Client, stream: bool) -> None:
    messages = [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": "What is 2 + 3?"},
    ]
    chat = server.post(
        "/v1/chat/completions", json={"messages": messages, "max_tokens": 16, "temperature": 0}
    ).json()
    body = {
        "input": messages[1:],
        "instructions": "Answer.",
        "max_output_tokens": 16,
        "temperature": 0,
        "stream": stream,
    }
    answer = server.post(URL, json=body)
    said = named_events(answer)[-1][1]["response"] if stream else answer.json()
    assert (
        said["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
        and said["status"] == "completed"
    )
    usage = chat["usage"]
    assert (said["usage"]["input_tokens"], said["usage"]["output_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    counted = server.post(f"{URL}/input_tokens", json={"input": messages}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": usage["prompt_tokens"]}
