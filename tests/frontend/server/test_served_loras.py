"""Adapters over HTTP: loading, unloading, lists, selection by `model`, errors, metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
import quire
from quire.frontend.server.served_loras import ServedLoras, make_request, parse_modules
from quire.ipc.errors import InvalidParameterError
from quire.ipc.lora import LoRARequest
from quire.ipc.params import SamplingParams
from quire.tests.fake_loras import adapter_digest
from quire.tests.fakes import expected_output, make_config
from quire.tests.frontend.server.conftest import running_server, slow_engine
from quire.tests.frontend.server.scripted import ScriptedEngine, scripted_app, talk
from quire.tests.frontend.server.slots import make_slots

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
LIMITS = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3}


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with (
        slow_engine(0.001, **LIMITS) as (address, _),
        running_server(
            *("--engine", address, "--admin", "--vllm-metrics"),
            *("--lora-modules", "sql=/adapters/sql", '{"name": "law", "path": "/adapters/law"}'),
        ) as client,
    ):
        yield client


def expected(path: str | None) -> list[int]:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=5)
    digest = 0 if path is None else adapter_digest(path)
    return expected_output([1, 2, 3], params, [], make_config(max_model_len=10_000), digest)[0]


def complete(server: httpx.Client, **body: Any) -> httpx.Response:
    return server.post("/v1/completions", json=BODY | body)


def tokens(server: httpx.Client, **body: Any) -> list[int]:
    answer = complete(server, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def test_the_model_of_the_body_selects_the_adapter(server: httpx.Client) -> None:
    base = server.get("/v1/models").json()["data"][0]["id"]
    assert tokens(server) == tokens(server, model=base) == expected(None)
    assert tokens(server, model="sql") == expected("/adapters/sql") != expected(None)
    assert tokens(server, model="law") == expected("/adapters/law")
    assert complete(server, model="sql").json()["model"] == "sql"
    assert server.get("/v1/requests").json()["data"][0]["model"] == "sql"


def test_lists_name_adapters_after_their_model(server: httpx.Client) -> None:
    base, *loras = server.get("/v1/models").json()["data"][:3]
    assert [(c["id"], c["root"], c["parent"]) for c in loras] == [
        ("sql", "/adapters/sql", base["id"]),
        ("law", "/adapters/law", base["id"]),
    ]
    assert base["parent"] is None and base["max_model_len"] == loras[0]["max_model_len"]
    assert server.get("/v1/models/sql").json() == loras[0]
    missing = server.get("/v1/models/poems")
    assert missing.status_code == 404 and "'sql', 'law'" in missing.json()["error"]["message"]
    assert server.get("/v1/engine/state").json()["loras"][:2] == ["sql", "law"]


def test_load_and_unload(server: httpx.Client) -> None:
    assert complete(server, model="new").status_code == 404
    answer = server.post(LOAD, json={"lora_name": "new", "lora_path": "/adapters/new"})
    assert answer.status_code == 200, answer.text
    assert answer.text == "Success: LoRA adapter 'new' added successfully."
    assert tokens(server, model="new") == expected("/adapters/new")
    again = server.post(LOAD, json={"lora_name": "new", "lora_path": "/adapters/newer"})
    error = again.json()["error"]
    assert again.status_code == 400 and error["code"] == "lora_already_loaded"
    body = {"lora_name": "new", "lora_path": "/adapters/newer", "load_inplace": True}
    assert server.post(LOAD, json=body).status_code == 200
    assert tokens(server, model="new") == expected("/adapters/newer")
    answer = server.post(UNLOAD, json={"lora_name": "new"})
    assert answer.text == "Success: LoRA adapter 'new' removed successfully."
    assert complete(server, model="new").status_code == 404


MISSING_FIELD, BAD, GONE = "missing_required_parameter", "invalid_value", "lora_not_found"
ERRORS = [
    (LOAD, {"lora_name": "a"}, 400, "lora_path", MISSING_FIELD, "lora_path"),
    (LOAD, {"lora_path": "/a"}, 400, "lora_name", MISSING_FIELD, "lora_name"),
    (LOAD, {"lora_name": "", "lora_path": "/a"}, 400, "lora_name", BAD, "1 to 256 characters"),
    (LOAD, {"lora_name": "a", "lora_path": ""}, 400, "lora_path", BAD, "1 to 4096 characters"),
    (LOAD, {"lora_name": 1, "lora_path": "/a"}, 400, "lora_name", "invalid_type", "lora_name"),
    (
        LOAD,
        {"lora_name": "a", "lora_path": "/a", "load_inplace": "x"},
        400,
        "load_inplace",
        "invalid_type",
        "load_inplace",
    ),
    (
        LOAD,
        {"lora_name": "a", "lora_path": "/missing/a"},
        400,
        "lora_path",
        BAD,
        "/missing/a is not there",
    ),
    (
        LOAD,
        {"lora_name": "sql", "lora_path": "/missing/a", "load_inplace": True},
        400,
        "lora_path",
        BAD,
        "/missing/a is not there",
    ),
    (
        LOAD,
        {"lora_name": "sql", "lora_path": "/a"},
        400,
        "lora_name",
        "lora_already_loaded",
        "'load_inplace' loads it again",
    ),
    (UNLOAD, {"lora_name": "a"}, 404, "lora_name", GONE, "'a' cannot be found"),
    (UNLOAD, {"lora_name": "sql", "lora_int_id": 1}, 404, "lora_int_id", GONE, "cannot be found"),
    (UNLOAD, {}, 400, "lora_name", MISSING_FIELD, "lora_name"),
    (
        "/v1/completions",
        BODY | {"model": "gone"},
        404,
        "model",
        "model_not_found",
        "This server has 'bundled', 'sql', 'law'",
    ),
    (
        "/v1/embeddings",
        {"input": "x", "model": "sql"},
        400,
        "model",
        "unsupported_value",
        "'sql' is a LoRA adapter, which only generates text",
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "code", "piece"), ERRORS)
def test_bad_requests(server: httpx.Client, path, body, status, param, code, piece) -> None:
    answer = server.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code) and piece in error["message"]
    assert tokens(server, model="sql") == expected("/adapters/sql")


def test_the_documentation_lists_these_errors() -> None:
    text = (Path(quire.__file__).parent / "docs" / "lora.md").read_text()
    listed = re.findall(r"^\| (\d{3}) \| `(\w+)` \|", text, re.MULTILINE)
    without_admin = ("403", "admin_disabled")  # tests/frontend/server/error_rows
    assert sorted(listed) == sorted({(str(row[2]), row[4]) for row in ERRORS} | {without_admin})


def test_the_models_own_name_is_taken(server: httpx.Client) -> None:
    base = server.get("/v1/models").json()["data"][0]["id"]
    answer = server.post(LOAD, json={"lora_name": base, "lora_path": "/a"})
    assert answer.status_code == 400 and "must differ" in answer.json()["error"]["message"]


def test_more_adapters_than_memory_holds(server: httpx.Client) -> None:
    for i in range(7):
        body = {"lora_name": f"many{i}", "lora_path": f"/adapters/many{i}"}
        assert server.post(LOAD, json=body).status_code == 200
    for i in range(7):
        assert tokens(server, model=f"many{i}") == expected(f"/adapters/many{i}")
    for i in range(7):
        assert server.post(UNLOAD, json={"lora_name": f"many{i}"}).status_code == 200


def test_metrics_name_running_and_waiting_adapters(server: httpx.Client) -> None:
    tokens(server, model="sql")
    adapters = server.get("/v1/engine/state").json()["adapters"]
    assert 0 < adapters.pop("num_in_memory") <= 3
    assert adapters == {"max_loras": 2, "max_cpu_loras": 3, "running": [], "waiting": []}
    text = server.get("/metrics").text
    for prefix in ("quire", "vllm"):
        found = re.search(rf"^{prefix}:lora_requests_info{{(.*)}} (\S+)$", text, re.MULTILINE)
        assert found is not None
        assert (
            found[1] == 'max_lora="2",running_lora_adapters="",waiting_lora_adapters=""'
            and float(found[2]) > 1.7e9
        )


def test_a_stream_goes_on_while_adapters_come_and_go(server: httpx.Client) -> None:
    body = BODY | {"model": "sql", "max_tokens": 200, "stream": True, "ignore_eos": True}
    num_chunks = num_loads = 0
    with server.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            num_chunks += line.startswith("data: {")
            if num_chunks % 20 == 1:
                load = {"lora_name": "brief", "lora_path": "/adapters/brief"}
                assert httpx.post(f"{server.base_url}{LOAD}", json=load).status_code == 200
                gone = httpx.post(f"{server.base_url}{UNLOAD}", json={"lora_name": "brief"})
                assert gone.status_code == 200
                num_loads += 1
    assert num_loads >= 2 and num_chunks >= 20


# ---------------------------------------------------------------- without --enable-lora


def test_a_server_without_adapters_says_so() -> None:
    engine = ScriptedEngine(["a"])

    async def speak(client: httpx.AsyncClient) -> None:
        answer = await client.post(LOAD, json={"lora_name": "a", "lora_path": "/a"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "This server was started without --enable-lora."

    talk(scripted_app(engine, admin=True), speak)


# ---------------------------------------------------------------- every route that generates

SAY = [{"role": "user", "content": "hi"}]
GENERATING = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": SAY},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": SAY, "max_tokens": 3},
    "/api/chat": {"messages": SAY},
    "/api/generate": {"prompt": "hi"},
}


class NotingEngine(ScriptedEngine):
    """Notes the adapter of each request."""

    def __init__(self) -> None:
        super().__init__(["a", "b"])
        self.loras: list[LoRARequest | None] = []

    async def generate(self, *args: Any, lora_request: LoRARequest | None = None, **options: Any):
        self.loras.append(lora_request)
        async for output in super().generate(*args, **options):
            yield output


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATING)
def test_every_route_that_generates(path: str, stream: bool) -> None:
    engine = NotingEngine()
    app = scripted_app(engine)
    sql = app.state.loras.by_name["sql"] = make_request("sql", "/adapters/sql")
    base = app.state.model_name

    async def speak(client: httpx.AsyncClient) -> None:
        for model in ("sql", base):
            body = GENERATING[path] | {"model": model, "stream": stream}
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert f'"model":"{model}"' in answer.text.replace('": "', '":"')
        answer = await client.post(path, json=GENERATING[path] | {"model": "poems"})
        assert answer.status_code == 404 and "poems" in answer.text

    talk(app, speak)
    assert engine.loras == [sql, None]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/api/embed"])
def test_routes_that_pool_refuse_adapters(path: str) -> None:
    app = scripted_app(ScriptedEngine(["a"]))
    app.state.loras.by_name["sql"] = make_request("sql", "/adapters/sql")

    async def speak(client: httpx.AsyncClient) -> None:
        answer = await client.post(path, json={"model": "sql", "input": "hi"})
        assert answer.status_code == 400 and "'sql' is a LoRA adapter" in answer.text

    talk(app, speak)


def test_ollamas_lists() -> None:
    app = scripted_app(ScriptedEngine(["a"]))
    app.state.loras.by_name["sql"] = make_request("sql", "/adapters/sql")
    base = app.state.model_name

    async def speak(client: httpx.AsyncClient) -> None:
        model, lora = (await client.get("/api/tags")).json()["models"]
        assert (model["name"], lora["name"]) == (base, "sql")
        assert lora["details"] == model["details"] | {"parent_model": base}
        assert lora["digest"] != model["digest"]
        assert (await client.post("/api/show", json={"model": "sql:latest"})).status_code == 200

    talk(app, speak)


# ---------------------------------------------------------------- names and several models


def test_the_id_of_an_adapter_follows_from_its_name_and_path() -> None:
    one = make_request("sql", "/adapters/sql")
    assert one == make_request("sql", "/adapters/sql")
    assert one.lora_int_id != make_request("sql", "/adapters/other").lora_int_id
    assert one.lora_int_id != make_request("law", "/adapters/sql").lora_int_id
    assert 1 <= one.lora_int_id <= 2**48


def test_modules_of_the_command_line() -> None:
    found = parse_modules(["sql=/a=b", '{"name": "law", "path": "/l", "base_model_name": "m"}'])
    assert [(module.name, module.path) for module in found] == [("sql", "/a=b"), ("law", "/l")]
    for bad, words in (
        (["sql"], "must be NAME=PATH, got 'sql'"),
        (["=/a"], "must be NAME=PATH"),
        (["sql="], "must be NAME=PATH"),
        (['{"name": "a"}'], "missing required field `path`"),
        (["a=/a", "a=/b"], "a is there twice"),
    ):
        with pytest.raises(InvalidParameterError, match=f"lora_modules: .*{re.escape(words)}"):
            parse_modules(bad)


def test_a_module_that_cannot_be_loaded_names_itself() -> None:
    class Engine(SimpleNamespace):
        async def add_lora(self, request: LoRARequest) -> None:
            raise InvalidParameterError("lora_request", "no such file")

    async def load() -> None:
        await ServedLoras().load_modules(Engine(), ["sql=/a"])

    import asyncio

    with pytest.raises(InvalidParameterError, match="lora_modules: sql: lora_request: no such"):
        asyncio.run(load())


def test_an_adapter_belongs_to_one_of_several_models() -> None:
    models, _, _ = make_slots({"a": 100, "b": 100}, limit=200)
    models.slots["b"].state.loras.by_name["sql"] = make_request("sql", "/adapters/sql")
    assert models.find("sql") is models.slots["b"]
