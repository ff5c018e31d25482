"""/v1/conversations over HTTP: items by page, owners, and responses that go on with them."""

from typing import Any

import httpx2 as httpx
import pytest
from quire.tests.frontend.server.scripted import ScriptedEngine, named_events, scripted_app, talk

URL, RESPONSES = "/v1/conversations", "/v1/responses"
HI = {"role": "user", "content": "What is 2 + 3?"}


def text_of(item: dict[str, Any]) -> str:
    return item["content"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_responses_add_to_a_conversation(stream: bool) -> None:
    engine = ScriptedEngine(["five"])

    async def speak(client: httpx.AsyncClient) -> None:
        made = (await client.post(URL, json={"items": [HI], "metadata": {"a": "b"}})).json()
        assert (made["object"], made["metadata"]) == ("conversation", {"a": "b"})
        for reference in (made["id"], {"id": made["id"]}):
            body = {"input": "And now?", "conversation": reference, "stream": stream}
            answer = await client.post(RESPONSES, json=body)
            said = named_events(answer)[-1][1]["response"] if stream else answer.json()
            assert said["conversation"] == {"id": made["id"]}, said
        listed = (await client.get(f"{URL}/{made['id']}/items", params={"order": "asc"})).json()
        texts = ["What is 2 + 3?", "And now?", "five", "And now?", "five"]
        assert list(map(text_of, listed["data"])) == texts
        assert len({item["id"] for item in listed["data"]}) == 5

    talk(scripted_app(engine), speak)
    first, second = engine.prompts
    assert second.startswith(first + "five") and first.count("What is 2 + 3?") == 1


def test_items_and_metadata_change() -> None:
    async def speak(client: httpx.AsyncClient) -> None:
        one = f"{URL}/{(await client.post(URL, json={})).json()['id']}"
        added = (await client.post(f"{one}/items", json={"items": [HI, HI]})).json()
        first, last = (item["id"] for item in added["data"])
        assert (added["first_id"], added["last_id"]) == (first, last) and first != last
        page = (await client.get(f"{one}/items", params={"limit": 1})).json()
        assert [item["id"] for item in page["data"]] == [last] and page["has_more"]
        page = (await client.get(f"{one}/items", params={"after": last})).json()
        assert [item["id"] for item in page["data"]] == [first] and not page["has_more"]
        assert text_of((await client.get(f"{one}/items/{first}")).json()) == HI["content"]
        assert (await client.post(one, json={"metadata": {"k": "v"}})).json()["metadata"] == {
            "k": "v"
        }
        rest = (await client.delete(f"{one}/items/{first}")).json()
        assert (rest["object"], rest["metadata"]) == ("conversation", {"k": "v"})
        assert (await client.get(f"{one}/items/{first}")).status_code == 404
        assert [i["id"] for i in (await client.get(f"{one}/items")).json()["data"]] == [last]
        gone = (await client.delete(one)).json()
        assert gone["deleted"] and gone["object"] == "conversation.deleted"
        for answer in (
            await client.get(one),
            await client.get(f"{one}/items"),
            await client.post(f"{one}/items", json={"items": [HI]}),
            await client.post(RESPONSES, json={"input": "x", "conversation": gone["id"]}),
        ):
            assert answer.status_code == 404 and "Conversation with id" in answer.text

    talk(scripted_app(ScriptedEngine(["a"])), speak)


def test_a_conversation_is_no_response_and_belongs_to_its_key() -> None:
    app = scripted_app(ScriptedEngine(["a"]), api_key=["mine", "theirs"])

    async def speak(client: httpx.AsyncClient) -> None:
        made = (await client.post(URL, json={"items": [HI]})).json()["id"]
        response = (await client.post(RESPONSES, json={"input": "x"})).json()["id"]
        assert (await client.get(f"{RESPONSES}/{made}")).status_code == 404
        assert (await client.get(f"{URL}/{response}")).status_code == 404
        body = {"input": "x", "previous_response_id": made}
        refusal = (await client.post(RESPONSES, json=body)).json()["error"]
        assert refusal["code"] == "previous_response_not_found"
        other = {"authorization": "Bearer theirs"}
        assert (await client.get(f"{URL}/{made}", headers=other)).status_code == 404
        assert (await client.get(f"{URL}/{made}")).status_code == 200

    talk(app, speak, authorization="Bearer mine")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (URL, {"items": [{"type": "item_reference", "id": "msg_1"}]}, "items[0].type"),
        (URL, {"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        (f"{URL}/conv_1/items", {"items": []}, "items"),
        (RESPONSES, {"input": "x", "conversation": {}}, "conversation.id"),
    ],
)
def test_refusals_name_the_field(path: str, body: dict[str, Any], param: str) -> None:
    app = scripted_app(ScriptedEngine(["a"]))
    answer = talk(app, lambda client: client.post(path, json=body))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_a_server_that_stores_nothing_says_so() -> None:
    app = scripted_app(ScriptedEngine(["a"]), max_stored_responses=0)
    answer = talk(app, lambda client: client.post(URL, json={}))
    assert answer.status_code == 400 and "--max-stored-responses 0" in answer.text
