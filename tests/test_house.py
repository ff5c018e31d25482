"""The rules of the repository as tests: import directions, sizes, docstrings, tests of
every folder, packaging, forbidden calls.
"""

import ast
import gc
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import clang_format
import pytest
from quire.tests import import_graph, setters
from quire.tests.frontend.cli.command import interrupts_ignored
from quire.tests.syntax import nodes_of, tree_of

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("frontend", "core", "executor", "kernels", "ipc")
SKIPPED = {"build", "dist", "__pycache__", "venv", "node_modules"}  # also every hidden folder

# files are cut by responsibility: Python has no cap, C++ one that keeps compiling in parallel
MAX_NATIVE_FILE_LINES, MAX_FUNCTION_LINES, MAX_TEST_LINES = 500, 60, 125
TRITON = "kernels/triton/"  # a kernel is one function
# the most arrows between the rooms of a folder that run up, see import_graph.py
MAX_ARROWS_UP = {"frontend": 4, "core": 2, "executor": 8, "kernels": 0, "ipc": 1}
# a request and the requests of one message know each other
MAY_BE_CIRCLES = [["core/forks.py", "core/request.py"]]

# Folder -> folders of quire that it may import. Each exception names one file, which may import
# lazily (inside a function).
MAY_IMPORT = {
    "": {"frontend", "ipc"},  # __init__ and __main__
    "frontend": {"frontend", "ipc"},
    "core": {"core", "ipc"},
    "executor": {"executor", "kernels", "ipc"},
    "kernels": {"kernels", "ipc"},
    "ipc": {"ipc"},
}
LAZILY = {
    "__init__.py": "core",
    "frontend/clients/inproc_client.py": "core",
    "core/engine_core.py": "executor",
    "core/early_start.py": "executor",
    "core/executor_import.py": "executor",
}

# Third-party modules that a folder must not import. For ipc there is a whitelist instead.
TENSORS = {"torch", "triton", "transformers", "safetensors"}
TEXT = {"tokenizers", "jinja2", "transformers"}
MUST_NOT_IMPORT = {
    "": TENSORS | TEXT,
    "frontend": TENSORS | {"zmq"},
    "core": TENSORS | TEXT | {"numpy"},
    "executor": TEXT | {"zmq"},
    "kernels": TEXT | {"zmq", "msgspec"},
}
# only executor/sampling/grammar*.py may import it; no other part of the engine handles text
GRAMMARS = "llguidance"
# models that run in transformers' code; no other part of the engine knows it
TRANSFORMERS = "executor/models/fallback/"
HTTP = {"starlette", "uvicorn", "prometheus_client"}  # only under frontend/server/
IPC_WHITELIST = {"msgspec", "zmq", "psutil"}
SOCKETS_ALLOWED = {
    "frontend/clients/mp_client.py",
    "core/engine_proc.py",
    "executor/offload/peers.py",
    "executor/ranks/network.py",
}


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """The syntax trees of all files are kept for this module. Meanwhile no garbage is collected: a
    collection would visit them.
    """
    gc.disable()
    yield
    for function in (tree_of, nodes_of, file_graph):
        function.cache_clear()
    gc.enable()


