"""Rows of the error table for Ollama's routes; see test_error_table.py."""

from __future__ import annotations

from quire.tests.frontend.server.error_rows.bodies import Table, hi

ROWS: Table = {
    ("POST", "/api/chat"): [
        ({}, 400, None, None, "Missing required parameter: 'model'."),
        (
            {"model": "llama3", "messages": hi},
            404,
            None,
            None,
            "The model 'llama3' does not exist. This server has",
        ),
        (
            {"model": "bundled", "messages": hi, "format": "xml"},
            400,
            None,
            None,
            "'format' must be \"json\" or a JSON schema, got 'xml'.",
        ),
        (
            {"model": "bundled", "messages": hi, "options": {"temperature": -1}},
            400,
            None,
            None,
            "options.temperature: must be 0 (greedy) or greater, at most",
        ),
    ],
    ("POST", "/api/generate"): [
        (
            {"model": "bundled", "prompt": "x", "suffix": "y"},
            400,
            None,
            None,
            "This model cannot fill in the middle: 'suffix' is not",
        ),
        (
            {"model": "bundled", "prompt": "x", "images": ["a"]},
            400,
            None,
            None,
            "'images': this model reads text only.",
        ),
        (b"{", 400, None, None, "Input data was truncated"),
    ],
    ("POST", "/api/pull"): [
        (
            {"model": "x"},
            404,
            None,
            None,
            "This server does not have 'x', and downloads no models while it runs.",
        ),
    ],
    ("POST", "/api/show"): [
        (
            {"model": "nope"},
            404,
            None,
            None,
            "The model 'nope' does not exist. This server has 'bundled'.",
        ),
    ],
    ("GET", "/api/chat"): [
        (None, 405, None, None, "/api/chat does not support GET"),
    ],
    ("POST", "/api/embed"): [
        ({"input": "x"}, 400, None, None, "Missing required parameter: 'model'."),
        ({"model": "y", "input": "x"}, 404, None, None, "The model 'y' does not exist."),
        (
            {"model": "bundled", "input": "x", "dimensions": 8},
            400,
            None,
            None,
            "the model was not trained for embeddings of several lengths",
        ),
    ],
    ("POST", "/api/tags"): [
        ({}, 405, None, None, "/api/tags does not support POST"),
    ],
    ("POST", "/api/ps"): [
        ({}, 405, None, None, "/api/ps does not support POST"),
    ],
    ("POST", "/api/version"): [
        ({}, 405, None, None, "/api/version does not support POST"),
    ],
    ("POST", "/api/create"): [
        ({}, 400, None, None, "This server has models as they are on disk and on the hub:"),
    ],
    ("POST", "/api/copy"): [
        ({}, 400, None, None, "This server has models as they are on disk and on the hub:"),
    ],
    ("POST", "/api/push"): [
        ({}, 400, None, None, "This server has models as they are on disk and on the hub:"),
    ],
    ("DELETE", "/api/delete"): [
        ({"model": "bundled"}, 403, None, None, "Clients delete no models of this server."),
    ],
    ("POST", "/api/embeddings"): [
        ({"prompt": "x"}, 400, None, None, "Missing required parameter: 'model'."),
        ({"model": "bundled", "prompt": 5}, 400, None, None, "expected 'str | null', got 'int'."),
    ],
}
