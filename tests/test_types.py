"""pyright (basic) finds no error in the package, and sees the arguments of LLM, AsyncLLM and
EngineArgs.
"""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDERS = ("core", "executor", "frontend", "ipc", "kernels")
ROOT = Path(__file__).resolve().parent.parent


# a user's lines, and whether a type checker refuses them
LINES = {
    'LLM("m", engine="inproc", max_num_seqs=3, dtype="float32")': False,
    'LLM(model="m", tokenizer=None, hf_overrides={"a": 1})': False,
    'LLM("m", max_num_seqs="3")': True,
    'LLM("m", dtype="int4")': True,
    'LLM("m", max_model_length=3)': True,
    'LLM("m", cores=[1])': True,  # a field of the configuration, but no setting
    'LLM("m", "inproc")': True,
    'EngineArgs("m", seed=1)': False,
    'EngineArgs("m", engine="inproc")': True,
    'EngineArgs("m", "x")': True,
    "EngineArgs().max_num_seqs.no_such_attribute": True,
    'AsyncLLM.from_engine_args(EngineArgs("m"), "inproc")': False,
    'AsyncLLM.from_engine_args(model="m", max_num_seqs=3, engine="inproc")': False,
    'AsyncLLM.from_engine_args(max_num_seqs="3")': True,
    'AsyncLLM.from_engine_args("m")': True,
    "LLM().no_such_attribute": True,
}


def run_pyright(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("pyright")
    if program is None and find_spec("pyright") is None:
        pytest.skip("pyright is not installed: pip install -e '.[test,types]'")
    command = [program] if program else [sys.executable, "-m", "pyright"]
    return subprocess.run(
        [*command, "--level", "error", "--pythonpath", sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.types
@pytest.mark.timeout(600)
def test_pyright_finds_no_error() -> None:
    done = run_pyright(ROOT, *FOLDERS)
    assert done.returncode == 0, done.stdout[-20_000:]


@pytest.mark.types
@pytest.mark.timeout(600)
def test_pyright_sees_the_arguments_of_an_engine(tmp_path: Path) -> None:
    (tmp_path / "quire").symlink_to(ROOT)
    text = "\n".join(["from quire import LLM, AsyncLLM, EngineArgs", *LINES])
    (tmp_path / "program.py").write_text(text)
    report = json.loads(run_pyright(tmp_path, "--outputjson", "program.py").stdout)
    refused = {one["range"]["start"]["line"] for one in report["generalDiagnostics"]}
    assert {line: i in refused for i, line in enumerate(LINES, start=1)} == LINES
