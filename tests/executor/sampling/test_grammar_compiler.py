"""What a grammar of each kind accepts, what is refused and with which message, and cost limits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from quire.executor.sampling import grammar_compiler
from quire.executor.sampling.grammar_compiler import (
    MAX_GRAMMAR_BYTES,
    GrammarCompiler,
    escape,
    normalize,
    to_llguidance,
    with_token_ids,
)
from quire.ipc.errors import InvalidParameterError
from quire.ipc.params import StructuredOutputsParams
from quire.tests.gguf_files import write_gguf
from quire.tests.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, save_tiny_tokenizer


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> GrammarCompiler:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(directory)
    return GrammarCompiler(str(directory), VOCAB_SIZE, EOS_TOKEN_ID)


def accepts(compiler: GrammarCompiler, text: str, **params) -> bool:
    """Whether the grammar accepts the whole text and then allows an end."""
    matcher = compiler.compile(normalize(StructuredOutputsParams(**params)))
    return matcher.consume_tokens(compiler.tokenizer.tokenize_str(text)) and matcher.is_accepting()


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}
PERSON = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("params", "good", "bad"),
    [
        (
            dict(json=PERSON),
            ['{"a": 1}', '{"a":1}', '{\n "a" : 1\n}'],
            ['{"a": "1"}', "{}", '{"a": 1', '{"a": 1} ', "[]"],
        ),
        (dict(json=json.dumps(PERSON)), ['{"a": 1}'], ['{"a": "1"}']),
        (dict(json=PERSON, disable_any_whitespace=True), ['{"a":1}'], ['{"a": 1}']),
        (dict(json=PERSON, whitespace_pattern=" ?"), ['{"a":1}', '{"a": 1}'], ['{"a":  1}']),
        (dict(json=OPEN, disable_any_whitespace=True), ['{"a":1,"b":2}'], ['{"a":"1"}']),
        (
            dict(json=OPEN, disable_any_whitespace=True, disable_additional_properties=True),
            ['{"a":1}', "{}"],
            ['{"a":1,"b":2}'],
        ),
        (dict(json=json.dumps(OPEN), disable_additional_properties=True), ["{}"], ['{"b": 2}']),
        (dict(json_object=True, disable_additional_properties=True), ['{"x": 1}'], ["1"]),
        (dict(json="true", disable_additional_properties=True), ['{"a": 1}'], []),
        (dict(json="true"), ['{"a": [1]}', "null"], ['{"a":  1}']),
        (dict(json={"enum": ["x", 1, None]}), ['"x"', "1", "null"], ["x", "2"]),
        (dict(json_object=True), ["{}", '{"x": [1, {"y": null}]}'], ["[]", "1", "{"]),
        (dict(json_object=True, disable_any_whitespace=True), ['{"x":[1,2]}'], ['{"x": [1,2]}']),
        (dict(regex="[0-9]{2,3}"), ["12", "123"], ["1", "1234", "12x"]),
        (dict(regex="a|bc"), ["a", "bc"], ["ac", "c"]),  # the alternatives are whole outputs
        (dict(regex="^ab+$"), ["ab", "abb"], ["a", "b", "xab"]),
        (dict(regex="\\w+é?/\n"), ["xé/\n"], ["xé/"]),
        (
            dict(choice=["yes", "no", "a|b", ".*"]),
            ["yes", "no", "a|b", ".*"],
            ["y", "a", "b", "xx", "yes "],
        ),
        (dict(grammar='start: "x" digits\ndigits: /[0-9]+/'), ["x1", "x123"], ["x", "1"]),  # Lark
        (dict(grammar='root ::= "x" [0-9]+'), ["x1", "x123"], ["x", "1"]),  # GBNF
        # llguidance's own
        (dict(grammar='{"grammars": [{"json_schema": {"type": "integer"}}]}'), ["12"], ["x"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_each_kind_accepts(compiler, params, good, bad):
    assert [text for text in good if not accepts(compiler, text, **params)] == []
    assert [text for text in bad if accepts(compiler, text, **params)] == []


@settings(max_examples=40, deadline=None)
@given(st.text(min_size=1, max_size=8), st.text(min_size=1, max_size=8))
def test_a_choice_is_exactly_its_texts(compiler, text, other):
    assert accepts(compiler, text, choice=[text, "zzz"])
    assert accepts(compiler, other, choice=[text]) == (other == text)
    assert re.fullmatch("[A-Za-z0-9 ]|(\\\\U[0-9a-f]{8})", escape(text[0]))


def test_what_a_draft_ignores_separates_no_branches(compiler):
    named = {"$ref": "#/definitions/t"}
    branches = [{**named, "type": "string"}, {**named, "type": "null"}, {"type": "integer"}]
    schema = {"definitions": {"t": {"type": ["string", "null"]}}, "oneOf": branches}
    old = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    texts = '"a"', "null", "1"
    assert [text for text in texts if accepts(compiler, text, json=schema)] == list(texts)
    assert [text for text in texts if accepts(compiler, text, json=old)] == ["1"]


LIST = {"type": "object", "properties": {"a": {"$ref": "#/$defs/list"}, "b": {}}}
NAMED = {"$ref": "#/$defs/tree"}
TREE = {"type": "object", "properties": {"left": NAMED}, "patternProperties": {"^[a-z]": NAMED}}
SECOND = {"properties": {"a": {"$ref": "#/$defs/second"}, "b": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "not": {"multipleOf": 2}}, ["3", "-5"], ["4", "3.5"]),
        (
            {
                "$defs": {"list": LIST, "second": SECOND},
                "allOf": [{"$ref": "#/$defs/list"}, {"$ref": "#/$defs/second"}],
            },
            ['{"a": {"a": {"b": 1}}}'],
            ['{"a": {"a": {"b": "x"}}}', '{"a": 1}'],
        ),
        (
            {
                "type": "object",
                "patternProperties": {"a": {"type": "integer"}},
                "allOf": [{"patternProperties": {"b": {"minimum": 5}}}],
            },
            ['{"ab": 7, "a": 1}'],
            ['{"ab": 1}', '{"ab": "x"}', '{"b": 1}'],
        ),
        (
            {
                "$defs": {"tree": TREE},
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/tree"}},
                "required": ["a"],
            },
            ['{"a": {"left": {"x": {}}}}', '{"a": {}}'],
            ['{"a": {"left": 1}}', '{"a": {"x": {"left": 1}}}'],
        ),
        (
            {"type": "object", "patternProperties": {"^(?!a)": {"type": "integer"}}},
            ['{"b": 1}', '{"a": "x"}'],
            ['{"b": "x"}'],
        ),
        (
            {"type": "string", "pattern": "^([a-z]+(,|$)){2,}$"},
            ['"a,b"', '"a,b,"'],
            ['"a"', '"ab"'],
        ),
    ],
)
def test_schemas_that_llguidance_cannot_merge_are_merged(compiler, schema, good, bad):
    assert all(accepts(compiler, text, json=schema) for text in good)
    assert not any(accepts(compiler, text, json=schema) for text in bad)


def test_a_schema_that_grows_too_large_excludes_branches_in_fewer_ways(compiler, monkeypatch):
    first = {"type": "object", "properties": {"a": True}, "required": ["a"]}
    second = {"type": "object", "properties": {"c": {"type": "integer"}}, "required": ["c"]}
    schema = {"oneOf": [first, second]}
    texts = '{"a": 1}', '{"c": 1}', '{"a": 1, "c": "x"}', '{"a": 1, "c": 1}'
    assert [accepts(compiler, text, json=schema) for text in texts] == [True, True, True, False]
    monkeypatch.setattr(grammar_compiler, "MAX_REWRITTEN", -10_000)
    assert [accepts(compiler, text, json=schema) for text in texts] == [True, True, False, False]


def test_a_schema_that_grows_large_is_merged_first(compiler, monkeypatch):
    """llguidance may merge it for seconds; ours may be short."""
    schema = {"type": "object", "not": {"required": ["a", "b"]}, "allOf": [{"required": ["c"]}]}
    names = [f"x{i}" for i in range(9)]
    for is_large in (False, True):
        monkeypatch.setattr(grammar_compiler, "MERGED_FIRST", -10_000 if is_large else 10_000)
        texts = [text for text, _ in grammar_compiler._texts(schema, len(str(schema)))]
        assert ["allOf" in text for text in texts] == [not is_large, is_large]
    assert accepts(compiler, '{"c": 1, "a": 1}', json=schema)
    assert not accepts(compiler, '{"a": 1}', json=schema)
    alternatives = [{"properties": {name: {"type": "string"}}} for name in names]
    too_many = {"allOf": [{"anyOf": alternatives} for _ in range(9)]}  # for merging only
    assert accepts(compiler, "{}", json={"type": "object", "not": {"required": ["a"]}, **too_many})


def test_a_rewritten_schema_that_nests_too_deeply_is_merged(compiler):
    schema = {"type": "object", "required": ["b"]}
    for _ in range(20):  # llguidance reads 128 levels, the merged schema has a few
        schema = {"dependentSchemas": {"a": schema}}
    assert accepts(compiler, '{"a": 1, "b": 1}', json=schema)
    assert not accepts(compiler, '{"a": 1}', json=schema)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (dict(regex="(?=a)"), "look-around"),
        (dict(regex="a("), "unclosed group"),
        (dict(regex="\\ba"), "lookarounds not supported"),
        (dict(regex="(a)\\1"), "backreferences are not supported"),
        (dict(json="{"), "EOF"),
        (dict(json={"type": "objekt"}), "Invalid type: objekt"),
        # an unimplemented keyword is refused, not ignored
        (dict(json={"type": "array", "uniqueItems": True}), "uniqueItems"),
        (dict(json={"$ref": "file:///etc/passwd"}), "does not fetch"),
        (dict(json={"a": {1, 2}}), "must be a JSON schema"),
        (dict(regex="\ud800"), "half characters"),
        (dict(choice=["\ud800"]), "half characters"),
        (dict(json={"enum": ["\ud800"]}), "half characters"),
        (dict(json={"enum": [float("nan")]}), "structured_outputs"),
        (dict(grammar="start: /a"), "lexer error"),
        (dict(grammar="{}"), "structured_outputs"),
        (dict(json={"type": "object"}, whitespace_pattern="("), "structured_outputs"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_messages_of_refusals(compiler, params, words):
    with pytest.raises(InvalidParameterError, match=words) as caught:
        compiler.compile(normalize(StructuredOutputsParams(**params)))
    assert caught.value.parameter.startswith("structured_outputs") and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "params", [dict(json={"$ref": "#"}), dict(grammar="start: a\na: b\nb: a")], ids=str
)
def test_a_grammar_that_accepts_nothing_is_refused(compiler, params):
    matcher = compiler.compile(normalize(StructuredOutputsParams(**params)))
    with pytest.raises(InvalidParameterError, match="accepts no output at all"):
        compiler.try_out(matcher)


def test_a_grammar_that_quickly_exceeds_a_limit_is_refused(compiler, monkeypatch):
    matcher = compiler.compile(StructuredOutputsParams(regex="((a{1,100}){1,100}){1,100}"))
    monkeypatch.setattr("quire.executor.sampling.grammar_compiler.WALK_TOKENS", 1000)
    with pytest.raises(
        InvalidParameterError, match="too complex: lexer error: too many expressions"
    ):
        compiler.try_out(matcher)


def test_a_grammar_with_slow_masks_is_refused(compiler, monkeypatch):
    matcher = compiler.compile(StructuredOutputsParams(regex="[a-z]+"))
    compiler.try_out(matcher)
    monkeypatch.setattr("quire.executor.sampling.grammar_compiler.MAX_MASK_S", -1.0)
    with pytest.raises(InvalidParameterError, match="finding the tokens that may come next took"):
        compiler.try_out(matcher)


def test_a_trial_run_leaves_the_matcher_unchanged(compiler):
    matcher = compiler.compile(StructuredOutputsParams(choice=["yes"]))
    compiler.try_out(matcher)
    assert matcher.consume_tokens(compiler.tokenizer.tokenize_str("yes")) and matcher.is_accepting()


@pytest.mark.parametrize("name", ["json", "regex", "grammar", "choice", "whitespace_pattern"])
def test_sizes_are_limited(name):
    text = "x" * (MAX_GRAMMAR_BYTES + 1)
    value = {"choice": [text[:9], text[9:]], "json": {"title": text}}.get(name, text)
    others = {"json_object": True} if name == "whitespace_pattern" else {}
    with pytest.raises(
        InvalidParameterError, match=f"structured_outputs.{name}: must have at most"
    ):
        normalize(StructuredOutputsParams(**{name: value}, **others))
    normalize(StructuredOutputsParams(regex=text[1:]))


def test_ids_beyond_the_tokenizer_and_special_tokens_are_never_allowed(compiler):
    matcher = compiler.compile(StructuredOutputsParams(regex="(?s:.*)"))
    words = np.zeros(compiler.num_mask_words, np.int32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    assert allowed.max() < 300 or allowed.tolist()[-1] == EOS_TOKEN_ID
    assert set(range(303, VOCAB_SIZE)).isdisjoint(allowed) and {300, 301}.isdisjoint(allowed)


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(InvalidParameterError, match="not possible with this model's tokenizer"):
        GrammarCompiler(str(tmp_path), 100, 0).tokenizer
    Path(tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidParameterError, match="not possible with this model's tokenizer"):
        GrammarCompiler(str(tmp_path), 100, 0).tokenizer


def test_the_users_options_override_those_in_the_schema():
    schema = {"x-guidance": {"whitespace_flexible": True}}
    text = to_llguidance(
        normalize(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    )
    assert (
        json.loads(text)["grammars"][0]["json_schema"]["x-guidance"]["whitespace_flexible"] is False
    )


VALUE = {"a": [1, {"b": []}], "c d": "x  y"}
WRITTEN = [json.dumps(VALUE, indent=indent) for indent in (None, 0, 1, 2, 4, "\t")]
WRITTEN.append(json.dumps(VALUE, separators=(",", ":")))
TOO_MUCH = ['{  "a": 1}', '{\n\n"a": 1}', "{\n" + 21 * " " + '"a": 1}', '{"a":\r1}', '{ \n"a": 1}']


@pytest.mark.parametrize(
    "params", [dict(json=json.dumps({"type": "object"})), dict(json={}), dict(json_object=True)]
)
def test_whitespace_is_bounded_by_default(compiler, params):
    """Allow whitespace as JSON is usually written, and no more."""
    assert [text for text in WRITTEN if not accepts(compiler, text, **params)] == []
    assert [text for text in TOO_MUCH if accepts(compiler, text, **params)] == []
    as_before = params | dict(whitespace_pattern=r"[ \n\r\t]+")
    assert [text for text in TOO_MUCH if not accepts(compiler, text, **as_before)] == []


@pytest.mark.parametrize(
    ("own", "good", "bad"),
    [
        ({"whitespace_flexible": True}, '{   "a": 1}', '{   "a": 1} '),
        ({"whitespace_flexible": False}, '{"a":1}', '{"a": 1}'),
        ({"whitespace_pattern": "\t"}, '{\t"a":1}', '{"a": 1}'),
        ({"item_separator": ";"}, '{"a": 1;"b":2}', '{"a":  1}'),
    ],
    ids=str,
)
def test_a_schemas_own_options_override_the_default(compiler, own, good, bad):
    schema = {"type": "object", "x-guidance": own}
    assert accepts(compiler, good, json=schema) and not accepts(compiler, bad, json=schema)
    compact = dict(json=schema, disable_any_whitespace=True)
    assert accepts(compiler, '{"a":1}', **compact) and not accepts(compiler, '{"a": 1}', **compact)


BUNDLED = Path(__file__).parents[3] / "frontend" / "bundled_model"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def added(*tokens: tuple[int, str]) -> list[dict]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [{"id": i, "content": text, "special": text != "▁▁", **flags} for i, text in tokens]


def sentence_piece(model: dict, *tokens: tuple[int, str]) -> dict:
    """The contents of a tokenizer.json with byte fallback, which cuts and fills up texts."""
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    return {
        "version": "1.0",
        "truncation": {
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
            "direction": "Right",
        },
        "padding": {
            "strategy": {"Fixed": 40},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<unk>",
        },
        "added_tokens": added(*tokens),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [space, {"type": "ByteFallback"}]},
        "model": model,
    }


def bpe_with_control_tokens() -> dict:
    """As of Llama 2 and Gemma: control tokens are in the vocabulary, and an added token is what a
    merge makes.
    """
    pieces = ["<unk>", "<s>", "</s>", *BYTES, "▁", "▁▁", "a", "<", "s", ">", "s>", "/", "▁▁▁"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    model = {
        "type": "BPE",
        "vocab": vocabulary,
        "merges": ["▁ ▁", "▁▁ ▁", "s >"],
        "unk_token": "<unk>",
        "byte_fallback": True,
        "fuse_unk": True,
    }
    named = [(vocabulary[text], text) for text in ("<unk>", "<s>", "</s>", "▁▁")]
    return sentence_piece(model, *named)


def unigram() -> dict:
    pieces = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "<", "s", ">", "s>", "/"]
    vocabulary = [[piece, -float(i)] for i, piece in enumerate(pieces)]
    model = {"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": True}
    return sentence_piece(model, *enumerate(pieces[:3]))


@pytest.fixture(scope="module", params=["bundled", "tiny", "bpe", "unigram"])
def any_tokenizer(request, compiler, tmp_path_factory) -> tuple[GrammarCompiler, dict[str, int]]:
    """A compiler, and its added tokens; the last but one is not special in some."""
    if request.param == "bundled":
        made = GrammarCompiler(str(BUNDLED), 2144, 2)
    elif request.param == "tiny":
        made = compiler
    else:
        directory = tmp_path_factory.mktemp(request.param)
        contents = unigram() if request.param == "unigram" else bpe_with_control_tokens()
        (directory / "tokenizer.json").write_text(json.dumps(contents))
        made = GrammarCompiler(str(directory), 300, None)
    contents = json.loads((Path(made.tokenizer_directory) / "tokenizer.json").read_text())
    return made, {token["content"]: token["id"] for token in contents["added_tokens"]}


def written(compiler: GrammarCompiler, matcher: LLMatcher, end: int) -> list[int]:
    """Token ids up to the end, forced ones as they are, else the largest that is allowed."""
    token_ids: list[int] = []
    while not matcher.is_accepting():
        more = matcher.compute_ff_tokens() or [max(set(compiler._timed_mask(matcher)) - {end})]
        token_ids += map(int, more)
        assert matcher.consume_tokens(token_ids[-len(more) :]), matcher.get_error()
    return token_ids


@pytest.mark.parametrize("around", ["{}", "s>{} a{}"])
@pytest.mark.parametrize(
    "grammar_of",
    [
        lambda text: (dict(choice=[text]), text),
        lambda text: (dict(regex=re.escape(text)), text),
        lambda text: (dict(json={"enum": [text]}), json.dumps(text)),
        lambda text: (dict(json={"const": text}), json.dumps(text)),
        lambda text: (
            dict(
                json={
                    "type": "object",
                    "properties": {text: {"const": 1}},
                    "required": [text],
                    "additionalProperties": False,
                },
                disable_any_whitespace=True,
            ),
            f"{{{json.dumps(text)}:1}}",
        ),
        lambda text: (dict(grammar=f"start: {json.dumps(text)}"), text),
        lambda text: (dict(grammar=f"start: T // {text}\nT: {json.dumps(text)}"), text),
        lambda text: (
            dict(grammar=f"start: /{re.escape(text).replace('/', chr(92) + '/')}/"),
            text,
        ),
        lambda text: (
            dict(grammar=f'start: %json {{"enum": [{json.dumps(text)}]}}'),
            json.dumps(text),
        ),
        lambda text: (dict(grammar=f"root ::= {json.dumps(text)}"), text),
        lambda text: (
            dict(
                grammar=json.dumps({"grammars": [{"lark_grammar": f"start: {json.dumps(text)}"}]})
            ),
            text,
        ),
        # in pieces, so that no search of the grammar finds the text
        lambda text: (dict(grammar=f"start: {' '.join(json.dumps(c) for c in text)}"), text),
    ],
    ids=[
        *("choice", "regex", "enum", "const", "property", "Lark", "terminal", "pattern"),
        *("%json", "GBNF", "llguidance", "pieces"),
    ],
)
def test_the_text_of_an_added_token_is_characters_that_other_tokens_write(
    any_tokenizer, grammar_of, around
):
    compiler, tokens = any_tokenizer
    end = compiler.tokenizer.eos_token
    for name in tokens:
        params, text = grammar_of(around.replace("{}", name.replace("▁", " ")))
        matcher = compiler.compile(normalize(StructuredOutputsParams(**params)))
        compiler.try_out(matcher)
        token_ids = written(compiler, matcher, end)
        assert set(token_ids).isdisjoint(tokens.values())
        assert compiler.tokenizer.decode_str(token_ids) == text


def test_a_grammar_can_name_an_added_token(any_tokenizer):
    compiler, tokens = any_tokenizer
    for name, token_id in tokens.items():
        if name == "▁▁" or token_id == compiler.tokenizer.eos_token:
            continue
        lark = f"start: {json.dumps(name)} {name} <[{token_id}]>"
        for text in (lark, json.dumps({"grammars": [{"lark_grammar": lark}]})):
            matcher = compiler.compile(StructuredOutputsParams(grammar=text))
            token_ids = written(compiler, matcher, compiler.tokenizer.eos_token)
            assert token_ids[-2:] == [token_id, token_id] and token_id not in token_ids[:-2]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ['"' * 60_001, "/\\" * 40_000, "<" * 120_000, '"\\' * 60_000])
def test_names_are_looked_for_in_linear_time(text):
    assert with_token_ids(text, {"<a>": 1}) == text


def test_the_tokenizer_of_a_gguf_file(tmp_path):
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["</s>", *"abc"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1],
        "tokenizer.ggml.merges": [],
    }
    path = write_gguf(tmp_path / "m.gguf", metadata)
    compiler = GrammarCompiler(str(path), 4, 0)
    assert accepts(compiler, "ab", regex="a[bc]") and not accepts(compiler, "aa", regex="a[bc]")
    path.write_bytes(b"GGUF")
    with pytest.raises(InvalidParameterError, match="not possible with this model's tokenizer"):
        GrammarCompiler(str(path), 4, 0).tokenizer


def test_what_a_draft_ignores_keeps_a_schema_closed(compiler):
    """Also for an engine, which compiles what the check has read, as it is."""
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"t": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        "properties": {"x": {"$ref": "#/definitions/t", "description": "one", "minProperties": 1}},
    }
    params = normalize(StructuredOutputsParams(json=schema, disable_additional_properties=True))
    _, (said, _) = compiler.compile_said(params)
    for text, is_good in (('{"x": {}}', True), ('{"x": {"b": 1}}', False), ('{"y": 1}', False)):
        for one in (params, StructuredOutputsParams(json=said.json)):
            matcher = compiler.compile(one)
            is_taken = matcher.consume_tokens(compiler.tokenizer.tokenize_str(text))
            assert (is_taken and matcher.is_accepting()) == is_good, (text, one)


def test_a_draft_is_recognised_with_escaped_slashes(compiler):
    text = json.dumps(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"t": {"type": "string"}},
            "properties": {"a": {"$ref": "#/definitions/t", "maxLength": 1}},
        }
    ).replace("/", "\\/")
    assert accepts(compiler, '{"a": "long"}', json=text)
