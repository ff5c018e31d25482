"""How the result of a line is written: in OpenAI's format, or in Anthropic's.

Must not know: how a line was answered.

    OpenAI     {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}
    Anthropic  {"custom_id", "result": {"type": "succeeded", "message"} or {"type": "errored",
               "error"} or {"type": "canceled"} or {"type": "expired"}}
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import msgspec

Reason = Literal["cancelled", "expired"]  # why lines are dropped


class Answer(NamedTuple):
    """The response to a line: a status of HTTP, and JSON."""

    status: int
    request_id: str
    body: bytes

    @property
    def is_success(self) -> bool:
        return self.status == 200


class LineFormat(Protocol):
    def answered(self, custom_id: str, answer: Answer) -> bytes:
        """Returns the line with an answer."""
        ...

    def dropped(self, custom_id: str, request_id: str, reason: Reason) -> bytes | None:
        """Returns the line of a request that is not answered any more, if there is one."""
        ...

    def is_error(self, answer: Answer | None) -> bool:
        """Whether the line belongs into the error file. None: it has been dropped."""
        ...


class OpenAIFormat:
    """What is no success has a file of its own."""

    def answered(self, custom_id: str, answer: Answer) -> bytes:
        body = msgspec.Raw(answer.body)
        response = {"status_code": answer.status, "request_id": answer.request_id, "body": body}
        return self._line(answer.request_id, custom_id, response, None)

    def dropped(self, custom_id: str, request_id: str, reason: Reason) -> bytes | None:
        if reason == "cancelled":
            return None
        message = "This request could not be executed before the completion window expired."
        error = {"code": "batch_expired", "message": message}
        return self._line(request_id, custom_id, None, error)

    def is_error(self, answer: Answer | None) -> bool:
        return answer is None or not answer.is_success

    @staticmethod
    def _line(request_id: str, custom_id: str, response: Any, error: Any) -> bytes:
        line = {"id": request_id, "custom_id": custom_id, "response": response, "error": error}
        return msgspec.json.encode(line) + b"\n"


class AnthropicFormat:
    """There is one file, which has a line for each request."""

    def answered(self, custom_id: str, answer: Answer) -> bytes:
        kind, name = ("succeeded", "message") if answer.is_success else ("errored", "error")
        return self._line(custom_id, {"type": kind, name: msgspec.Raw(answer.body)})

    def dropped(self, custom_id: str, request_id: str, reason: Reason) -> bytes | None:
        return self._line(custom_id, {"type": "canceled" if reason == "cancelled" else reason})

    def is_error(self, answer: Answer | None) -> bool:
        return False

    @staticmethod
    def _line(custom_id: str, result: dict[str, Any]) -> bytes:
        return msgspec.json.encode({"custom_id": custom_id, "result": result}) + b"\n"
