"""Runs the checks of one client file in that client's environment: every function called check_*,
with the server's address.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
ANSWER = "2 + 3 = 5"  # greedy answer of the bundled model


def run(checks: dict[str, Any], distribution: str, found_version: str | None = None) -> None:
    """`python client_x.py ADDRESS MODEL_DIRECTORY` prints one line of JSON: {"version", "passed":
    [...], "failed": {name: traceback}}. `found_version`: of what is no distribution of Python.
    """
    address, model_directory = sys.argv[1:3]
    found: dict[str, Any] = {
        "version": found_version or version(distribution),
        "passed": [],
        "failed": {},
    }
    for name, check in checks.items():
        if name.startswith("check_") and isinstance(check, Callable):
            try:
                check(address, model_directory)
                found["passed"].append(name)
            except Exception:
                found["failed"][name] = traceback.format_exc()
    print(json.dumps(found))


def until(look: Callable[[], Any], is_it: Callable[[Any], bool], seconds: float = 60) -> Any:
    """Return what `look` returns as soon as it is the right thing."""
    deadline = time.monotonic() + seconds
    while not is_it(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def batch_lines(names: str, **fields: Any) -> bytes:
    """Return the file of a batch with a question for each letter, which is its custom_id."""
    body = {"model": "quire", "messages": QUESTION, "max_tokens": 16, "temperature": 0} | fields
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    return b"".join(json.dumps(line | {"custom_id": name}).encode() + b"\n" for name in names)


def raises(error: type[Exception], call: Callable[[], Any]) -> Any:
    """Return the error that `call` must raise."""
    try:
        call()
    except error as raised:
        return raised
    raise AssertionError(f"{error.__name__} was not raised")
