"""/models, over HTTP."""

import httpx2 as httpx


def test_list_and_one(server: httpx.Client) -> None:
    listed = server.get("/v1/models").json()
    assert listed["object"] == "list" and [card["id"] for card in listed["data"]] == ["bundled"]
    assert server.get("/v1/models/bundled").json() == listed["data"][0]
    answer = server.get("/v1/models/gpt-4")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
