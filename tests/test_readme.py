"""The README is true: its blocks run, its names exist, its commands are those of .ci/run."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks() -> list[tuple[str, str]]:
    """(language, code) of the blocks to run; a comment in the line above says why one is not."""
    found, last = [], ""
    language, code = None, []
    for line in README.splitlines():
        if language is None and (match := re.fullmatch(r"```(\w+)", line)):
            language, code = match[1], []
        elif language is None and line == "```":
            language, code = "picture", []
        elif language is not None and line == "```":
            if language in ("bash", "python") and not last.startswith(
                "<!-- not run by tests/test_readme.py: "
            ):
                found.append((language, "\n".join(code)))
            language = None
        elif language is not None:
            code.append(line)
        else:
            last = line
    return found


def definitions() -> set[str]:
    """Every class, function and `Class.method` of the package."""
    names: set[str] = set()
    for folder in ("frontend", "core", "executor", "kernels", "ipc"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    names.add(node.name)
                if isinstance(node, ast.ClassDef):
                    names |= {
                        f"{node.name}.{item.name}"
                        for item in node.body
                        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))
                    }
    return names


@pytest.mark.timeout(320)  # a block starts several engines; seconds each on a quiet machine
@pytest.mark.parametrize(
    "index", range(len(blocks())), ids=lambda index: f"{index}-{blocks()[index][0]}"
)
def test_blocks_run(index: int, tmp_path: Path) -> None:
    language, code = blocks()[index]
    command = (
        ["bash", "-euo", "pipefail", "-c", code]
        if language == "bash"
        else [sys.executable, "-c", code]
    )
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "Traceback" not in done.stderr


def test_there_are_blocks_of_both_kinds() -> None:
    assert {language for language, _ in blocks()} == {"bash", "python"} and len(blocks()) >= 4


def test_names_in_the_life_of_a_request_exist() -> None:
    life = README.split("## The life of a request")[1].split("\n## ")[0]
    named = re.findall(r"`([A-Za-z_][\w.]*)`", life)
    assert len(re.findall(r"^\d\. ", life, re.MULTILINE)) == 8 and len(named) >= 20
    assert sorted(set(named) - definitions()) == []


def test_files_named_in_the_readme_exist() -> None:
    paths = re.findall(r"`((?:[\w.]+/)+[\w.]*|[A-Z]+\.md)`", README)
    assert len(paths) > 8 and [path for path in paths if not (ROOT / path).exists()] == []


def test_ci_runs_the_commands_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for command in ("pip install", "-e '.[test]'", 'quire generate "Once upon a time"', "pytest"):
        assert command in script and command in README
