"""Conversion of text and plain values to a field's value. Invalid values raise a one-sentence
error.
"""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire import StructuredOutputsParams
from quire.frontend.arguments.quantities import format_bytes, format_count, parse_bytes
from quire.frontend.cli.flags import ENGINE, Flag, engine_flags, sampling_flags, server_flags
from quire.frontend.cli.values import from_plain, from_text
from quire.ipc.config import SpeculativeConfig
from quire.ipc.models.pooling import PoolerConfig

FLAGS = {flag.name: flag for flag in (*engine_flags(), *server_flags(), *sampling_flags(), ENGINE)}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("port", "0", 0),
        ("block_size", "32", 32),
        ("dtype", "float32", "float32"),
        ("page", "off", False),
        ("page", "TRUE", True),
        ("page", "1", True),
        ("swap_space", "1e-1", 0.1),
        ("max_model_len", "None", None),
        ("tokenizer", "none", "none"),  # a directory may have such a name
        ("kv_cache_memory_bytes", "1.5GiB", 3 * 2**29),
        ("max_body_bytes", "4096", 4096),
        ("hf_overrides", '{"a": [1]}', {"a": [1]}),
        ("logit_bias", '{"5": 1}', {5: 1.0}),
        ("stop_token_ids", "1,2", [1, 2]),
        ("stop_token_ids", "[1, 2]", [1, 2]),
        ("stop", "END", ["END"]),
        ("api_key", '["a", "b"]', ["a", "b"]),
        ("api_key", "sk-1", ["sk-1"]),
        ("structured_outputs", '{"regex": "x+"}', StructuredOutputsParams(regex="x+")),
        ("engine", "ipc://x", "ipc://x"),
        ("pooler_config", '{"task": "token_embed"}', PoolerConfig(task="token_embed")),
        ("speculative_config", '{"method": "ngram"}', SpeculativeConfig(method="ngram")),
    ],
)
def test_text(name: str, text: str, value: Any) -> None:
    assert from_text(FLAGS[name], text) == value
    assert from_plain(FLAGS[name], text) == value  # as quoted in a file


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("port", 65536, "must be an integer, at least 0, at most 65535, got 65536"),
        ("port", True, "must be an integer, at least 0, at most 65535, got True"),
        ("port", "http", "must be an integer, at least 0, at most 65535, got 'http'"),
        ("dtype", "int4", "must be one of 'auto', 'bfloat16', 'float16', 'float32', got 'int4'"),
        ("host", 3, "must be a string, got 3"),
        ("page", "maybe", "must be true or false, got 'maybe'"),
        ("swap_space", float("inf"), "must be a finite number, got inf"),
        (
            "max_body_bytes",
            "many",
            "must be a number of bytes such as 24GiB, 500MB or 1048576, got 'many'",
        ),
        ("hf_overrides", [1], "must be a JSON object, got [1]"),
        (
            "hf_overrides",
            "{",
            "must be a JSON object, got '{' (Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1))",
        ),
        (
            "stop_token_ids",
            "[1",
            "must be a JSON list, got '[1' (Expecting ',' delimiter: line 1 column 3 (char 2))",
        ),
        ("engine", "tcp://x", "must be inproc, process or an address ipc://PATH, got 'tcp://x'"),
        ("api_key", [""], "must not hold an empty key"),
        ("api_key", {"sk-1": 2}, "must be a list of strings"),  # without the value of the key
        (
            "api_key",
            '["sk-1"',
            "must be a JSON list (Expecting ',' delimiter: line 1 column 8 (char 7))",
        ),
    ],
)
def test_an_invalid_value_is_one_sentence(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        from_plain(FLAGS[name], value)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_every_default_is_a_valid_value(name: str) -> None:
    flag = FLAGS[name]
    assert from_plain(flag, flag.default) == flag.default


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(FLAGS)), st.text())
def test_any_text_gives_a_value_or_a_sentence(name: str, text: str) -> None:
    try:
        from_text(FLAGS[name], text)
    except ValueError as error:
        assert str(error)


def test_deep_json_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a JSON object"):
        from_text(FLAGS["hf_overrides"], '{"a":' * 100_000)
    assert json.loads("{}") == from_text(Flag("x", dict[str, Any], {}, ""), "{}")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24gib", 24 * 2**30),
        ("24Gi", 24 * 2**30),
        ("1 MB", 10**6),
        ("2k", 2000),
        ("0.5 TiB", 2**39),
        ("7", 7),
        ("7B", 7),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e3", "1 2", "1XB", "1iB", "1GiBi"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number of bytes"):
        parse_bytes(text)


def test_short_forms_of_sizes() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 1.5 * 2**30, 2**50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
        "1024.0 TiB",
    ]
    assert [format_count(n) for n in (3_970_304, 8_190_735_360)] == ["3.97M", "8.19B"]
