"""Schemas without what their draft ignores, against jsonschema."""

from __future__ import annotations

import pytest
from jsonschema import Draft4Validator, Draft7Validator
from quire.executor.sampling.schema_drafts import without_ignored
from quire.executor.sampling.schema_rewriting import rewritten
from quire.tests.executor.sampling.test_schema_rewriting import VALUES, followers

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
TEXT = {"$ref": "#/definitions/text"}
DEFINITIONS = {"text": {"type": "string"}, "named": {"required": ["a"]}}


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {**TEXT, "minLength": 2}},
        {"oneOf": [{**TEXT, "maxLength": 1}, {**TEXT, "minLength": 2}, {"type": "null"}]},
        {"not": {"$ref": "#/definitions/named", "required": ["b"]}, "type": "object"},
        {"properties": {"a": {**TEXT, "const": 1}, "$ref": {"type": "string"}}},
        {"enum": [{"a": 1}, "a", {"$ref": "x", "a": 1}]},
        {"dependencies": {"a": {**TEXT, "type": "object"}}},
    ],
)
def test_keywords_beside_a_reference_say_nothing_in_old_drafts(schema) -> None:
    schema = {"$schema": DRAFT_7, **schema, "definitions": DEFINITIONS}
    expected = list(filter(Draft7Validator(schema).is_valid, VALUES))
    assert followers(rewritten(without_ignored(schema))) == expected


def test_newer_drafts_apply_them() -> None:
    for newer in ({}, {"$schema": "https://json-schema.org/draft/2020-12/schema"}):
        schema = {**newer, "not": {**TEXT, "minLength": 2}, "definitions": DEFINITIONS}
        assert without_ignored(schema) is schema


@pytest.mark.parametrize("draft, validator", [(4, Draft4Validator), (7, Draft7Validator)])
def test_an_id_that_the_draft_ignores_moves_no_reference(draft, validator) -> None:
    """A draft before 6 has no $id, and one before 2019-09 none beside a $ref."""
    part = {"$id": "/a", "properties": {"$id": {"type": "string"}, "a": {"$id": "/b", **TEXT}}}
    schema = {"$schema": f"http://json-schema.org/draft-0{draft}/schema#", "properties": {"b": {}}}
    schema |= {"definitions": DEFINITIONS, **(part if draft == 4 else part["properties"]["a"])}
    expected = list(filter(validator(schema).is_valid, VALUES))
    assert followers(rewritten(without_ignored(schema))) == expected
    assert "$id" not in str(without_ignored(schema)).replace("'$id': {", "")
