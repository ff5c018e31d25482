"""Rows of the error table for /v1/responses and /v1/conversations; see test_error_table.py."""

from __future__ import annotations

from quire.tests.frontend.server.error_rows.bodies import R, Table, resp

C = "/v1/conversations"
ROWS: Table = {
    ("POST", C): [
        ({"metadata": 5}, 400, "metadata", "invalid_type", "expected 'object | null'"),
    ],
    ("GET", C + "/conv_none"): [
        (None, 404, None, "not_found", "Conversation with id 'conv_none' not found."),
    ],
    ("DELETE", C + "/conv_none"): [
        (None, 404, None, "not_found", "Conversation with id 'conv_none' not found."),
    ],
    ("GET", C + "/conv_none/items"): [
        (None, 404, None, "not_found", "Conversation with id 'conv_none' not found."),
    ],
    ("GET", C + "/conv_none/items/x"): [
        (None, 404, None, "not_found", "Conversation with id 'conv_none' not found."),
    ],
    ("DELETE", C + "/conv_none/items/x"): [
        (None, 404, None, "not_found", "Conversation with id 'conv_none' not found."),
    ],
    ("POST", C + "/conv_none"): [
        ({"metadata": {}}, 404, None, "not_found", "Conversation with id 'conv_none' not found."),
    ],
    ("POST", C + "/conv_none/items"): [
        ({"items": []}, 400, "items", "empty_array", "of length >= 1."),
    ],
    ("POST", R + "/compact"): [
        (resp(input=[]), 400, "input", "empty_array", "'input' must have at least one item."),
    ],
    ("POST", R): [
        ({}, 400, "input", "missing_required_parameter", "Missing required parameter: 'input'."),
        (resp(input=5), 400, "input", "invalid_type", "expected 'str | array | null', got 'int'."),
        (
            resp(model="gpt-4"),
            404,
            "model",
            "model_not_found",
            "The model 'gpt-4' does not exist. This server has 'bundled'.",
        ),
        (
            resp(max_output_tokens=0),
            400,
            "max_output_tokens",
            "integer_below_min_value",
            "expected 'int' >= 1.",
        ),
        (
            resp(previous_response_id="resp_none"),
            400,
            "previous_response_id",
            "previous_response_not_found",
            "Previous response with id 'resp_none' not found. It is kept",
        ),
        (
            resp(background=True),
            400,
            "background",
            "unsupported_value",
            "'background' is not supported: the client must wait",
        ),
        (
            resp(tools=[{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]),
            400,
            "tools[0].tools[0].name",
            "missing_required_parameter",
            "Missing required parameter: 'tools[0].tools[0].name'.",
        ),
        (
            resp(input=[{"role": "user", "content": [{"type": "input_image"}]}]),
            400,
            "input[0].content[0].type",
            "unsupported_value",
            "'input[0].content[0]' is of the type 'input_image': this",
        ),
    ],
    ("GET", R + "/resp_none"): [
        (None, 404, None, "not_found", "Response with id 'resp_none' not found."),
    ],
    ("DELETE", R + "/resp_none"): [
        (None, 404, None, "not_found", "Response with id 'resp_none' not found."),
    ],
    ("POST", R + "/resp_none/cancel"): [
        (None, 404, None, "not_found", "Response with id 'resp_none' not found."),
    ],
    ("GET", R + "/resp_none/input_items"): [
        (None, 404, None, "not_found", "Response with id 'resp_none' not found."),
    ],
    ("GET", R): [
        (None, 405, None, "method_not_allowed", "/v1/responses does not support GET"),
    ],
    ("POST", R + "/input_tokens"): [
        (resp(input=[]), 400, "input", "empty_array", "'input' must have at least one item."),
        ({}, 400, "input", "missing_required_parameter", "Missing required parameter: 'input'."),
    ],
}
