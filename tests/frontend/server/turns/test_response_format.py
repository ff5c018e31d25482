"""The three ways to request structured output, and their errors."""

import msgspec
import pytest
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.http.errors import ApiError
from quire.frontend.server.turns.response_format import (
    StructuredOutputs,
    response_format,
    structured_outputs_of,
)
from quire.frontend.server.turns.sampling import SamplingBody
from quire.ipc.params import StructuredOutputsParams
from quire.tests.frontend.server.scripted import ScriptedEngine, post, scripted_app
from quire.tests.frontend.server.turns.test_sampling import params_of

SCHEMA = {"type": "object"}


def test_response_formats() -> None:
    assert response_format(None) is None and response_format({"type": "text"}) is None
    assert response_format({"type": "json_object"}).json_object
    assert (
        response_format(
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
        ).json
        == SCHEMA
    )


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({"type": "xml"}, "response_format.type"),
        ({}, "response_format.type"),
        ({"type": ["text"]}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": "x"}, "response_format.json_schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            "response_format.json_schema.name",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a b", "schema": SCHEMA}},
            "response_format.json_schema.name",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x" * 65, "schema": SCHEMA}},
            "response_format.json_schema.name",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "strict": 1, "schema": SCHEMA}},
            "response_format.json_schema.strict",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x"}},
            "response_format.json_schema.schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": []}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_errors_name_the_field(wanted: dict, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        response_format(wanted)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_vllms_fields() -> None:
    assert structured_outputs_of(SamplingBody()) is None
    assert structured_outputs_of(SamplingBody(guided_choice=["a"])).choice == ["a"]
    assert (
        structured_outputs_of(
            SamplingBody(structured_outputs=StructuredOutputs(grammar="start: A"))
        ).grammar
        == "start: A"
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (SamplingBody(guided_regex="a", guided_choice=["b"]), "structured_outputs"),
        (SamplingBody(guided_choice=[]), "guided_choice"),
        (SamplingBody(structured_outputs=StructuredOutputs()), "structured_outputs"),
        (
            SamplingBody(
                structured_outputs=StructuredOutputs(regex="a"),
                response_format={"type": "json_object"},
            ),
            "structured_outputs",
        ),
    ],
)
def test_conflicting_and_incomplete_formats(body: SamplingBody, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        structured_outputs_of(body)
    assert caught.value.param == param


# Every field of OpenAI's APIs that requests JSON.
ASKING = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"response_format": {"type": "json_object"}},
    {"guided_json": SCHEMA},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json_object": True}},
]


def spacing_of(fields: dict, *, default: bool = False) -> tuple[bool, str | None]:
    body = msgspec.convert(fields, SamplingBody)
    config = ServerConfig(disable_any_whitespace=default)
    params = params_of(body, config, max_tokens=9)
    structured = params.structured_outputs
    assert structured.json == SCHEMA or structured.json_object
    return structured.disable_any_whitespace, structured.whitespace_pattern


@pytest.mark.parametrize("asking", ASKING, ids=str)
def test_whitespace_options_work_beside_every_field(asking: dict) -> None:
    stated = asking.get("structured_outputs", {})
    assert spacing_of(asking) == (False, None)
    assert spacing_of(asking | {"disable_any_whitespace": True}) == (True, None)
    within = {"structured_outputs": {**stated, "disable_any_whitespace": True}}
    assert spacing_of(asking | within) == (True, None)
    assert spacing_of(asking | {"guided_whitespace_pattern": " "}) == (False, " ")
    within = {"structured_outputs": {**stated, "whitespace_pattern": " "}}
    assert spacing_of(asking | within) == (False, " ")


@pytest.mark.parametrize("asking", ASKING, ids=str)
def test_the_request_overrides_the_servers_default(asking: dict) -> None:
    assert spacing_of(asking, default=True) == (True, None)
    assert spacing_of(asking | {"disable_any_whitespace": False}, default=True) == (False, None)
    stated = asking.get("structured_outputs", {})
    within = {"structured_outputs": {**stated, "disable_any_whitespace": False}}
    assert spacing_of(asking | within, default=True) == (False, None)


def test_whitespace_options_affect_only_json() -> None:
    body = SamplingBody(guided_regex="a", disable_any_whitespace=True)
    params = params_of(body, max_tokens=9)
    assert params.structured_outputs == StructuredOutputsParams(regex="a")


OPTION = "disable_additional_properties"


@pytest.mark.parametrize("asking", ASKING, ids=str)
@pytest.mark.parametrize("default", [None, True, False])
def test_listed_properties_are_a_default_of_the_server_and_an_option(asking, default) -> None:
    config = ServerConfig() if default is None else ServerConfig(**{OPTION: default})
    stated = asking.get("structured_outputs", {})
    for fields, wanted in (
        ({}, default is not False),
        ({OPTION: True}, True),
        ({OPTION: False}, False),
        ({OPTION: True, "structured_outputs": {**stated, OPTION: False}}, False),
    ):
        body = msgspec.convert(asking | fields, SamplingBody)
        params = params_of(body, config, max_tokens=9)
        assert params.structured_outputs.disable_additional_properties is wanted


