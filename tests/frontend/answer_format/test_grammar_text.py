"""Grammars built from parts: what they accept, with marks as text and as tokens."""

from __future__ import annotations

import pytest
from quire import StructuredOutputsParams
from quire.frontend.answer_format.grammar_text import GrammarText
from quire.tests.frontend.answer_format.grammars import accepts, marked_tokenizer

MARK = "<end>"
FORMS = {"text": (), "token": (MARK,)}


@pytest.fixture(params=FORMS, scope="module")
def tokenizer(request):
    return marked_tokenizer(FORMS[request.param], special=request.param == "token")


def judge(tokenizer, write) -> callable:
    grammar = GrammarText({text: i for i, text in tokenizer.added_tokens.items()})
    params = StructuredOutputsParams(grammar=grammar.finished(write(grammar)))
    return lambda text: accepts(tokenizer, params, text)


def test_literals(tokenizer) -> None:
    is_accepted = judge(tokenizer, lambda g: g.literal(f'a"\n\\ é{MARK}b'))
    assert is_accepted(f'a"\n\\ é{MARK}b')
    assert not is_accepted(f'a"\n\\ é{MARK}')


def test_text_until_a_mark(tokenizer) -> None:
    is_accepted = judge(tokenizer, lambda g: f"{g.text_until(f'{MARK}.')} {g.literal('x')}")
    assert is_accepted(f"a <b\n\n c{MARK}.x") and is_accepted(f"{MARK}.x")
    assert not is_accepted("ax") and not is_accepted(f"a{MARK}.y")


def test_alternatives_and_regular_expressions(tokenizer) -> None:
    is_accepted = judge(tokenizer, lambda g: g.any_of([g.literal("ab"), g.regex(r"[0-9/]+\/x\\/")]))
    assert is_accepted("ab") and is_accepted("1/2/x\\/")
    assert not is_accepted("a") and not is_accepted("12")


def test_arguments_are_written_as_json_dumps_does(tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["a"],
    }
    is_accepted = judge(tokenizer, lambda g: g.arguments(schema))
    assert is_accepted('{"a": 1, "b": [1, 2]}') and is_accepted('{"a": 1}')
    for other in ('{"a":1}', '{ "a": 1}', '{"a": 1, "c": 2}', "{}", '{"a": 1,\n"b": []}'):
        assert not is_accepted(other), other


def test_schemas_with_references_to_other_properties_keep_them(tokenizer) -> None:
    assert judge(tokenizer, lambda g: g.arguments({"additionalProperties": {"type": "integer"}}))(
        '{"c": 2}'
    )
    assert not judge(tokenizer, lambda g: g.arguments({}))('{"c": 2}')
