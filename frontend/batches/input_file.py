"""The input of a batch: JSON lines in OpenAI's format, checked as a whole and read line by line.

Must not know: how a line is answered, what its body means.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": ...}}

A file is never in memory as a whole: checking it keeps eight bytes for each line.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

MAX_ERRORS = 100  # that are reported of one file
MAX_CUSTOM_ID = 512  # characters


class InputLine(msgspec.Struct):
    """One request of a batch."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BodyHead(msgspec.Struct):
    """The fields of a body that are checked before the batch begins."""

    model: str | None = None
    stream: bool | None = None


class LineError(msgspec.Struct):
    """One entry of a batch's `errors`. `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class InputRules(msgspec.Struct, frozen=True):
    """What lines may ask for. `urls` are the endpoints. `check_model` returns what is wrong with a
    model's name, or None. A line has at most `max_line_bytes`, a file at most `max_requests`.
    """

    urls: Collection[str]
    check_model: Callable[[str | None], str | None]
    max_line_bytes: int
    max_requests: int


class InputReport(msgspec.Struct):
    """`num_lines` counts empty lines too, `num_requests` does not."""

    num_lines: int
    num_requests: int
    errors: list[LineError]


def read_lines(path: Path) -> Iterator[tuple[int, InputLine]]:
    """Yields the number of each line, from 0, and its request. The file has been checked."""
    decoder = msgspec.json.Decoder(InputLine)
    with path.open("rb") as file:
        for index, line in enumerate(file):
            if line.strip():
                yield index, decoder.decode(without_mark(index, line))


def without_mark(index: int, line: bytes) -> bytes:
    """Returns the line without the byte order mark that some editors begin a file with."""
    return line.removeprefix(b"\xef\xbb\xbf") if index == 0 else line


def check_input(path: Path, rules: InputRules) -> InputReport:
    """Checks every line. Raises OSError."""
    checker = _Checker(rules)
    with path.open("rb") as file:
        for index, line in enumerate(_bounded(file, rules.max_line_bytes)):
            checker.check(index, line)
            if len(checker.errors) >= MAX_ERRORS:
                break
    errors = checker.errors
    if not errors:
        errors += _find_duplicates(path, checker.digests)
    if not errors and not checker.num_requests:
        errors.append(LineError("empty_file", "The file has no requests."))
    return InputReport(checker.num_lines, checker.num_requests, errors)


def _bounded(file: BinaryIO, most: int) -> Iterator[bytes | None]:
    """Yields the lines of a file, and None for one with more than `most` bytes."""
    while line := file.readline(most + 1):
        if len(line) <= most or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(most + 1)
        yield None


class _Checker:
    def __init__(self, rules: InputRules):
        self.num_lines = self.num_requests = 0
        self.errors: list[LineError] = []
        self.digests = array("Q")  # of the custom ids
        self._rules = rules
        self._decoder = msgspec.json.Decoder(InputLine)
        self._head_decoder = msgspec.json.Decoder(BodyHead)
        self._models: dict[str | None, str | None] = {}  # what is wrong with each

    def check(self, index: int, line: bytes | None) -> None:
        self.num_lines = index + 1
        if line is not None and not line.strip():
            return
        self.num_requests += 1
        error = self._problem(index, line)
        if error is None and self.num_requests > self._rules.max_requests:
            problem = f"A batch has at most {self._rules.max_requests} requests."
            error = LineError("too_many_requests", problem)
        if error is not None:
            error.line = index + 1
            self.errors.append(error)

    def _problem(self, index: int, line: bytes | None) -> LineError | None:
        if line is None:
            most = self._rules.max_line_bytes
            return LineError("line_too_long", f"The line has more than {most} bytes.")
        try:
            asked = self._decoder.decode(without_mark(index, line))
            head = self._head_decoder.decode(asked.body)
        except msgspec.ValidationError as error:
            return LineError("invalid_request", f"The line is not a request: {error}.")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return LineError("invalid_json_line", f"The line is not valid JSON: {error}.")
        self.digests.append(_digest(asked.custom_id))
        return self._problem_of(asked, head)

    def _problem_of(self, asked: InputLine, head: BodyHead) -> LineError | None:
        rules = self._rules
        if not 1 <= len(asked.custom_id) <= MAX_CUSTOM_ID:
            problem = f"'custom_id' must have 1 to {MAX_CUSTOM_ID} characters."
            return LineError("invalid_custom_id", problem, "custom_id")
        if asked.method != "POST":
            problem = f"'method' must be POST, got {asked.method!r:.40}."
            return LineError("invalid_method", problem, "method")
        if asked.url not in rules.urls:
            problem = f"'url' must be {' or '.join(rules.urls)}, got {asked.url!r:.80}."
            return LineError("mismatched_url", problem, "url")
        if head.stream:
            problem = "'body.stream' must be false: a batch does not stream."
            return LineError("stream_unsupported", problem, "body.stream")
        if head.model not in self._models:
            self._models[head.model] = rules.check_model(head.model)
        if (problem := self._models[head.model]) is not None:
            return LineError("model_not_found", problem, "body.model")
        return None


def _digest(custom_id: str) -> int:
    return int.from_bytes(blake2b(custom_id.encode(), digest_size=8).digest())


def _find_duplicates(path: Path, digests: array[int]) -> list[LineError]:
    """Compares the ids themselves, in a second pass, where two digests are equal."""
    ordered = np.sort(np.frombuffer(digests, np.uint64)) if digests else np.empty(0, np.uint64)
    shared = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    errors: list[LineError] = []
    if not shared:
        return errors
    first: dict[str, int] = {}  # lines, by id
    for index, asked in read_lines(path):
        if _digest(asked.custom_id) not in shared:
            continue
        if (line := first.setdefault(asked.custom_id, index)) != index:
            problem = f"The custom_id {asked.custom_id!r:.80} is that of line {line + 1} too."
            errors.append(LineError("duplicate_custom_id", problem, "custom_id", index + 1))
            if len(errors) >= MAX_ERRORS:
                break
    return errors
