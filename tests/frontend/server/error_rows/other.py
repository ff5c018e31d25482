"""Rows of the error table for all other routes, and for unknown paths; see test_error_table.py."""

from __future__ import annotations

from quire.tests.frontend.server.error_rows.bodies import Table, text

ROWS: Table = {
    ("POST", "/completions"): [
        (text(), 404, None, "unknown_url", "Unknown route: POST /completions. Did you mean"),
    ],
    ("POST", "/v1/v1/completions"): [
        (text(), 404, None, "unknown_url", "Unknown route: POST /v1/v1/completions. Did you mean"),
    ],
    ("POST", "/v1/completion"): [
        (text(), 404, None, "unknown_url", "Unknown route: POST /v1/completion. Did you mean"),
    ],
    ("GET", "/v1/nowhere"): [
        (None, 404, None, "unknown_url", "Unknown route: GET /v1/nowhere"),
    ],
    ("GET", "/etc/passwd"): [
        (None, 404, None, "unknown_url", "Unknown route: GET /etc/passwd"),
    ],
    ("GET", "/v1/models/gpt-4"): [
        (
            None,
            404,
            "model",
            "model_not_found",
            "The model 'gpt-4' does not exist. This server has 'bundled'.",
        ),
    ],
    ("POST", "/v1/models"): [
        ({}, 405, None, "method_not_allowed", "/v1/models does not support POST"),
    ],
    ("DELETE", "/v1/models/bundled"): [
        (None, 405, None, "method_not_allowed", "/v1/models/bundled does not support DELETE"),
    ],
    ("POST", "/health"): [
        (None, 405, None, "method_not_allowed", "/health does not support POST"),
    ],
    ("GET", "/v1/engine/state?since=x"): [
        (None, 400, "since", "invalid_value", "'since' must be an integer from -1 to"),
    ],
    ("GET", "/v1/requests/none"): [
        (
            None,
            404,
            None,
            "request_not_found",
            "No finished request 'none' is known here; the last 1024 are.",
        ),
    ],
    ("GET", "/v1/requests/none/trace"): [
        (
            None,
            404,
            None,
            "request_not_found",
            "No finished request 'none' is known here; the last 1024 are.",
        ),
    ],
    ("GET", "/pause"): [
        (None, 405, None, "method_not_allowed", "/pause does not support GET"),
    ],
    ("POST", "/pause"): [
        (
            None,
            403,
            None,
            "admin_disabled",
            "This route changes the engine for all clients and is disabled",
        ),
    ],
    ("POST", "/start_profile"): [
        (
            None,
            403,
            None,
            "admin_disabled",
            "This route changes the engine for all clients and is disabled",
        ),
    ],
    ("POST", "/stop_profile"): [
        (
            None,
            403,
            None,
            "admin_disabled",
            "This route changes the engine for all clients and is disabled",
        ),
    ],
    ("POST", "/collective_rpc"): [
        (None, 404, None, "unknown_url", "Unknown route: POST /collective_rpc"),
    ],
    ("POST", "/metrics"): [
        (None, 405, None, "method_not_allowed", "/metrics does not support POST"),
    ],
    ("POST", "/v1/audio/transcriptions"): [
        ({}, 404, None, "unknown_url", "Unknown route: POST /v1/audio/transcriptions"),
    ],
    ("POST", "/v1/images/generations"): [
        ({}, 404, None, "unknown_url", "Unknown route: POST /v1/images/generations"),
    ],
    ("POST", "/"): [
        ({}, 405, None, "method_not_allowed", "/ does not support POST"),
    ],
    ("POST", "/docs"): [
        ({}, 405, None, "method_not_allowed", "/docs does not support POST"),
    ],
    ("PUT", "/ping"): [
        ({}, 405, None, "method_not_allowed", "/ping does not support PUT"),
    ],
    ("POST", "/load"): [
        ({}, 405, None, "method_not_allowed", "/load does not support POST"),
    ],
    ("POST", "/version"): [
        ({}, 405, None, "method_not_allowed", "/version does not support POST"),
    ],
    ("POST", "/openapi.json"): [
        ({}, 405, None, "method_not_allowed", "/openapi.json does not support POST"),
    ],
    ("POST", "/health/ready"): [
        ({}, 405, None, "method_not_allowed", "/health/ready does not support POST"),
    ],
    ("POST", "/v1/engine/state"): [
        ({}, 405, None, "method_not_allowed", "/v1/engine/state does not support POST"),
    ],
    ("POST", "/v1/engine/experts"): [
        ({}, 405, None, "method_not_allowed", "/v1/engine/experts does not support POST"),
    ],
    ("POST", "/v1/requests"): [
        ({}, 405, None, "method_not_allowed", "/v1/requests does not support POST"),
    ],
    ("POST", "/v1/requests/x"): [
        ({}, 405, None, "method_not_allowed", "/v1/requests/x does not support POST"),
    ],
    ("POST", "/v1/requests/x/trace"): [
        ({}, 405, None, "method_not_allowed", "/v1/requests/x/trace does not support POST"),
    ],
    ("GET", "/v1/engine/trace"): [
        (None, 405, None, "method_not_allowed", "/v1/engine/trace does not support GET"),
    ],
    ("POST", "/resume"): [
        (
            {},
            403,
            None,
            "admin_disabled",
            "This route changes the engine for all clients and is disabled",
        ),
    ],
    ("GET", "/is_paused"): [
        (
            None,
            403,
            None,
            "admin_disabled",
            "This route changes the engine for all clients and is disabled",
        ),
    ],
    ("POST", "/sleep"): [
        (
            {},
            403,
            None,
            "admin_disabled",
            "This route changes the engine for all clients and is disabled",
        ),
    ],
    ("POST", "/wake_up"): [
        (
            {},
            403,
            None,
            "admin_disabled",
            "This route changes the engine for all clients and is disabled",
        ),
    ],
    ("GET", "/is_sleeping"): [
        (
            None,
            403,
            None,
            "admin_disabled",
            "This route changes the engine for all clients and is disabled",
        ),
    ],
    ("POST", "/restart_engines"): [
        (
            {},
            403,
            None,
            "admin_disabled",
            "This route changes the engine for all clients and is disabled",
        ),
    ],
    ("POST", "/reset_prefix_cache"): [
        (
            {},
            403,
            None,
            "admin_disabled",
            "This route changes the engine for all clients and is disabled",
        ),
    ],
    ("POST", "/v1/load_lora_adapter"): [
        (
            {},
            403,
            None,
            "admin_disabled",
            "This route changes the engine for all clients and is disabled",
        ),
    ],
    ("POST", "/v1/unload_lora_adapter"): [
        (
            {},
            403,
            None,
            "admin_disabled",
            "This route changes the engine for all clients and is disabled",
        ),
    ],
    ("GET", "/v1/files?order=up"): [
        (None, 400, "order", "invalid_value", "'order' must be asc or desc."),
    ],
    ("GET", "/v1/files/none"): [
        (None, 404, None, "not_found", "No such File object: none"),
    ],
    ("GET", "/v1/files/none/content"): [
        (None, 404, None, "not_found", "No such File object: none"),
    ],
    ("POST", "/v1/batches"): [
        (
            {},
            400,
            "input_file_id",
            "missing_required_parameter",
            "Missing required parameter: 'input_file_id'.",
        ),
    ],
    ("GET", "/v1/batches/none"): [
        (None, 404, None, "not_found", "No batch found with id 'none'."),
    ],
    ("POST", "/v1/batches/none/cancel"): [
        ({}, 404, None, "not_found", "No batch found with id 'none'."),
    ],
}
