"""A tool loop over OpenAI's API: the model calls tools until it answers.

It talks plain HTTP, so that it needs no client library; OpenAI's client sends and receives the
same. The model decides when to call (`tool_choice="auto"`); the last turn may not call (`"none"`).
With `"required"` a turn is held to a call whose arguments follow the tool's schema.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "minimum": 0, "maximum": 99},
                    "b": {"type": "integer", "minimum": 0, "maximum": 99},
                },
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
]
FUNCTIONS = {"add": lambda a, b: a + b}
MAX_TURNS = 3


def post(address: str, body: dict) -> dict:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def run_tools(address: str, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    for turn in range(MAX_TURNS):
        choice = "none" if turn == MAX_TURNS - 1 else "auto"
        body = {"messages": messages, "tools": TOOLS, "tool_choice": choice}
        answer = post(address, body | {"temperature": 0, "max_tokens": 96})
        message = answer["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return message["content"]
        for call in message["tool_calls"]:
            function = call["function"]
            result = FUNCTIONS[function["name"]](**json.loads(function["arguments"]))
            print(f"{function['name']}({function['arguments']}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
    raise RuntimeError("the last turn may not call a tool")


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--port", str(port), "--no-access-log"]
    server = subprocess.Popen([sys.executable, "-m", "quire", "serve", *options])
    address = f"http://127.0.0.1:{port}"
    try:
        while not is_ready(address):
            if server.poll() is not None:
                raise SystemExit(f"the server ended with exit code {server.returncode}")
            time.sleep(0.2)
        print("answer:", run_tools(address, "What is 12 plus 30?"))
    finally:
        server.terminate()
        server.wait(timeout=60)


def is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health/ready"):
            return True
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    main()
