"""Rows of the error table for /v1/messages; see test_error_table.py."""

from __future__ import annotations

from quire.tests.frontend.server.error_rows.bodies import M, Table, hi, msg

ROWS: Table = {
    ("POST", M): [
        ({}, 400, None, None, "Missing required parameter: 'messages'."),
        (
            {"model": "bundled", "messages": hi},
            400,
            None,
            None,
            "Missing required parameter: 'max_tokens'.",
        ),
        (
            msg(messages=[]),
            400,
            None,
            None,
            "Invalid value for 'messages': expected 'array' of length >=",
        ),
        (
            msg(model="claude"),
            404,
            None,
            None,
            "The model 'claude' does not exist. This server has",
        ),
        (
            msg(max_tokens=0),
            400,
            None,
            None,
            "Invalid value for 'max_tokens': expected 'int' >= 1.",
        ),
        (
            msg(temperature=-1),
            400,
            None,
            None,
            "Invalid value for 'temperature': expected 'float' >= 0.0.",
        ),
        (
            msg(messages=[{"role": "king", "content": "x"}]),
            400,
            None,
            None,
            "'messages[0].role' must be user, assistant or system, got",
        ),
        (
            msg(tools=[{"name": "x"}]),
            400,
            None,
            None,
            "Missing required parameter: 'tools[0].input_schema'.",
        ),
        (
            msg(tool_choice={"type": "tool"}),
            400,
            None,
            None,
            "'tool_choice' can be tool only with 'tools'.",
        ),
        (
            msg(messages=[{"role": "user", "content": [{"type": "image"}]}]),
            400,
            None,
            None,
            "'messages[0].content[0]' is of the type image: this model",
        ),
        (b"{", 400, None, None, "Input data was truncated"),
    ],
    ("GET", M): [
        (None, 405, None, None, "/v1/messages does not support GET"),
    ],
    ("POST", M + "/count_tokens"): [
        ({}, 400, None, None, "Missing required parameter: 'messages'."),
    ],
    ("POST", M + "/batches"): [
        ({}, 400, None, None, "Missing required parameter: 'requests'."),
    ],
    ("GET", M + "/batches/none"): [
        (None, 404, None, None, "No batch found with id 'none'."),
    ],
    ("POST", M + "/batches/none/cancel"): [
        ({}, 404, None, None, "No batch found with id 'none'."),
    ],
    ("GET", M + "/batches/none/results"): [
        (None, 404, None, None, "No batch found with id 'none'."),
    ],
}
