"""Without the native library, and without a compiler to build it: installation succeeds, a warning
says so, and torch's kernels run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib

import pytest
from quire.kernels.cpu.native.library import Library, _load
from quire.tests.kernels.native.compiled import ROOT

GENERATE = """
from quire import LLM, SamplingParams
with LLM(engine="inproc", num_threads=1) as llm:
    params = SamplingParams(temperature=0, max_tokens=3)
    [output] = llm.generate("Once upon a time", params, use_tqdm=False)
    print("tokens", len(output.outputs[0].token_ids))
from quire.kernels import registry
names = {op: [i.name for i in registry.implementations(op)] for op in registry.CONTRACTS}
print("native", [op for op in names if "native" in names[op]])
"""


def test_an_installation_without_a_compiler_succeeds_with_a_warning(tmp_path):
    """The step of `pip install` that compiles, in a copy of the files it needs."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "__init__.py"):
        shutil.copy(ROOT / name, tmp_path)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package in settings["packages"][1:]:
        (tmp_path / package.removeprefix("quire.").replace(".", "/")).mkdir(
            parents=True, exist_ok=True
        )
    shutil.copytree(ROOT / "kernels/cpu/native/src", tmp_path / "kernels/cpu/native/src")
    command = [sys.executable, "setup.py", "build_ext"]
    environment = {**os.environ, "CC": "false", "CXX": "false"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (
        'building extension "quire.kernels.cpu.native._native" failed' in done.stdout + done.stderr
    )
    assert not list(tmp_path.rglob("*.so"))


def test_the_list_of_sources_is_complete():
    [extension] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "ext-modules"
    ]
    assert sorted(extension["sources"]) == sorted(
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "kernels/cpu/native/src").glob("*.cpp")
    )


def test_torch_runs_without_the_library():
    environment = {**os.environ, "QUIRE_NATIVE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", GENERATE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tokens 3" in done.stdout and "native []" in done.stdout


def test_a_damaged_or_old_library_causes_a_warning(tmp_path, caplog):
    damaged = tmp_path / "_native.so"
    damaged.write_bytes(b"no library")
    assert _load(str(damaged)) is None
    assert "native CPU kernels cannot be loaded, torch's kernels run" in caplog.text
    with pytest.raises(OSError):
        Library(damaged)
    assert _load("0") is None
