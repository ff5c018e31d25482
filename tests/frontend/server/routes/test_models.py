"""/models, over HTTP."""

import httpx2 as httpx
from quire.tests.frontend.server.scripted import ScriptedEngine, post, scripted_app, talk


def test_list_and_one(server: httpx.Client) -> None:
    listed = server.get("/v1/models").json()
    assert listed["object"] == "list" and [card["id"] for card in listed["data"]] == ["bundled"]
    assert server.get("/v1/models/bundled").json() == listed["data"][0]
    answer = server.get("/v1/models/gpt-4")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


def test_a_model_of_several_names_is_listed_under_each() -> None:
    app = scripted_app(ScriptedEngine(["a"]), model_aliases=["gpt-9", "claude-9"])
    listed = talk(app, lambda client: client.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"]) for card in listed] == [
        ("bundled", "bundled"),
        ("gpt-9", "bundled"),
        ("claude-9", "bundled"),
    ]
    assert talk(app, lambda client: client.get("/v1/models/gpt-9")).json() == listed[1]
    tags = talk(app, lambda client: client.get("/api/tags")).json()["models"]
    assert [tag["name"] for tag in tags] == ["bundled", "gpt-9", "claude-9"]
    body = {"model": "claude-9", "prompt": "x"}
    assert post(app, "/v1/completions", body).json()["model"] == "claude-9"


def test_codex_gets_its_own_list_beside_the_usual_one() -> None:
    """It asks with `client_version`, and reads how much context it may use."""
    app = scripted_app(ScriptedEngine(["a"]))
    usual = talk(app, lambda client: client.get("/v1/models")).json()
    both = talk(app, lambda client: client.get("/v1/models?client_version=0.169.0")).json()
    assert usual.keys() == {"object", "data"} and both["data"] == usual["data"]
    [model] = both["models"]
    assert (model["slug"], model["context_window"]) == ("bundled", 512)
    assert model["input_modalities"] == ["text"] and model["supported_in_api"]
