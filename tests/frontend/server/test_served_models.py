"""Slots of a server with several models: sizes of caches, the default, durations, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from quire.frontend.engine_args import EngineArgs
from quire.frontend.model_info.plan import RUNTIME_BYTES
from quire.frontend.server.app import make_app
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.models import Models
from quire.frontend.server.served_models import ServedModel, make_models
from quire.frontend.server.state import ServerState
from quire.ipc.errors import InvalidParameterError, ModelLoadError
from quire.tests.frontend.server.scripted import talk
from quire.tests.tiny_encoders import save_tiny_encoder
from quire.tests.tiny_models import save_tiny_model

GIB = 2**30


def made(own: dict[str, Any] | None = None, **config: Any) -> Models:
    """Twice the bundled model, the second with settings of its own."""
    one, two = EngineArgs(), EngineArgs(**(own or {}))
    served = [ServedModel("one", one), ServedModel("two", two)]
    return make_models(served, ServerConfig(**{"memory_limit": "4GiB"} | config))


def test_the_memory_is_shared() -> None:
    models = made({"kv_cache_memory_bytes": 2**26})
    one, two = models.slots.values()
    assert models.limit_bytes == 4 * GIB
    assert one.needs.runtime_bytes == RUNTIME_BYTES and one.needs.weights_bytes > 0
    # as on a machine with half of the memory: two fifths of what weights and engine leave
    free = 2 * GIB - one.needs.weights_bytes - RUNTIME_BYTES
    assert 0 <= 0.4 * free - one.needs.kv_cache_bytes < 2**17
    assert one.args.kv_cache_memory_bytes == one.needs.kv_cache_bytes
    assert (one.args.served_model_name, two.args.served_model_name) == ("one", "two")
    assert two.args.kv_cache_memory_bytes == 2**26 >= two.needs.kv_cache_bytes > 2**26 - 2**17


def test_a_share_that_is_too_small_for_one_sequence() -> None:
    """The cache takes more than its share: what one sequence needs. Others have to leave."""
    models = made(memory_limit="800MiB")
    one, _ = models.slots.values()
    assert one.plan.num_blocks == 0
    tokens = (1 + -(-one.plan.max_model_len // 16)) * 16
    assert one.needs.kv_cache_bytes == tokens * one.plan.kv_bytes_per_token
    assert one.needs.total_bytes <= models.limit_bytes < 2 * one.needs.total_bytes


@pytest.mark.parametrize("limit", ["4GiB", "100MiB"])
def test_a_text_encoder_has_no_cache(limit: str, tmp_path: Path) -> None:
    """Neither where it fits nor where its share is too small."""
    encoder = save_tiny_encoder(tmp_path, "bert")
    served = [ServedModel("chat", EngineArgs()), ServedModel("rag", EngineArgs(str(encoder)))]
    models = make_models(served, ServerConfig(memory_limit=limit))
    slot = models.slots["rag"]
    assert slot.args.kv_cache_memory_bytes is None and slot.needs.kv_cache_bytes == 0


def test_models_without_a_chat_template_are_known_before_they_are_loaded(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path, "qwen2")
    config = json.loads((base / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    served = [ServedModel("chat", EngineArgs()), ServedModel("base", EngineArgs(str(base)))]
    app: Any = make_app(ServerState(ServerConfig(), ""), make_models(served, ServerConfig()))

    async def speak(client: httpx.AsyncClient) -> None:
        cards = (await client.get("/v1/models")).json()["data"]
        assert {card["id"]: card["has_chat_template"] for card in cards} == {
            "chat": True,
            "base": False,
        }

    talk(app, speak)
    given = make_models(served, ServerConfig(chat_template="{{ messages }}"))
    assert given.slots["base"].has_chat_template


def test_settings() -> None:
    models = made()
    assert (models.default.name, models.keep_alive_s, models.sleep_after_s) == ("one", 300.0, None)
    models = made(default_model="two", keep_alive="-1", sleep_after="30s", model_wait_s=5.0)
    assert (models.default.name, models.keep_alive_s, models.sleep_after_s) == ("two", -1.0, 30.0)
    assert models.wait_s == 5.0 and models.slots["one"].keep_alive_s is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"default_model": "three"}, "default_model: must be one of one, two, got 'three'"),
        ({"keep_alive": "soon"}, 'keep_alive: must be a duration such as "5m"'),
        ({"sleep_after": "5 days"}, "sleep_after: must be a duration"),
        ({"memory_limit": "much"}, "memory_limit: must be a number of bytes such as 24GiB"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        made(**settings)


def test_a_gpu_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="device: several models are served on a CPU"):
        made({"device": "cuda"})


def test_a_model_that_does_not_exist_is_found_at_once() -> None:
    served = [ServedModel("one", EngineArgs()), ServedModel("two", EngineArgs("./nowhere"))]
    with pytest.raises(ModelLoadError, match="nowhere"):
        make_models(served, ServerConfig())
