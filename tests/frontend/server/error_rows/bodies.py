"""Bodies and types that the rows of the error table share."""

from __future__ import annotations

from typing import Any

# By method and path: body (JSON, or bytes sent unmodified), status, param, code, a part of the
# message. Errors in the formats of Anthropic and Ollama have no param and code.
Row = tuple[Any, int, str | None, str | None, str]
Table = dict[tuple[str, str], list[Row]]

T, C, R, M = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
hi = [{"role": "user", "content": "hi"}]
DEEP = (
    b'{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": '
    + b'{"a":' * 10000
    + b"1"
    + b"}" * 10000
    + b"}"
)


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Once", "max_tokens": 1} | fields


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": hi, "max_tokens": 1} | fields


def resp(**fields: Any) -> dict[str, Any]:
    return {"input": "hi", "max_output_tokens": 16} | fields


def msg(**fields: Any) -> dict[str, Any]:
    return {"model": "bundled", "messages": hi, "max_tokens": 1} | fields