def sources(*folders: str) -> list[Path]:
    """Return the Python files below these folders of the repository, without third-party ones."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(
        path
        for path in found
        if not any(part in SKIPPED or part.startswith(".") for part in path.relative_to(ROOT).parts)
    )


PACKAGE = [*sorted(ROOT.glob("*.py")), *sources(*FOLDERS)]
EVERYTHING = PACKAGE + sources("tests")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def file_graph() -> import_graph.Graph:
    return import_graph.file_graph()


def problems_by_file(files: list[Path], find: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    """What `find` returns for each file where it finds something. One test covers all files, since
    pytest takes longer for a test than a rule for a file.
    """
    found = {name_of(path): find(path) for path in files}
    return {name: problems for name, problems in found.items() if problems}


def imports(tree: ast.Module, name: str) -> Iterator[tuple[str, bool, int]]:
    """Yield (absolute dotted name, inside a function?, line) of every import in the module at
    `name`. Relative imports are resolved.
    """
    package = ["quire", *Path(name).parts[:-1]]

    def walk(node: ast.AST, lazy: bool) -> Iterator[tuple[str, bool, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, lazy, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = [*package[: len(package) + 1 - child.level]] if child.level else []
                base += child.module.split(".") if child.module else []
                yield from (
                    (".".join([*base, alias.name]), lazy, child.lineno) for alias in child.names
                )
            else:
                functions = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda
                is_for_types = isinstance(child, ast.If) and (
                    isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING"
                )
                yield from walk(child, lazy or is_for_types or isinstance(child, functions))

    return walk(tree, False)


def folder_of(name: str) -> str:
    return name.split("/")[0] if "/" in name else ""


def layering_problems(tree: ast.Module, name: str) -> list[str]:
    folder, problems = folder_of(name), []
    for dotted, lazy, line in imports(tree, name):
        top, *rest = dotted.split(".")
        if top == "quire":
            target = rest[0] if rest and rest[0] in FOLDERS else ""
            allowed = (
                not target or target in MAY_IMPORT[folder] or (lazy and LAZILY.get(name) == target)
            )
        elif folder == "ipc":
            allowed = top in IPC_WHITELIST or top in sys.stdlib_module_names
        else:
            allowed = top not in MUST_NOT_IMPORT[folder] or (
                top == "zmq" and name in SOCKETS_ALLOWED
            )
            allowed = allowed or (top == "transformers" and name.startswith(TRANSFORMERS))
            allowed = allowed and (top != GRAMMARS or name.startswith("executor/sampling/grammar"))
            allowed = allowed and (top not in HTTP or name.startswith("frontend/server/"))
        if not allowed:
            problems.append(f"line {line}: {dotted}")
    return problems


def test_imports_run_one_way() -> None:
    def find(path: Path) -> list[str]:
        return layering_problems(tree_of(path), name_of(path))

    assert problems_by_file(PACKAGE, find) == {}


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("core/scheduling/scheduler.py", "from ...executor import executor"),
        ("core/scheduling/scheduler.py", "import numpy as np"),
        # allowed there, but only inside a function
        ("core/engine_core.py", "from ..executor.executor import Executor"),
        ("frontend/llm.py", "def f():\n    from ..core.engine_core import EngineCore"),
        ("frontend/cli/chat.py", "def f():\n    import torch"),
        ("frontend/llm.py", "import zmq"),
        ("executor/worker.py", "from ..core.scheduler import Scheduler"),
        ("executor/sampling/sampler.py", "import llguidance"),
        ("executor/models/layers.py", "import transformers"),
        ("executor/models/fallback/model.py", "import tokenizers"),
        ("frontend/llm.py", "def f():\n    from llguidance import LLMatcher"),
        ("frontend/async_llm.py", "from starlette.requests import Request"),
        ("frontend/cli/serve.py", "def f():\n    import uvicorn"),
        ("kernels/ops.py", "from quire.executor import worker"),
        ("ipc/codec.py", "import numpy"),
        ("ipc/codec.py", "from ..frontend.client import EngineClient"),
    ],
)
def test_the_layering_rule_fires(name: str, code: str) -> None:
    assert layering_problems(ast.parse(code), name)


def test_exceptions_to_the_layering_are_used() -> None:
    for name, target in LAZILY.items():
        dotted = [dotted for dotted, _, _ in imports(tree_of(ROOT / name), name)]
        assert any(d.startswith(f"quire.{target}.") for d in dotted), (
            f"{name} no longer imports {target}: take it out of LAZILY"
        )


def docstring_problems(path: Path) -> list[str]:
    lines = (ast.get_docstring(tree_of(path)) or "").splitlines()
    if not path.read_text().strip() and path.name == "__init__.py":
        return []
    if not lines or not lines[0].strip():
        return ["a module opens with a docstring"]
    if path not in PACKAGE or path.name == "__init__.py":
        return []
    says = any(line.startswith("Must not know: ") for line in lines)
    return [] if says else [f"no line begins with 'Must not know: ': {lines[:3]}"]


def test_module_docstrings_say_what_they_are() -> None:
    """The docstring has one or two lines on what the module is. In the package it then says what
    the module may not know.
    """
    assert problems_by_file(EVERYTHING, docstring_problems) == {}


def long_functions(path: Path) -> list[str]:
    most = MAX_FUNCTION_LINES if path in PACKAGE else MAX_TEST_LINES
    return [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in nodes_of(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno - node.lineno + 1 > most
    ]


def test_sizes() -> None:
    """Signature and docstring count. ruff checks the complexity (pyproject.toml)."""
    files = [path for path in EVERYTHING if not name_of(path).startswith(TRITON)]
    assert problems_by_file(files, long_functions) == {}


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (docstring_problems, "import os"),
        (docstring_problems, '"""Adds."""'),
        (long_functions, "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES),
    ],
)
def test_the_rules_for_a_file_fire(tmp_path: Path, monkeypatch, rule, code: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    monkeypatch.setitem(globals(), "PACKAGE", [path])
    assert rule(path)


def test_imports_between_rooms_run_down() -> None:
    graph = file_graph()
    for folder, most in MAX_ARROWS_UP.items():
        arrows = import_graph.upward(import_graph.room_graph(graph, folder))
        assert len(arrows) <= most, (folder, arrows)


def test_no_files_import_each_other() -> None:
    """Also not inside functions, or for types alone."""
    assert import_graph.circles(file_graph()) == MAY_BE_CIRCLES


def test_the_graph_finds_arrows_and_circles() -> None:
    graph = {"f/a.py": {"f/b.py"}, "f/b.py": {"f/c.py"}, "f/c.py": {"f/a.py"}, "f/d.py": {"f/a.py"}}
    assert import_graph.circles(graph) == [["f/a.py", "f/b.py", "f/c.py"]]
    assert len(import_graph.upward(import_graph.room_graph(graph, "f"))) == 1


def test_nothing_is_set_on_another_object() -> None:
    """Only the declared fields of records change; see setters.py."""
    assert setters.found() == []


def test_nobody_asks_whether_a_model_has_a_member() -> None:
    """What callers may ask stands in the protocols of executor/model.py."""
    files = sources("executor", "core")
    found = {name_of(p): list(setters.probes(nodes_of(p))) for p in files}
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_the_scans_find_setters_and_probes() -> None:
    bad = "runner.program = 1\nsetattr(model, 'x', 1)\nself.a.b = 2"
    assert len(list(setters.setters(ast.walk(ast.parse(bad)), {"c"}))) == 3
    fine = "self.a = 1\nrequest.num_tokens = 2"
    assert list(setters.setters(ast.walk(ast.parse(fine)), {"num_tokens"})) == []
    for probe in ("getattr(self.model, 'taps', None)", "hasattr(model, 'head')"):
        assert len(list(setters.probes(ast.walk(ast.parse(probe))))) == 1


def test_every_folder_has_its_tests() -> None:
    """The tests of a folder stand in the folder of the same name under tests/. The kernels of all
    devices have one suite.
    """
    folders = {path.parent.relative_to(ROOT) for path in PACKAGE if path.name != "__init__.py"}
    assert [
        folder.as_posix()
        for folder in sorted(folders)
        if folder.parts[:1] != ("kernels",) and not list((ROOT / "tests" / folder).rglob("test_*"))
    ] == []


def forbidden(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the calls and imports that could run code from a wire or a file: pickle and its users,
    eval, exec, torch.load.
    """
    modules = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (
                f"line {node.lineno}: import {a.name}"
                for a in node.names
                if a.name.split(".")[0] in modules
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in modules:
            yield f"line {node.lineno}: from {node.module} import"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            bare = called in {"eval", "exec", "compile", "__import__"}
            if (
                bare
                or called.endswith(("torch.load", ".send_pyobj", ".recv_pyobj"))
                or any(k.arg == "allow_pickle" for k in node.keywords)
            ):
                yield f"line {node.lineno}: {called}"


def test_no_pickle_eval_or_torch_load() -> None:
    assert problems_by_file(PACKAGE, lambda path: list(forbidden(nodes_of(path)))) == {}


def test_the_scan_finds_forbidden_code() -> None:
    for bad in (
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "torch.load(f)",
        "socket.recv_pyobj()",
        "np.load(f, allow_pickle=True)",
    ):
        assert list(forbidden(ast.walk(ast.parse(bad)))), bad


WALL_CLOCK = re.compile(r"\btime\.time(_ns)?\(|\bdatetime\.(now|utcnow)\(")
# Files that need a date: `created` of an answer, the server's start, a template's strftime_now, a
# batch of KV events.
# Durations are differences of time.monotonic() or of an event loop's clock.
READS_THE_DATE = {
    "frontend/requests/input_processor.py",
    "frontend/server/apis/ollama_answer.py",
    "frontend/server/apis/openai_answer.py",
    "frontend/server/apis/responses_answer.py",
    "frontend/server/state.py",
    "frontend/text/template_sandbox.py",
    "ipc/kv_event_publisher.py",
    "ipc/operating_system.py",  # the age of a file
}


def test_the_wall_clock_is_read_for_dates_only() -> None:
    assert {name_of(p) for p in PACKAGE if WALL_CLOCK.search(p.read_text())} == READS_THE_DATE


def iterated_sets(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the lines of loops and comprehensions over a set that is written there."""
    return [
        f"line {node.iter.lineno}"
        for node in nodes
        if isinstance(node, (ast.For, ast.comprehension))
        and isinstance(node.iter, (ast.Set, ast.SetComp))
    ]


def test_random_inputs_are_not_drawn_in_the_order_of_a_set() -> None:
    """A dtype's hash is its address, so with the same seed each process would draw others."""
    files = sources("tests/kernels")
    assert problems_by_file(files, lambda path: iterated_sets(nodes_of(path))) == {}


def test_the_scan_finds_iterated_sets() -> None:
    assert iterated_sets(ast.walk(ast.parse("for x in {a, b}: pass"))) == ["line 1"]
    assert iterated_sets(ast.walk(ast.parse("[x for y in z for x in {f(y) for _ in z}]")))
    assert not iterated_sets(ast.walk(ast.parse("for x in dict.fromkeys((a, b)): c = {d}")))


def test_no_utils() -> None:
    assert [
        name_of(path)
        for path in EVERYTHING
        if path.stem in {"utils", "util", "helpers", "common", "misc"}
    ] == []


def text_files() -> list[Path]:
    suffixes = {".py", ".md", ".toml", ".json", ".jsonl", ".txt", ".sh", ".cfg", ".yml", ""}
    files = (path for path in ROOT.rglob("*") if path.is_file() and path.suffix in suffixes)
    kept = (
        p
        for p in files
        if not any(
            part in SKIPPED or part.endswith(".egg-info") for part in p.relative_to(ROOT).parts
        )
    )
    return [
        p
        for p in kept
        if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)
        or name_of(p).startswith(".ci/")
    ]


def test_no_path_of_a_machine() -> None:
    machine_path = re.compile(r"(?<![\w.$}~-])/(?:root|home|work|Users|opt/wheels)/\w")
    assert machine_path.search("cd /" + "home/somebody")
    found = [
        f"{name_of(p)}: {m.group()}"
        for p in text_files()
        for m in [machine_path.search(p.read_text(errors="replace"))]
        if m
    ]
    assert found == []


def test_packages_are_those_that_exist() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    existing = {
        ".".join(["quire", *path.parent.relative_to(ROOT).parts])
        for path in PACKAGE
        if path.name == "__init__.py"
    }
    with_code = {".".join(["quire", *path.parent.relative_to(ROOT).parts]) for path in PACKAGE}
    assert set(settings["packages"]) == existing == with_code
    data = settings["package-data"]["quire.frontend.bundled_model"]
    bundled = [
        p.name
        for p in (ROOT / "frontend/bundled_model").iterdir()
        if p.is_file() and p.suffix != ".py"
    ]
    assert [
        name for name in bundled if not any(Path(name).match(pattern) for pattern in data)
    ] == []


def test_versions_agree() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f'__version__ = "{version}"' in (ROOT / "__init__.py").read_text()


def test_tests_start_programs_that_an_interrupt_ends() -> None:
    """Also where the shell that runs pytest in the background ignores SIGINT."""
    handler = "import signal; print(signal.getsignal(signal.SIGINT))"
    run = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {handler!r}])"
    with interrupts_ignored():
        plain, of_tests = (
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            ).stdout
            for code in (run, f"import quire.tests.conftest; {run}")
        )
    assert "default_int_handler" not in plain and "default_int_handler" in of_tests


@pytest.mark.parametrize("command", ["check --no-cache", "format --check --no-cache"])
def test_ruff_agrees(command: str) -> None:
    """The rules and the line width are in pyproject.toml."""
    words = [sys.executable, "-m", "ruff", *command.split(), "--quiet", str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_clang_format_agrees() -> None:
    """The style is in .clang-format. clang-format does not wrap comments, so this test also checks
    the line width.
    """
    folders = (ROOT / "kernels/cpu/native/src", ROOT / "tests/kernels/native")
    paths = [p for d in folders for p in sorted(d.iterdir()) if p.suffix in (".h", ".cpp", ".inl")]
    assert len(paths) > 30
    words = [clang_format.get_executable("clang-format"), "--dry-run", "--Werror", *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    for path in paths:
        lines = path.read_text().splitlines()
        assert len(lines) <= MAX_NATIVE_FILE_LINES, name_of(path)
        assert [line for line in lines if len(line) > 100] == [], name_of(path)
