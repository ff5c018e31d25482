"""The three ways of asking for structured output, and what is wrong with each."""

import pytest
from quire.frontend.server.http.errors import ApiError
from quire.frontend.server.response_format import (
    StructuredOutputs,
    response_format,
    structured_outputs_of,
)
from quire.frontend.server.sampling import SamplingBody

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
def test_what_is_wrong_is_named(wanted: dict, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        response_format(wanted)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_vllms_ways() -> None:
    assert structured_outputs_of(SamplingBody()) is None
    assert (
        structured_outputs_of(
            SamplingBody(guided_json=SCHEMA, guided_whitespace_pattern=" ")
        ).whitespace_pattern
        == " "
    )
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
def test_too_much_or_too_little(body: SamplingBody, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        structured_outputs_of(body)
    assert caught.value.param == param
