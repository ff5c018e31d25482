"""/api/tags, /api/show, /api/ps, /api/version: model information for Ollama's clients, and
refusals.
"""

import json
from datetime import datetime
from pathlib import Path

import pytest
from quire.frontend.engine_args import EngineArgs
from quire.frontend.model_info.plan import make_plan
from quire.frontend.server.routes.ollama_models import tag
from quire.tests.frontend.server.scripted import ScriptedEngine, post, scripted_app, talk
from quire.tests.gguf_checkpoints import write_gguf
from quire.tests.quantized_checkpoints import FORMATS
from quire.tests.tiny_models import save_tiny_model

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
    assert model["details"] == {
        "parent_model": "",
        "format": "safetensors",
        "family": "qwen2",
        "families": ["qwen2"],
        "parameter_size": "4.0M",
        "quantization_level": "BF16",
    }
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


def test_the_details_of_other_files(tmp_path: Path) -> None:
    """Format, family and numbers are those of the files; the size is what the engine takes."""
    plain = save_tiny_model(tmp_path / "plain", "gemma3_text", hidden_size=64)
    write_gguf(tmp_path / "m.gguf", plain, "Q8_0")
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = FORMATS["awq"][1]()
    (quantized / "config.json").write_text(json.dumps(config))

    def listed(path: Path, **arguments: str) -> tuple[str, str, str]:
        args = EngineArgs(str(path), device="cpu", dtype="bfloat16", **arguments)
        found = tag("m", args.create_engine_config())
        assert found["size"] == make_plan(args).weights_bytes
        details = found["details"]
        assert details["parameter_size"] == sizes
        return details["format"], details["family"], details["quantization_level"]

    sizes = tag("m", EngineArgs(str(plain)).create_engine_config())["details"]["parameter_size"]
    assert listed(plain) == ("safetensors", "gemma3_text", "F32")
    assert listed(plain, quantization="int4") == ("safetensors", "gemma3_text", "INT4")
    assert listed(tmp_path / "m.gguf") == ("gguf", "gemma3", "Q8_0")
    assert listed(quantized) == ("safetensors", "gemma3_text", "AWQ INT4")


def test_the_version_can_be_compared_by_clients() -> None:
    assert [int(part) for part in get("/api/version")["version"].split(".")] >= [0, 6, 4]


def test_the_model_that_is_there_can_be_pulled() -> None:
    """Clients pull a model before they use it."""
    answer = post(APP, "/api/pull", {"model": "bundled:latest"})
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert lines == [{"status": "pulling manifest"}, {"status": "success"}]
    assert post(APP, "/api/pull", {"name": "bundled", "stream": False}).json() == lines[-1]
    absent = post(APP, "/api/pull", {"model": "llama3"})
    assert absent.status_code == 404 and "quire pull" in absent.json()["error"]
    assert "--allow-model-changes" in absent.json()["error"]


def test_deleting_names_the_option_that_allows_it() -> None:
    body = {"model": "bundled"}
    answer = talk(APP, lambda client: client.request("DELETE", "/api/delete", json=body))
    assert answer.status_code == 403 and "--allow-model-changes" in answer.json()["error"]


@pytest.mark.parametrize("path", ["/api/copy", "/api/create", "/api/push"])
def test_unsupported_actions_are_refused_with_a_sentence(path: str) -> None:
    answer = post(APP, path, {"model": "bundled"})
    assert answer.status_code == 400 and answer.json()["error"].endswith(".")
