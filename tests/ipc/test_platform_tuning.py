"""One switch turns off what is asked of the collector, the scheduler and the memory of the system,
and no other module asks for any of it.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# what only ipc/platform_tuning.py may call
CALLS = {"disable", "enable", "freeze", "set_threshold", "sched_setscheduler", "madvise"}
CALLS |= {"malloc_trim"}
ALLOWED = {
    # a server's start may fail, and `devices.release_memory` keeps what is frozen so
    ("frontend/cli/serve.py", "enable"),
    ("frontend/server/serving.py", "enable"),
    ("executor/device.py", "freeze"),
    # pages that no weight uses
    ("kernels/cpu/native/weights.py", "madvise"),
}

REPORT = """
import gc, os, sys
from quire.ipc import platform_tuning
from quire.ipc.early_engine import early_engine, take_early_engine
platform_tuning.begin_start()
started = gc.isenabled()
platform_tuning.end_start()
platform_tuning.prepare_for_streams()
with early_engine("process", {}):
    early = take_early_engine()
if early is not None:
    early.shutdown_timeout_s = 0.0
    early.close()
policy = os.sched_getscheduler(0) if hasattr(os, "SCHED_BATCH") else 0
print(started, gc.isenabled(), gc.get_freeze_count() > 0, early is not None, policy)
"""


def report(monkeypatch: pytest.MonkeyPatch, switch: str) -> str:
    monkeypatch.setenv("QUIRE_PLATFORM_TUNING", switch)
    command = [sys.executable, "-P", "-c", REPORT]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="scheduling classes are Linux's")
def test_one_switch_turns_everything_off(monkeypatch):
    assert report(monkeypatch, "1") == "False True True True 3"  # SCHED_BATCH
    assert report(monkeypatch, "0") == "True True False False 0"


def test_memory_is_not_asked_for_early_where_it_is_turned_off(monkeypatch):
    monkeypatch.setenv("QUIRE_PLATFORM_TUNING", "0")
    report = """
from quire.executor.weights import early_memory
from quire.frontend.engine_args import EngineArgs
print(early_memory.begin(EngineArgs().create_engine_config()), early_memory.take())
"""
    command = [sys.executable, "-P", "-c", report]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "None"]


def test_no_other_module_asks_the_system():
    found = set()
    for folder in ("core", "executor", "frontend", "ipc", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and node.attr in CALLS:
                    owner = ast.unparse(node.value)
                    if node.attr in ("disable", "enable", "freeze") and owner != "gc":
                        continue
                    found.add((name, node.attr))
    found -= {(name, call) for name, call in found if name == "ipc/platform_tuning.py"}
    assert found == ALLOWED
