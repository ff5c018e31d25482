"""Rows of the error table for the tokenizer and pooling routes; see test_error_table.py."""

from __future__ import annotations

from quire.tests.frontend.server.error_rows.bodies import Table, hi

ROWS: Table = {
    ("POST", "/v1/embeddings"): [
        (
            {"input": "x"},
            400,
            "model",
            "unsupported_value",
            "The model 'bundled' generates text; this server cannot",
        ),
        ({}, 400, "input", "missing_required_parameter", "Missing required parameter: 'input'."),
        (
            {"input": "x", "encoding_format": "int8"},
            400,
            "encoding_format",
            "invalid_value",
            "invalid enum value 'int8'.",
        ),
    ],
    ("POST", "/score"): [
        (
            {"text_1": "a", "text_2": "b"},
            400,
            "model",
            "unsupported_value",
            "The model 'bundled' generates text; this server cannot",
        ),
    ],
    ("POST", "/rerank"): [
        (
            {"query": "a", "documents": ["b"]},
            400,
            "model",
            "unsupported_value",
            "The model 'bundled' generates text; this server cannot rank",
        ),
    ],
    ("POST", "/v1/rerank"): [
        (
            {"query": "a", "documents": []},
            400,
            "documents",
            "empty_array",
            "expected 'array' of length >= 1.",
        ),
    ],
    ("POST", "/pooling"): [
        ({"input": "x"}, 404, None, "unknown_url", "Unknown route: POST /pooling"),
    ],
    ("POST", "/classify"): [
        ({"input": "x"}, 404, None, "unknown_url", "Unknown route: POST /classify"),
    ],
    ("POST", "/tokenize"): [
        ({}, 400, "prompt", "missing_required_parameter", "Missing required parameter: 'prompt'."),
        ({"prompt": 5}, 400, "prompt", "invalid_type", "expected 'str | null', got 'int'."),
        (
            {"prompt": "a", "messages": hi},
            400,
            "messages",
            "invalid_value",
            "Only one of 'prompt' and 'messages' is allowed.",
        ),
    ],
    ("POST", "/detokenize"): [
        ({}, 400, "tokens", "missing_required_parameter", "Missing required parameter: 'tokens'."),
        ({"tokens": ["a"]}, 400, "tokens[0]", "invalid_type", "expected 'int', got 'str'."),
        ({"tokens": [-1]}, 400, "tokens[0]", "integer_below_min_value", "expected 'int' >= 0."),
        (
            {"tokens": [10**9]},
            400,
            "tokens",
            "invalid_value",
            "'tokens' must be ids between 0 and 2143, got 1000000000.",
        ),
    ],
    ("GET", "/tokenize"): [
        (None, 405, None, "method_not_allowed", "/tokenize does not support GET"),
    ],
    ("POST", "/tokenizer_info"): [
        ({}, 405, None, "method_not_allowed", "/tokenizer_info does not support POST"),
    ],
    ("GET", "/detokenize"): [
        (None, 405, None, "method_not_allowed", "/detokenize does not support GET"),
    ],
    ("POST", "/v1/score"): [
        (
            {"text_1": "a", "text_2": "b"},
            400,
            "model",
            "unsupported_value",
            "The model 'bundled' generates text; this server cannot",
        ),
    ],
    ("POST", "/v2/rerank"): [
        (
            {"query": "a", "documents": ["b"]},
            400,
            "model",
            "unsupported_value",
            "The model 'bundled' generates text; this server cannot rank",
        ),
    ],
}
