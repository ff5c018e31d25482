"""/api/tags, /api/show, /api/ps, /api/version: model information for Ollama's clients, and
refusals.
"""

from datetime import datetime

import pytest
from quire.tests.frontend.server.scripted import ScriptedEngine, post, scripted_app, talk

APP = scripted_app(ScriptedEngine([""]))
PLAIN_APP = scripted_app(ScriptedEngine([""]), "{{ messages }}")


def get(path: str) -> dict:
    return talk(APP, lambda client: client.get(path)).json()


def test_the_model_in_the_lists() -> None:
    (model,), (running,) = get("/api/tags")["models"], get("/api/ps")["models"]
    assert (
        model["name"] == model["model"] == "bundled"
        and len(model["digest"]) == 64
        and model["size"] > 10**6
    )
    details = model["details"]
    assert (
        details["format"] == "safetensors"
        and details["parameter_size"].endswith("M")
        and details["quantization_level"] in ("BF16", "F32")
    )
    assert (
        running["digest"] == model["digest"]
        and running["size_vram"] == 0
        and running["context_length"] == 512
    )
    assert datetime.fromisoformat(model["modified_at"]) < datetime.fromisoformat(
        running["expires_at"]
    )


def test_the_capabilities_of_a_model() -> None:
    shown = post(APP, "/api/show", {"model": "bundled:latest"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    family = shown["model_info"]["general.architecture"]
    assert (
        shown["model_info"][f"{family}.context_length"] == 512
        and shown["model_info"]["general.parameter_count"] > 10**6
    )
    assert (
        shown["details"] == get("/api/tags")["models"][0]["details"]
        and "temperature" in shown["parameters"]
    )
    assert post(PLAIN_APP, "/api/show", {"name": "bundled"}).json()["capabilities"] == [
        "completion"
    ]
    assert (
        post(APP, "/api/show", {}).status_code == 400
        and post(APP, "/api/show", {"model": "other"}).status_code == 404
    )


def test_the_version_can_be_compared_by_clients() -> None:
    assert [int(part) for part in get("/api/version")["version"].split(".")] >= [0, 6, 4]


@pytest.mark.parametrize("path", ["/api/pull", "/api/create", "/api/embed"])
def test_unsupported_actions_are_refused_with_a_sentence(path: str) -> None:
    answer = post(APP, path, {"model": "bundled"})
    assert answer.status_code == 400 and answer.json()["error"].endswith(".")
