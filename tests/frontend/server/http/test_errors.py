"""ApiError: the error formats of three APIs, without internal details."""

import json

import pytest
from quire.frontend.server.http.errors import (
    ApiError,
    context_length_exceeded,
    from_exception,
    from_status,
    refused,
)
from quire.ipc.errors import EngineDeadError, EngineRestartedError


def test_openai_shape() -> None:
    error = ApiError(429, "Too much.", code="rate_limit_exceeded", retry_after_s=2.6)
    assert json.loads(error.body("/v1/completions")) == {
        "error": {
            "message": "Too much.",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }
    }
    assert error.headers() == {"retry-after": "3"}


def test_shapes_of_the_others() -> None:
    error = ApiError(400, "No.", param="x")
    assert json.loads(error.body("/v1/messages")) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "No."},
    }
    assert json.loads(error.body("/api/chat")) == {"error": "No."}


def test_a_parameter_has_the_name_of_the_field_in_the_body() -> None:
    error = refused("prompt", "must not be empty", {"prompt": "messages"})
    assert (error.status, error.param, error.message) == (
        400,
        "messages",
        "messages: must not be empty",
    )


@pytest.mark.parametrize(
    "secret",
    [
        RuntimeError("ipc:///tmp/quire-x/sock"),
        EngineDeadError("pid 12, Traceback ..."),
        KeyError("/etc/passwd"),
    ],
)
def test_internal_details_are_hidden(secret: Exception) -> None:
    error = from_exception(secret)
    assert error.status in (500, 503)
    assert not any(
        piece in error.message for piece in ("ipc:", "/etc", "pid", "Traceback", "KeyError")
    )


def test_a_call_that_an_engine_did_not_survive_may_be_repeated() -> None:
    error = from_exception(EngineRestartedError("the engine died during start_trace"))
    assert (error.status, error.code, error.headers()) == (
        503,
        "engine_restarted",
        {"retry-after": "1"},
    )


def test_context_length_error_contains_both_numbers() -> None:
    error = context_length_exceeded("messages", 4096, 4000, 200)
    assert error.code == "context_length_exceeded" and error.param == "messages"
    assert (
        "4096 tokens" in error.message
        and "4200 tokens (4000 in the messages, 200 in the completion)" in error.message
    )


def test_statuses_of_the_router() -> None:
    assert from_status(404, "/x", "GET").code == "unknown_url"
    assert from_status(405, "/x", "PUT").message == "/x does not support PUT"
