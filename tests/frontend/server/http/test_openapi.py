"""The OpenAPI description: it contains every route, every reference resolves, and real answers
match it.
"""

from typing import Any

import httpx2 as httpx
import jsonschema
import pytest
from quire.frontend.server.app import all_routes
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.http.openapi import describe
from quire.frontend.server.state import ServerState


@pytest.fixture(scope="module")
def document(server: httpx.Client) -> dict[str, Any]:
    return server.get("/openapi.json").json()


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {v for k, v in value.items() if k == "$ref"} | {
            r for v in value.values() for r in references(v)
        }
    return {r for v in value for r in references(v)} if isinstance(value, list) else set()


def test_every_route_is_described_once(document: dict[str, Any]) -> None:
    routes = all_routes(ServerState(ServerConfig(), "m"))
    operations = [
        (path, method) for path, methods in document["paths"].items() for method in methods
    ]
    assert len(operations) == sum(len(route.methods - {"HEAD"}) for route in routes)
    ids = [document["paths"][path][method]["operationId"] for path, method in operations]
    assert len(set(ids)) == len(ids) and all(
        operation["summary"]
        for methods in document["paths"].values()
        for operation in methods.values()
    )


def test_every_reference_resolves(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert references(document) and all(
        reference.removeprefix("#/components/schemas/") in schemas
        for reference in references(document)
    )
    for name in schemas:
        jsonschema.Draft202012Validator.check_schema(
            document | {"$ref": f"#/components/schemas/{name}"}
        )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/completions",
            {
                "prompt": ["a", "b"],
                "max_tokens": 3,
                "logprobs": 2,
                "echo": True,
                "return_token_ids": True,
                "prompt_logprobs": 1,
            },
        ),
        ("/v1/completions", {"prompt": "", "max_tokens": 3}),
        ("/v1/completions", {"prompt": 7}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 3,
                "logprobs": True,
                "top_logprobs": 2,
            },
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 3,
                "return_token_ids": True,
                "prompt_logprobs": 1,
            },
        ),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/messages", {"messages": []}),
        ("/api/chat", {"model": 3}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
        ("/v1/responses", {"input": []}),
        (
            "/api/generate",
            {"model": "bundled", "prompt": "hi", "stream": False, "options": {"num_predict": 3}},
        ),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/models", None),
        ("/v1/models/bundled", None),
        ("/v1/models/none", None),
        ("/tokenizer_info", None),
    ],
)
def test_answers_match_the_description(
    server: httpx.Client, document: dict[str, Any], path: str, body: Any
) -> None:
    answer = server.get(path) if body is None else server.post(path, json=body)
    described = "/v1/models/{model}" if path.startswith("/v1/models/") else path
    responses = document["paths"][described]["get" if body is None else "post"]["responses"]
    key = "200" if answer.status_code == 200 else f"{answer.status_code // 100}XX"
    schema = responses[key]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator(schema | {"components": document["components"]}).validate(
        answer.json()
    )


def test_bodies_that_it_forbids_are_refused(server: httpx.Client, document: dict[str, Any]) -> None:
    schema = {"$ref": "#/components/schemas/ChatBody", "components": document["components"]}
    good = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    jsonschema.Draft202012Validator(schema).validate(good)
    for bad in (
        {"messages": []},
        good | {"temperature": -1},
        good | {"logit_bias": {"x": 1}},
        good | {"n": 0},
        good | {"stop": [1]},
    ):
        assert not jsonschema.Draft202012Validator(schema).is_valid(bad)
        assert server.post("/v1/chat/completions", json=bad).status_code == 400


def test_a_handler_without_docstring_is_listed() -> None:
    async def plain(request: object) -> None:
        """What it does.

        And how."""

    from quire.frontend.server.http.openapi import ApiRoute

    document = describe([ApiRoute("/x/{name:path}", plain)], "1")
    operation = document["paths"]["/x/{name}"]["get"]
    assert operation["summary"] == "What it does." and [
        p["name"] for p in operation["parameters"]
    ] == ["name"]
