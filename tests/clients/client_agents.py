"""Coding agents, as `quire launch` starts them: one turn in which the agent runs the tool that the
scripted model calls, and sends the result. Almost all of the second request is in the prefix cache.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from checks import run
from scripted_model import DONE, scripted

REQUIREMENTS = {
    "claude": "npm:@anthropic-ai/claude-code",
    "codex": "npm:@openai/codex",
    "opencode": "npm:opencode-ai",
    "continue": "npm:@continuedev/cli",
    "aider": "aider-chat",
    "llm": "llm",
}
FLAGS = (
    "--hf-overrides",
    '{"max_position_embeddings": 65536}',
    "--max-model-len",
    "65536",
    "--kv-cache-memory-bytes",
    "1GiB",
    "--logits-processors",
    "quire.tests.clients.scripted_model:follow_the_script",
)
USES_QUIRE = True
NAME = Path(sys.prefix).name  # of the environment, and of the agent
MADE = "made.txt"
TEXT = "written by the model"
MOST_COMPUTED = 0.1  # of the prompt of the second request
ASK = "Please do it, then say that it is done. "


def call(tool: str, **arguments: str) -> str:
    called = json.dumps({"name": tool, "arguments": arguments})
    return ASK + scripted(f"<tool_call>\n{called}\n</tool_call>")


@dataclass
class Turn:
    """`arguments` of the agent, `said` to its standard input."""

    arguments: list[str]
    said: str = ""
    ends_with: str = DONE


def claude(file: Path) -> Turn:
    asked = call("Write", file_path=str(file), content=TEXT)
    return Turn(["-p", asked, "--permission-mode", "acceptEdits"])


def codex(file: Path) -> Turn:
    asked = call("exec_command", cmd=f"printf '{TEXT}' > {file}")
    return Turn(["exec", "--skip-git-repo-check", "-s", "danger-full-access", asked])


def opencode(file: Path) -> Turn:
    return Turn(["run", call("write", filePath=str(file), content=TEXT)])


def continue_(file: Path) -> Turn:
    return Turn(["-p", "--auto", call("Write", filepath=str(file), content=TEXT)])


def llm(file: Path) -> Turn:
    function = "def write(path: str, content: str) -> str:\n    open(path, 'w').write(content)"
    arguments = ["--functions", f"{function}\n    return 'ok'", "-s", "Use the tools. " * 100]
    return Turn([*arguments, call("write", path=str(file), content=TEXT)])


def aider(file: Path) -> Turn:
    """Aider calls no tools: it reads edits from the text. What it repeats behind the conversation
    in every request has a fixed size.
    """
    long = file.with_name("long.txt")
    long.write_text("".join(f"Line {i} of a file that is only read.\n" for i in range(1200)))
    block = f"{file.name}\n```\n<<<<<<< SEARCH\n=======\n{TEXT}\n>>>>>>> REPLACE\n```\n"
    said = [ASK + scripted(block), "Was that all? " + scripted(DONE), "/exit"]
    cache = Path(os.environ["HOME"]) / ".aider" / "caches"
    cache.mkdir(parents=True)  # else it asks another server for prices
    (cache / "model_prices_and_context_window.json").write_text('{"none": {}}')
    options = ["--yes-always", "--no-git", "--no-fancy-input", "--no-pretty", "--edit-format"]
    return Turn([*options, "diff", "--read", long.name], "\n".join([*said, ""]))


TURNS: dict[str, Callable[[Path], Turn]] = {
    "claude": claude,
    "codex": codex,
    "opencode": opencode,
    "continue": continue_,
    "llm": llm,
    "aider": aider,
}


def finished_requests(address: str) -> list[dict]:
    with urllib.request.urlopen(f"{address}/v1/requests", timeout=30) as answer:
        return json.load(answer)["data"]


def check_a_turn_with_a_tool_call(address: str, _: str) -> None:
    before = {request["id"] for request in finished_requests(address)}
    with tempfile.TemporaryDirectory() as folder:
        home, work = Path(folder) / "home", Path(folder) / "work"
        home.mkdir()
        work.mkdir()
        subprocess.run(["git", "init", "--quiet", work], check=True)  # a project, to opencode
        os.environ |= {"PWD": str(work), "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
        programs = [
            str(Path(sys.prefix) / "node_modules" / ".bin"),
            str(Path(sys.executable).parent),
        ]
        os.environ["PATH"] = os.pathsep.join([*programs, os.environ["PATH"]])
        turn = TURNS[NAME](work / MADE)
        command = [sys.executable, "-m", "quire", "launch", NAME, "--url", address, "--"]
        done = subprocess.run(
            [*command, *turn.arguments],
            cwd=work,
            input=turn.said,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        told = f"{done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == 0 and turn.ends_with in done.stdout, told
        assert (work / MADE).read_text().strip() == TEXT, told
    new = [request for request in finished_requests(address) if request["id"] not in before]
    assert len(new) >= 2, new
    last = max(new, key=lambda request: request["prompt_tokens"])
    computed = last["prompt_tokens"] - last["cached_tokens"]
    assert computed <= MOST_COMPUTED * last["prompt_tokens"], new


def installed_version() -> str:
    package = REQUIREMENTS[NAME].removeprefix("npm:")
    if package == REQUIREMENTS[NAME]:
        return version(package)
    about = Path(sys.prefix) / "node_modules" / package / "package.json"
    return json.loads(about.read_text())["version"]


if __name__ == "__main__":
    run(globals(), NAME, installed_version())
