"""What is prepared for a release and not published: the workflow, and recipes for package managers.
`pytest -m clients -k release` checks them against published schemas.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from quire.tests.test_packaging import READ_BUILD, run

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / ".ci/recipes"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
CONDA_NAMES = {"torch": "pytorch", "prometheus-client": "prometheus_client"}
CONDA_NAMES |= {"prompt_toolkit": "prompt-toolkit"}


def fill(recipe: str, sdist: Path) -> str:
    words = [RECIPES / "fill", recipe, sdist, "1.2.3", "https://example.org/repository", "someone"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def sdist(tmp_path: Path) -> Path:
    path = tmp_path / "quire_engine-1.2.3.tar.gz"
    path.write_bytes(b"the file")
    return path


@pytest.mark.parametrize("recipe", ["conda-forge.yaml", "homebrew.rb", "hub_local_app.ts"])
def test_a_recipe_is_filled_in(recipe: str, sdist: Path) -> None:
    text = fill(recipe, sdist)
    code = [line for line in text.splitlines() if not line.startswith(("#", "//"))]
    assert not re.findall(r"@[A-Z0-9]+@", text) and "https://example.org/repository" in text
    if not recipe.startswith("hub"):
        address = "https://example.org/repository/releases/download/v1.2.3/" + sdist.name
        assert sum(f'"{address}"' in line for line in code) == 1
        assert hashlib.sha256(b"the file").hexdigest() in text


def test_the_conda_recipe_has_the_dependencies_of_the_wheel(sdist: Path) -> None:
    recipe = yaml.safe_load(fill("conda-forge.yaml", sdist))
    needed = {f"python {PROJECT['requires-python']}"}
    for text in PROJECT["dependencies"]:
        requirement = Requirement(text)
        if requirement.name == "triton":  # pytorch's builds for CUDA depend on it
            continue
        name = CONDA_NAMES.get(requirement.name, requirement.name)
        versions = sorted(map(str, requirement.specifier), reverse=True)  # >= first
        needed.add(f"{name} {','.join(versions)}".strip())
    assert set(recipe["requirements"]["run"]) == needed
    assert recipe["about"]["license"] == PROJECT["license"]


def test_the_workflow_builds_wheels_for_linux_and_for_macos_on_arm() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    systems = workflow["jobs"]["wheels"]["strategy"]["matrix"]["system"]
    assert systems == ["ubuntu-24.04", "ubuntu-24.04-arm", "macos-14"]  # the last one is on Arm
    settings = SETTINGS["tool"]["cibuildwheel"]
    assert settings["linux"]["archs"] == ["x86_64", "aarch64"]
    assert settings["macos"]["archs"] == ["arm64"]
    # cibuildwheel sets the first one on Arm, where macOS 11 is the oldest
    environment = {"_PYTHON_HOST_PLATFORM": "macosx-11.0-arm64", **settings["macos"]["environment"]}
    built = run(sys.executable, "-c", READ_BUILD, cwd=ROOT, **environment)
    assert "py3 none macosx_14_0_arm64" in built.splitlines()


def test_only_the_jobs_that_sign_have_an_identity() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    can = {name: sorted(job.get("permissions", {}).items()) for name, job in jobs.items()}
    assert {name for name, granted in can.items() if ("id-token", "write") in granted} == {
        "sign",
        "publish",
    }
    assert can["publish"] == [("id-token", "write")] and jobs["publish"]["environment"] == "pypi"
    assert jobs["publish"]["needs"] == "sign" and set(jobs["sign"]["needs"]) == {"wheels", "sdist"}
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    scripts = [word for text in commands for word in text.split() if word.startswith(".ci/")]
    assert scripts == [".ci/write_sbom"] and all(os.access(ROOT / one, os.X_OK) for one in scripts)


def test_actions_are_pinned_by_their_hash() -> None:
    """A tag may be moved to other code; the release runs with a token that publishes."""
    others = set()
    for path in (ROOT / ".github/workflows").iterdir():
        for line in path.read_text().splitlines():
            if (match := re.search(r"\buses: (.*)", line)) is not None:
                if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", match[1]):
                    others.add(match[1])
    assert others == {"pypa/gh-action-pypi-publish@release/v1"}
