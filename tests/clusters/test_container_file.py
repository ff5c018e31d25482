"""The Dockerfile: it copies files that exist, installs from wheels, and runs what the manifests
expect. No image is built.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from quire.frontend.cli.serve import make_parser
from quire.frontend.server.app import all_routes
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.state import ServerState
from quire.tests.clusters.kustomize import build

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMPILERS = ("gcc", "g++", "build-essential", "clang", "apt-get")
Stage = list[tuple[str, str]]  # (instruction, its arguments)


def read(text: str) -> list[Stage]:
    """The stages of a container file, each from its FROM on. What precedes them is left out."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    stages: list[Stage] = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        instruction, _, arguments = line.partition(" ")
        assert instruction.isupper(), line
        if instruction == "FROM":
            stages.append([])
        if stages:
            stages[-1].append((instruction, " ".join(arguments.split())))
    return stages


def of(stage: Stage, instruction: str) -> list[str]:
    return [arguments for name, arguments in stage if name == instruction]


@pytest.fixture(scope="module")
def stages() -> list[Stage]:
    return read((ROOT / "Dockerfile").read_text())


def context() -> list[str]:
    """The tracked files that .dockerignore lets through."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#"]

    def is_sent(name: str) -> bool:
        sent, paths = True, [name, *map(str, Path(name).parents)]
        for rule in rules:  # the last that matches decides
            pattern = rule.removeprefix("!")
            at_any_depth = pattern.startswith("**/")
            candidates = Path(name).parts if at_any_depth else paths
            if any(fnmatch(one, pattern.removeprefix("**/")) for one in candidates):
                sent = rule.startswith("!")
        return sent

    return [name for name in done.stdout.decode().split("\0") if name and is_sent(name)]


def test_the_context_has_what_a_wheel_is_made_of(stages: list[Stage]) -> None:
    sent = set(context())
    tool = PROJECT["tool"]["setuptools"]
    needed = {"setup.py", "pyproject.toml", PROJECT["project"]["readme"], "LICENSE"}
    for package in tool["packages"]:
        needed.add(str(Path(*package.split(".")[1:]) / "__init__.py"))
    needed |= {source for module in tool["ext-modules"] for source in module["sources"]}
    for package, patterns in tool["package-data"].items():
        folder = ROOT.joinpath(*package.split(".")[1:])
        for pattern in patterns:
            needed |= {str(path.relative_to(ROOT)) for path in folder.glob(pattern)}
    needed = {name for name in needed if (ROOT / name).is_file()}
    assert needed and not needed - sent
    assert not [
        name for name in sent if name.split("/")[0] in ("tests", "docs", ".git", "examples")
    ]
    for arguments in of(stages[0], "COPY"):
        *sources, _ = arguments.split()
        assert sources and all((ROOT / source).exists() for source in sources)


def test_everything_is_installed_from_wheels(stages: list[Stage]) -> None:
    building, final = stages
    [*_, made] = of(building, "RUN")
    own, dependencies = re.findall(r"pip wheel [^&]+", made)
    assert "--no-deps" in own and "--only-binary :all:" in dependencies
    assert "_native.so" in made  # without a compiler the wheel would have no native kernels
    [installed] = of(final, "RUN")
    assert re.findall(r"pip install [^&]+", installed) == [
        "pip install --no-cache-dir --no-index /wheels/*.whl "
    ]
    assert "--mount=type=bind,from=build,source=/wheels" in installed


def test_the_image_has_no_compiler(stages: list[Stage]) -> None:
    building, final = stages
    assert of(final, "FROM") == ["python:${PYTHON}-slim"] and not of(final, "COPY")
    words = " ".join(arguments for _, arguments in final)
    assert not [name for name in COMPILERS if name in words]
    assert any("g++" in arguments for arguments in of(building, "RUN"))
    version = re.search(r"^ARG PYTHON=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    named = {line.split(" :: ")[-1] for line in PROJECT["project"]["classifiers"]}
    assert version is not None and version[1] in named


def test_it_runs_as_the_manifests_expect(stages: list[Stage]) -> None:
    final = stages[-1]
    manifests = build(ROOT / "examples/kubernetes/base")
    [deployment] = [one for one in manifests if one["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    user = pod["securityContext"]["runAsUser"]
    assert of(final, "USER") == [f"{user}:{pod['securityContext']['runAsGroup']}"]
    assert f"useradd --uid {user}" in of(final, "RUN")[0]
    assert of(final, "EXPOSE") == [str(container["ports"][0]["containerPort"])]
    assert of(final, "ENTRYPOINT") == ['["quire"]'] and of(final, "STOPSIGNAL") == ["SIGTERM"]
    [command] = [json.loads(arguments) for arguments in of(final, "CMD")]
    assert make_parser([]).parse(command[1:]).host == "0.0.0.0"
    [check] = of(final, "HEALTHCHECK")
    code = json.loads(check[check.index("[") :])[-1]
    compile(code, "HEALTHCHECK", "exec")
    [path] = re.findall(r"http://localhost:8000(/[\w/]+)", code)
    assert path in {route.path for route in all_routes(ServerState(ServerConfig(), "model"))}
