"""Judges the bundled model as a server's users meet it: tool calls and short openings.

Starts `quire serve` on the model and asks over HTTP. Prints a table and writes JSON.
"""

import argparse
import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random

import data
import documents
import jsonschema
import tool_data

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = HERE.parents[1] / "frontend" / "bundled_model"
OPENINGS = (HERE / "openings_held_out.txt").read_text(encoding="utf-8").splitlines()
NUM_THREADS = 8


@contextmanager
def server(model: Path) -> Iterator[str]:
    """The address of a server of `model`; it ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "quire", "serve", str(model), "--port", str(port)]
    process = subprocess.Popen([*command, "--no-access-log"])
    address = f"http://127.0.0.1:{port}"
    try:
        while not _is_ready(address):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with exit code {process.returncode}")
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health/ready"):
            return True
    except (urllib.error.URLError, OSError):
        return False


def ask(address: str, messages: list[dict], **fields) -> dict:
    """The first choice of a chat completion."""
    body = json.dumps({"messages": messages, "max_tokens": 200, **fields}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]


def calls_of(choice: dict) -> list[tuple[str, dict]]:
    """Name and arguments of each call; raises JSONDecodeError for arguments that are no JSON."""
    functions = [call["function"] for call in choice["message"].get("tool_calls") or []]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def calls_the_right_tool(address: str, item: tool_data.ToolQuestion, tool_choice: str) -> bool:
    """Greedy; the one call has the right tool and equal arguments."""
    choice = _first_turn(address, item, tool_choice)
    try:
        return calls_of(choice) == [(item.name, item.arguments)]
    except json.JSONDecodeError:
        return False


def calls_validly(address: str, item: tool_data.ToolQuestion) -> bool:
    """At least one call, each of a tool that was offered, with arguments that fit its schema."""
    schemas = {
        tool.name: tool.as_openai()["function"]["parameters"] | {"additionalProperties": False}
        for tool in item.tools
    }
    calls = calls_of(_first_turn(address, item, "required"))
    for name, arguments in calls:
        jsonschema.validate(arguments, schemas[name])
    return bool(calls)


def _first_turn(address: str, item: tool_data.ToolQuestion, tool_choice: str) -> dict:
    tools = [tool.as_openai() for tool in item.tools]
    messages = [{"role": "user", "content": item.question}]
    return ask(address, messages, tools=tools, tool_choice=tool_choice, temperature=0)


def answers_from_the_result(address: str, item: tool_data.ToolQuestion) -> bool:
    function = {"name": item.name, "arguments": json.dumps(item.arguments)}
    call = {"id": "1", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": item.question},
        {
            "role": "assistant",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "1", "content": item.result},
    ]
    tools = [tool.as_openai() for tool in item.tools]
    choice = ask(address, messages, tools=tools, temperature=0)
    return choice["message"]["content"] == item.reply


def answers_without_a_tool(address: str, exchange: data.Exchange, tools: list) -> bool:
    messages = [{"role": "user", "content": exchange.question}]
    fields = {"tools": [tool.as_openai() for tool in tools], "temperature": 0}
    return not ask(address, messages, **fields)["message"].get("tool_calls")


def is_clean(text: str) -> bool:
    """Sentences of the generator's vocabulary: no broken character, no word out of nowhere."""
    if not text or re.search(r"[^\w\s.,:;!?'\"(){}\[\]+*=<>/|。，！？“”-]", text):
        return False
    return all(word in known_words() for word in re.findall(r"[^\W\d_]+", text))


def known_words() -> set[str]:
    if not _WORDS:
        for index in range(4000):
            text = "".join(text for text, _ in documents.training_document(Random(index), 200))
            _WORDS.update(re.findall(r"[^\W\d_]+", text))
    return _WORDS


_WORDS: set[str] = set()


def opens_cleanly(address: str, opening: str) -> bool:
    """With the server's own sampling defaults, from generation_config.json."""
    choice = ask(address, [{"role": "user", "content": opening}], seed=0, max_tokens=400)
    known_words().update(re.findall(r"[^\W\d_]+", opening))
    return choice["finish_reason"] == "stop" and is_clean(choice["message"]["content"])


def tasks(num_samples: int) -> dict[str, tuple[list, Callable]]:
    """For each row of the table its items and what an item must pass."""

    def questions(name: str, invented: float = 0.0) -> list[tool_data.ToolQuestion]:
        return [
            tool_data.tool_question(Random(f"{name} {index}"), 2, invented, held_out=True)
            for index in range(num_samples)
        ]

    known, invented = questions("held out"), questions("invented", 1.0)
    plain = [
        (documents.plain_exchange(rng), tool_data.tool_question(rng).tools)
        for rng in (Random(f"plain {index}") for index in range(num_samples))
    ]
    return {
        "right call, auto": (known, lambda a, i: calls_the_right_tool(a, i, "auto")),
        "right call, required": (known, lambda a, i: calls_the_right_tool(a, i, "required")),
        "valid call, required": (known + invented, calls_validly),
        "right call, auto, invented words": (
            invented,
            lambda a, i: calls_the_right_tool(a, i, "auto"),
        ),
        "reply from the tool's result": (known, answers_from_the_result),
        "no call where no tool fits": (plain, lambda a, i: answers_without_a_tool(a, *i)),
        "clean answer to a short opening": (OPENINGS, opens_cleanly),
    }


def evaluate(model: Path, num_samples: int, show_wrong: bool) -> dict[str, float]:
    result = {}
    known_words()  # before threads use it
    with server(model) as address, ThreadPoolExecutor(NUM_THREADS) as threads:
        for name, (items, check) in tasks(num_samples).items():
            right = list(threads.map(lambda item, check=check: check(address, item), items))
            result[name] = sum(right) / len(items)
            print(f"{name:45s} {len(items):5d} {result[name]:7.1%}", flush=True)
            wrong = [item for item, is_right in zip(items, right) if not is_right]
            for item in wrong[:10] if show_wrong else []:
                print(f"    {item}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--num-samples", type=int, default=200)
    parser.add_argument("--show-wrong", action="store_true")
    parser.add_argument("--json", type=Path, default=HERE / "chat_accuracy.json")
    arguments = parser.parse_args()
    table = evaluate(arguments.model, arguments.num_samples, arguments.show_wrong)
    content = {"num_samples": arguments.num_samples, "accuracy": table}
    arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
