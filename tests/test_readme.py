"""README and docs/: code blocks run, and the names, files and links in them exist."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from quire.__main__ import COMMANDS, main
from quire.frontend.arguments import other_engines, vllm_arguments

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
REFERENCE = ["README.md", *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/*.md"))]
PAGES = [*REFERENCE, "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
PAGES += ["examples/README.md", "tests/gpu/README.md"]
NOT_RUN = "<!-- not run by tests/test_readme.py: "
FILE = re.compile(r"<!-- file: (\S+) -->")


def read_blocks(page: str) -> list[tuple[str, str, str]]:
    """Return (language, the line above, code) of every fenced block of a page."""
    found, last = [], ""
    language, code = None, []
    for line in (ROOT / page).read_text().splitlines():
        if language is None and (match := re.fullmatch(r"```(\w*)", line)):
            language, code = match[1], []
        elif language is not None and line == "```":
            found.append((language, last, "\n".join(code)))
            language = None
        elif language is not None:
            code.append(line)
        elif line.strip():
            last = line
    return found


# Of other pages with `pytest -m slow tests/test_readme.py`.
RUN_EACH_TIME = {
    *("README.md", "docs/python.md", "docs/structured-output-and-tools.md"),
}


def blocks_to_run() -> list[tuple[str, int, str, str]]:
    """Return (page, index, language, code) of the blocks to run. A comment above a block says why
    it is not run.
    """
    return [
        (page, index, language, code)
        for page in REFERENCE
        for index, (language, above, code) in enumerate(read_blocks(page))
        if language in ("bash", "python")
        and not above.startswith(NOT_RUN)
        and not FILE.match(above)
    ]


def definitions() -> set[str]:
    """Return every class, function and `Class.method` of the package."""
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


def run_block(page: str, language: str, code: str, folder: Path) -> subprocess.CompletedProcess:
    """The folder has the files that the page shows under `<!-- file: NAME -->`."""
    for _, above, text in read_blocks(page):
        if match := FILE.match(above):
            (folder / match[1]).parent.mkdir(parents=True, exist_ok=True)
            (folder / match[1]).write_text(text + "\n")
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
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[subprocess.CompletedProcess]]]:
    """The selected blocks by their place, two at a time: each mostly waits for one process."""
    with ThreadPoolExecutor(2) as pool:
        futures = {}
        for item in request.session.items:
            if isinstance(item, pytest.Function) and item.function is test_blocks_run:
                place, page, language, code = (
                    item.callspec.params[name] for name in ("place", "page", "language", "code")
                )
                folder = tmp_path_factory.mktemp("block")
                futures[place] = pool.submit(run_block, page, language, code, folder)
        yield futures
        pool.shutdown(wait=False, cancel_futures=True)


@pytest.mark.timeout(320)  # a block starts several engines, each of which takes seconds
@pytest.mark.parametrize(
    ("place", "page", "language", "code"),
    [
        pytest.param(
            *(f"{page}-{i}", page, *rest),
            id=f"{page}-{i}",
            marks=[] if page in RUN_EACH_TIME else pytest.mark.slow,
        )
        for page, i, *rest in blocks_to_run()
    ],
)
def test_blocks_run(runs, place: str, page: str, language: str, code: str) -> None:
    done = runs[place].result()
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "Traceback" not in done.stderr


def test_python_and_shell_blocks_exist() -> None:
    in_readme = [language for page, _, language, _ in blocks_to_run() if page == "README.md"]
    assert set(in_readme) == {"bash", "python"} and len(in_readme) >= 2


def test_names_in_the_life_of_a_request_exist() -> None:
    life = README.split("## The life of a request")[1].split("\n## ")[0]
    named = re.findall(r"`([A-Za-z_][\w.]*)`", life)
    assert len(re.findall(r"^\d\. ", life, re.MULTILINE)) == 8 and len(named) >= 20
    assert sorted(set(named) - definitions()) == []


@pytest.mark.parametrize("page", PAGES)
def test_files_named_on_a_page_exist(page: str) -> None:
    """Paths in back quotes (relative to the root, * and folders included) and links."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    folders = "frontend|core|executor|kernels|ipc|tests|docs|examples"
    paths = re.findall(rf"`((?:{folders})/[\w./*-]*|[A-Z]+\.md)`", text)
    assert [path for path in paths if not list(ROOT.glob(path.rstrip("/")))] == []
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text)
    local = [a or b for a, b in links if not (a or b).startswith(("http", "#", "mailto:"))]
    base = (ROOT / page).parent
    assert [link for link in local if not (base / link.split("#")[0]).exists()] == []
    for link in local:
        target, _, anchor = link.partition("#")
        if anchor:
            titles = re.findall(r"^#+ (.*)$", (base / target).read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}
            assert anchor in anchors, link


FOREIGN = {"--only", "--out", "--write", "--dist"}  # of scripts in tests/, pytest-xdist
FOREIGN |= {"--engine-args", "--kv-events-port", "--migration-limit"}  # of examples/dynamo, Dynamo


def test_options_named_on_a_page_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Flags of a `quire` command, in back quotes."""
    benches = ("serve", "throughput", "latency", "cpu")
    for words in [[name] for name in (*COMMANDS, "help")] + [["bench", name] for name in benches]:
        with contextlib.suppress(SystemExit):
            main([*words, "--help-all"])
    known = set(re.findall(r"--[a-z][\w-]+", capsys.readouterr().out))
    assert len(known) > 100
    known |= {f"--{name.replace('_', '-')}" for name in vllm_arguments.NAMES}  # not in the help
    known.add("--version")  # of `quire` itself
    known |= other_engines.FLAGS.keys()  # what to use instead is said
    for page in REFERENCE:
        text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
        code = " ".join(re.findall(r"`([^`]+)`", text))
        named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", code)) - FOREIGN
        assert sorted(named - known) == [], page


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_at_most_100_columns(page: str) -> None:
    """Table rows and lines with a link are exempt, since they cannot be wrapped."""
    lines = (ROOT / page).read_text().splitlines()
    too_long = [line for line in lines if len(line) > 100 and not line.startswith(("|", "<"))]
    assert [line for line in too_long if "](http" not in line] == []


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200


def test_every_page_of_the_docs_is_in_the_readme() -> None:
    assert [page for page in REFERENCE[1:] if f"({page})" not in README] == []


def test_texts_of_errors_that_are_explained_exist() -> None:
    """Each text of docs/troubleshooting.md is one that Quire, or Python, writes."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)
    assert len(rows) >= 20
    folders = ("frontend", "core", "executor", "kernels", "ipc")
    sources = [*ROOT.glob("*.py"), *(p for f in folders for p in (ROOT / f).rglob("*.py"))]
    code = "".join(path.read_text() for path in sources)
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # a text in several pieces
    assert [row for row in rows if row not in code] == ["No module named 'torch'"]


def test_ci_runs_the_commands_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for command in (
        "pip install",
        "-e '.[test]'",
        'quire generate "Once upon a time"',
        "pytest -n 2",
    ):
        assert command in script and command in README
    assert ".ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
