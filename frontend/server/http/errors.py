"""ApiError: everything that the server refuses or fails at, as a status and OpenAI's error object.

Must not know: routes, requests, how an answer is sent.

    status  type                    code                      when
    400     invalid_request_error   (the reason, or null)     a parameter is wrong; `param` names it
    401     authentication_error    invalid_api_key           no key, or a wrong one
    403     permission_error        admin_disabled            a route that changes the engine, without --admin
    404     not_found_error         model_not_found, ...      no such model, route or object
    405     invalid_request_error   method_not_allowed
    408     timeout_error           request_timeout           the client took too long to send
    403     permission_error        host_not_allowed, ...     a web page of another site, where no key is asked for
    413     invalid_request_error   request_too_large
    415     invalid_request_error   unsupported_media_type    a body that is not sent as JSON
    429     rate_limit_error        rate_limit_exceeded       the queue is full; Retry-After says when to come again
    500     server_error            internal_error            a defect of ours, or a failure of the engine in this request
    503     service_unavailable     model_loading, ...        loading, draining, or the engine is gone; Retry-After where it may come back
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from http import HTTPStatus
from typing import Any

import msgspec

from ....ipc.errors import EngineDeadError, InvalidParameterError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}
# where they differ from TYPES
ANTHROPIC_TYPES = {
    413: "request_too_large",
    408: "timeout_error",
    500: "api_error",
    503: "overloaded_error",
}
INTERNAL = "The server failed while it worked on this request. Its log has the cause, under the request id of this answer."
ENGINE_GONE = "The engine has stopped; the server's log has the cause."


class ApiError(Exception):
    """Raised anywhere in a handler; app.py makes the answer of it.

    `param`: the body's field, with its path.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

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
        """JSON in the shape of the API that `path` belongs to: Anthropic's, Ollama's, else
        OpenAI's.
        """
        if path.startswith("/v1/messages"):
            kind = ANTHROPIC_TYPES.get(self.status) or self.type
            return msgspec.json.encode(
                {"type": "error", "error": {"type": kind, "message": self.message}}
            )
        if path.startswith("/api/"):
            return msgspec.json.encode({"error": self.message})
        return msgspec.json.encode(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's object, also for the inside of a stream."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """A 400 about one parameter."""
    return ApiError(400, message, code=code, param=param)


def missing(param: str) -> ApiError:
    return ApiError(
        400,
        f"Missing required parameter: '{param}'.",
        code="missing_required_parameter",
        param=param,
    )


def unsupported(param: str, message: str) -> ApiError:
    """A 400 for what the API knows and this server does not do."""
    return ApiError(400, message, code="unsupported_value", param=param)


def context_length_exceeded(
    param: str, max_model_len: int, num_prompt_tokens: int, max_tokens: int | None = None
) -> ApiError:
    """OpenAI's sentence, which clients look for.

    `max_tokens`: those asked for, where it is they that do not fit.
    """
    if max_tokens is None:
        problem, remedy = (
            f"your {param} resulted in {num_prompt_tokens} tokens, which leaves none for an answer",
            param,
        )
    else:
        total = num_prompt_tokens + max_tokens
        problem, remedy = (
            f"you requested {total} tokens ({num_prompt_tokens} in the {param}, {max_tokens} in "
            f"the completion)",
            f"{param} or completion",
        )
    message = f"This model's maximum context length is {max_model_len} tokens. However, {problem}. Please reduce the length of the {remedy}."
    return ApiError(400, message, code="context_length_exceeded", param=param)


def not_found(what: str) -> ApiError:
    return ApiError(404, what, code="not_found")


def from_exception(error: Exception, names: dict[str, str] | None = None) -> ApiError:
    """What a client is told about `error`.

    Nothing internal gets out: whatever is not one of ours is INTERNAL, and the log's to explain.

    `names`: the engine's parameters -> the body's fields, where they differ.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidParameterError):
        return refused(error.parameter, error.problem, names)
    if isinstance(error, EngineDeadError):
        return ApiError(503, ENGINE_GONE, code="engine_dead")
    return ApiError(500, INTERNAL, code="internal_error")


def refused(parameter: str, problem: str, names: dict[str, str] | None = None) -> ApiError:
    """A parameter that the frontend or the engine refused, under the name that it has in the
    body.
    """
    param = (names or {}).get(parameter, parameter)
    return invalid(param, f"{param}: {problem}")


@contextmanager
def named(names: dict[str, str]) -> Iterator[None]:
    """What is refused within is told by the names that the body's API has for it: the house's
    (OpenAI's) names -> the API's.
    """
    try:
        yield
    except InvalidParameterError as error:
        raise refused(error.parameter, error.problem, names) from None
    except ApiError as error:
        if error.param in names:
            error.message = error.message.replace(f"'{error.param}'", f"'{names[error.param]}'")
            error.param = names[error.param]
        raise


def from_status(status: int, path: str, method: str, known_paths: Iterable[str] = ()) -> ApiError:
    """For what the router refuses. A path that is near one of `known_paths` is told of it."""
    if status == 404:
        # a base URL with /v1 too little or too much
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
        return ApiError(405, f"{path} does not take {method}", code="method_not_allowed")
    return ApiError(status, HTTPStatus(status).phrase)
