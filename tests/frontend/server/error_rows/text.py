"""Rows of the error table for the tokenizer and pooling routes; see test_error_table.py."""

from __future__ import annotations

from quire.tests.frontend.server.error_rows.bodies import Table, hi

ROWS: Table = {
    ("POST", "/v1/embeddings"): [
        ({}, 400, "input", "missing_required_parameter", "Missing required parameter: 'input'."),
        ({"input": []}, 400, "input", "empty_array", "of length >= 1."),
        ({"input": ""}, 400, "input", "invalid_value", "input: must not be empty"),
        ({"input": ["a", 1]}, 400, "input", "invalid_type", "'input' must be a string, a list"),
        (
            {"input": [[10**9]]},
            400,
            "input",
            "invalid_value",
            "must be ids between 0 and 2143, the model's vocabulary, got 1000000000",
        ),
        (
            {"input": "x", "encoding_format": "int8"},
            400,
            "encoding_format",
            "invalid_value",
            "invalid enum value 'int8'.",
        ),
        (
            {"input": "x", "dimensions": 3},
            400,
            "dimensions",
            "invalid_value",
            "the model was not trained for embeddings of several lengths",
        ),
        ({"input": "x", "dimensions": 0}, 400, "dimensions", "integer_below_min_value", ">= 1."),
        ({"input": "x", "normalize": True}, 400, "normalize", "invalid_value", "use_activation"),
        ({"input": "x", "model": "y"}, 404, "model", "model_not_found", "The model 'y' does not"),
        (
            {"input": ["x"] * 2049},
            400,
            "input",
            "array_above_max_length",
            "'input' can have at most 2048 texts, got 2049.",
        ),
    ],
    ("POST", "/score"): [
        ({"text_2": "b"}, 400, "text_1", "missing_required_parameter", "'text_1'."),
        (
            {"text_1": ["a", "b"], "text_2": "b"},
            400,
            "text_1",
            "invalid_value",
            "'text_1' must be one text, or as many as text_2",
        ),
    ],
    ("POST", "/v1/score"): [
        ({"text_1": "a"}, 400, "text_2", "missing_required_parameter", "'text_2'."),
    ],
    ("POST", "/rerank"): [
        ({"query": "a", "documents": [{}]}, 400, "documents[0]", "invalid_type", "must be a text"),
    ],
    ("POST", "/v1/rerank"): [
        ({"query": "a", "documents": []}, 400, "documents", "empty_array", "of length >= 1."),
    ],
    ("POST", "/v2/rerank"): [
        ({"documents": ["b"]}, 400, "query", "missing_required_parameter", "'query'."),
    ],
    ("POST", "/pooling"): [
        ({}, 400, "input", "missing_required_parameter", "Missing required parameter: 'input'."),
        ({"input": "x", "task": "score"}, 400, "task", "invalid_value", "enum value 'score'."),
        (
            {"input": "x", "task": "classify"},
            400,
            "model",
            "unsupported_value",
            "The model 'bundled' cannot classify; it can embed, token_embed, generate text.",
        ),
    ],
    ("POST", "/classify"): [
        (
            {"input": "x"},
            400,
            "model",
            "unsupported_value",
            "The model 'bundled' cannot classify; it can embed, token_embed, generate text.",
        ),
    ],
    ("POST", "/v1/classify"): [
        ({"input": 5}, 400, "input", "invalid_type", "expected 'str | array | null', got 'int'."),
    ],
    ("POST", "/v2/embed"): [
        ({}, 400, "texts", "missing_required_parameter", "Missing required parameter: 'texts'."),
        (
            {"texts": ["a"], "embedding_types": ["int8"]},
            400,
            "embedding_types",
            "unsupported_value",
            "'embedding_types' must be float or base64, got int8.",
        ),
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
}
