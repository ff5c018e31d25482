"""ApiError: every error that the server reports, as a status and OpenAI's error object.

Must not know: routes, requests, how a response is sent.

    status  type                    code                      when
    400     invalid_request_error   (the reason, or null)     a parameter is wrong; `param` names it
    401     authentication_error    invalid_api_key           no key, or a wrong one
    403     permission_error        admin_disabled            a route that needs --admin
    403     permission_error        model_changes_disabled    needs --allow-model-changes
    403     permission_error        host_not_allowed, ...     a web page of another site (no keys)
    404     not_found_error         model_not_found, ...      no such model, route or object
    405     invalid_request_error   method_not_allowed
    408     timeout_error           request_timeout           the client sent too slowly
    409     invalid_request_error   engine_paused, ...        the engine or a model is in use
    413     invalid_request_error   request_too_large
    415     invalid_request_error   unsupported_media_type    the body is not sent as JSON
    429     rate_limit_error        rate_limit_exceeded       the queue is full; see Retry-After
    500     server_error            internal_error            a bug, or a failure of the engine
    503     service_unavailable     model_loading, ...        loading, draining, or the engine has
                                                              stopped; Retry-After if it may return
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from http import HTTPStatus

import msgspec

from ....ipc.errors import EngineDeadError, EngineRestartedError, InvalidParameterError

# They end a task or the process. Every other exception is the failure of a request, also one that
# is no Exception, such as a panic of a library in Rust.
ENDS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}
# The type of these codes differs from TYPES.
ANTHROPIC_TYPES = {
    413: "request_too_large",
    408: "timeout_error",
    500: "api_error",
    503: "overloaded_error",
}
INTERNAL = (
    "The server failed to process this request. Its log has the cause, under the request id of "
    "this response."
)
ENGINE_GONE = "The engine has stopped; the server's log has the cause."
ENGINE_CRASH = (
    "The engine died each time it computed this request, which ends here; the server's log has the "
    "cause."
)
ENGINE_RESTARTED = (
    "The engine died during this call and was started again; the call may have had no effect."
)


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """OpenAI's error object, which is also sent inside a stream."""

    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct):
    type: str
    error: AnthropicErrorDetail


class OllamaError(msgspec.Struct):
    error: str


class ApiError(Exception):
    """An error that any part of a handler may raise; app.py converts it to a response.

    `param` is the field of the body, with its path. `cause` is what only the log says of a server
    error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        cause: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.cause = cause

    def renamed(self, param: str) -> ApiError:
        """Returns the same error under another name of its parameter."""
        message = self.message.replace(f"'{self.param}'", f"'{param}'")
        return ApiError(
            self.status,
            message,
            code=self.code,
            param=param,
            retry_after_s=self.retry_after_s,
            cause=self.cause,
        )

    @property
    def type(self) -> str:
        return TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )

    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, round(self.retry_after_s)))}

    def body(self, path: str = "") -> bytes:
        return msgspec.json.encode(self.in_format(path))

    def in_format(self, path: str = "") -> Error | AnthropicError | OllamaError:
        """Returns the body in the format of the API that `path` belongs to, by default OpenAI's."""
        if path.startswith("/v1/messages"):
            kind = ANTHROPIC_TYPES.get(self.status, self.type)
            return AnthropicError("error", AnthropicErrorDetail(kind, self.message))
        if path.startswith("/api/"):
            return OllamaError(self.message)
        return Error(ErrorDetail(self.message, self.type, self.param, self.code))


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """Makes a 400 about one parameter."""
    return ApiError(400, message, code=code, param=param)


def missing(param: str) -> ApiError:
    return invalid(param, f"Missing required parameter: '{param}'.", "missing_required_parameter")


def unsupported(param: str, message: str) -> ApiError:
    """Makes a 400 for a feature that the API defines and this server does not support."""
    return invalid(param, message, "unsupported_value")


def context_length_exceeded(
    param: str, max_model_len: int, num_prompt_tokens: int, max_tokens: int | None = None
) -> ApiError:
    """`max_tokens` is the requested number of tokens, if it is what exceeds the context length."""
    if max_tokens is None:
        problem = f"your {param} resulted in {num_prompt_tokens} tokens"
        return too_long(param, max_model_len, f"{problem}, which leaves none for an answer")
    problem = (
        f"you requested {num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in the "
        f"{param}, {max_tokens} in the completion)"
    )
    return too_long(param, max_model_len, problem, f"{param} or completion")


def too_long(param: str, max_model_len: int, problem: str, remedy: str = "") -> ApiError:
    """Makes an error with OpenAI's wording, which clients search for. `remedy` says what to make
    shorter, by default `param`.
    """
    message = (
        f"This model's maximum context length is {max_model_len} tokens. However, {problem}. "
        f"Please reduce the length of the {remedy or param}."
    )
    return invalid(param, message, "context_length_exceeded")


def not_found(what: str) -> ApiError:
    return ApiError(404, what, code="not_found")


def from_exception(error: BaseException) -> ApiError:
    """Returns the error that a client receives for `error`.

    No internal detail is sent: an unexpected exception becomes INTERNAL, and only the log has the
    cause.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidParameterError):
        return refused(error.parameter, error.problem)
    if isinstance(error, EngineDeadError):
        return ApiError(503, ENGINE_GONE, code="engine_dead")
    if isinstance(error, EngineRestartedError):
        return ApiError(503, ENGINE_RESTARTED, code="engine_restarted", retry_after_s=1.0)
    return ApiError(500, INTERNAL, code="internal_error")


def refused(parameter: str, problem: str, names: dict[str, str] | None = None) -> ApiError:
    """Makes an error about a parameter that the frontend or the engine rejected, under its name in
    the body.
    """
    param = (names or {}).get(parameter, parameter)
    return invalid(param, f"{param}: {problem}")


@contextmanager
def renaming(names: dict[str, str]) -> Iterator[None]:
    """Renames parameters in errors raised within, from internal (OpenAI's) names to the API's."""
    try:
        yield
    except InvalidParameterError as error:
        raise refused(error.parameter, error.problem, names) from None
    except ApiError as error:
        if error.param not in names:
            raise
        raise error.renamed(names[error.param]) from None


def from_status(status: int, path: str, method: str, known_paths: Iterable[str] = ()) -> ApiError:
    """Returns the error for a response of the router. It suggests the closest of `known_paths`, if
    any is close.
    """
    if status == 404:
        # The base URL may have a missing or a repeated /v1.
        guesses = {
            path.rstrip("/"),
            f"/v1{path}".rstrip("/"),
            path.replace("/v1/v1/", "/v1/").rstrip("/"),
        }
        near = guesses.intersection(known_paths) or set(
            get_close_matches(path, known_paths, n=1, cutoff=0.8)
        )
        hint = f". Did you mean {min(near)}?" if near else ""
        return ApiError(404, f"Unknown route: {method} {path}{hint}", code="unknown_url")
    if status == 405:
        return ApiError(405, f"{path} does not support {method}", code="method_not_allowed")
    return ApiError(status, HTTPStatus(status).phrase)