HI = [{"role": "user", "content": "hi"}]
OTHER_APIS = [
    (
        "/v1/responses",
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    ),
    ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_object"}}}),
    ("/api/chat", {"model": "bundled", "messages": HI, "format": "json"}),
    ("/api/generate", {"model": "bundled", "prompt": "hi", "format": SCHEMA}),
    (
        "/v1/messages",
        {
            "max_tokens": 9,
            "messages": HI,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), OTHER_APIS, ids=str)
def test_the_option_and_the_servers_default_reach_every_api(path: str, body: dict) -> None:
    """The template lets the model reason first, so the options are in a grammar."""
    cases = [({}, {}, False), ({"disable_any_whitespace": True}, {}, True)]
    cases += [({}, {"disable_any_whitespace": True}, True)]
    for fields, settings, is_compact in cases:
        engine = ScriptedEngine(["{}"])
        answer = post(scripted_app(engine, **settings), path, body | fields)
        assert answer.status_code == 200, answer.text
        grammar = engine.params[0].structured_outputs.grammar
        assert ('"whitespace_flexible": false' in grammar) is is_compact, grammar


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("compact", [False, True])
def test_the_option_reaches_the_arguments_of_forced_calls(compact: bool) -> None:
    engine = ScriptedEngine(['<tool_call>{"name": "f", "arguments": {}}</tool_call>'])
    body = {"messages": HI, "tools": [TOOL], "tool_choice": "required"}
    answer = post(
        scripted_app(engine), "/v1/chat/completions", body | {"disable_any_whitespace": compact}
    )
    assert answer.status_code == 200 and "x-ignored-params" not in answer.headers
    assert ('"item_separator"' in engine.params[0].structured_outputs.grammar) is not compact


def test_an_option_without_json_is_reported_as_ignored() -> None:
    answer = post(
        scripted_app(ScriptedEngine(["hi"])),
        "/v1/chat/completions",
        {"messages": HI, "disable_any_whitespace": True},
    )
    assert answer.headers["x-ignored-params"] == "disable_any_whitespace"


LISTED = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}
CLOSED_MARK = '"additionalProperties": false'


def forcing(path: str) -> dict:
    """A body that forces a call of a tool with LISTED."""
    function = {"name": "f", "parameters": LISTED}
    if path == "/v1/messages":
        tools = [{"name": "f", "input_schema": LISTED}]
        return {"max_tokens": 9, "messages": HI, "tools": tools, "tool_choice": {"type": "any"}}
    tool = {"type": "function", **function} if path == "/v1/responses" else TOOL
    if path == "/v1/chat/completions":
        tool = {"type": "function", "function": function}
    messages = {"input": "hi"} if path == "/v1/responses" else {"messages": HI}
    return messages | {"tools": [tool], "tool_choice": "required"}


@pytest.mark.parametrize(
    ("path", "body"),
    [(path, forcing(path)) for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages")]
    + [
        ("/v1/chat/completions", {"messages": HI, "guided_json": LISTED}),
        ("/v1/completions", {"prompt": "hi", "structured_outputs": {"json": LISTED}}),
        (
            "/v1/responses",
            {
                "input": "hi",
                "text": {"format": {"type": "json_schema", "name": "x", "schema": LISTED}},
            },
        ),
        ("/api/chat", {"model": "bundled", "messages": HI, "format": LISTED}),
        ("/api/generate", {"model": "bundled", "prompt": "hi", "format": LISTED}),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": HI,
                "output_config": {"format": {"type": "json_schema", "schema": LISTED}},
            },
        ),
    ],
    ids=str,
)
def test_objects_have_only_listed_properties_unless_asked_in_every_api(path, body) -> None:
    """Nested ones too, in the text of a response and in a forced call."""
    for fields, settings, is_closed in (
        ({}, {}, True),
        ({OPTION: False}, {}, False),
        ({}, {OPTION: False}, False),
        ({OPTION: True}, {OPTION: False}, True),
    ):
        engine = ScriptedEngine(["hi"])
        answer = post(scripted_app(engine, **settings), path, body | fields)
        assert answer.status_code == 200 and "x-ignored-params" not in answer.headers, answer.text
        asked = engine.params[0].structured_outputs
        if asked.json is not None:  # the engine closes it
            assert asked.disable_additional_properties is is_closed
        else:
            assert asked.grammar.count(CLOSED_MARK) == (2 if is_closed else 0), asked.grammar
