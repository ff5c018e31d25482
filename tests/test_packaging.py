"""The package as users get it: metadata, sdist, wheel, an installation in a new environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from quire.frontend.diagnosis.machine import DISTRIBUTION
from quire.tests.test_readme import FILE, read_blocks

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

READ_BUILD = """
import runpy, setuptools

def show(**arguments):
    build = setuptools.Distribution({"script_name": "elsewhere", **arguments})
    build.parse_config_files()
    names = "bdist_wheel", "build_ext", "build_py"
    wheel, library, modules = map(build.get_command_obj, names)
    wheel.ensure_finalized()
    library.ensure_finalized()
    modules.ensure_finalized()
    print(*wheel.get_tag())
    print(library.get_ext_filename("quire.kernels.cpu.native._native"))
    print(*[module for _, module, _ in modules.find_package_modules("quire", ".")])

setuptools.setup = show
runpy.run_path("setup.py")
"""


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_build_requirements() -> None:
    tag, library, modules = run(sys.executable, "-c", READ_BUILD, cwd=ROOT).splitlines()[-3:]
    python, abi, platform = tag.split()
    assert (python, abi) == ("py3", "none")
    assert platform == sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert Path(library) == Path("quire/kernels/cpu/native/_native.so")
    assert modules.split() == ["__init__", "__main__"]


def test_the_native_library_uses_no_python_api() -> None:
    for path in (ROOT / "kernels/cpu/native/src").iterdir():
        assert "Python.h" not in path.read_text(), path


def test_python_versions() -> None:
    assert PROJECT["requires-python"] == ">=3.11,<3.15"
    named = {line.split(" :: ")[-1] for line in PROJECT["classifiers"] if "Python ::" in line}
    assert named == {"3.11", "3.12", "3.13", "3.14"}


def test_the_license_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["license-files"] == ["LICENSE"]
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def test_nothing_installs_the_other_project_called_quire() -> None:
    """On the package index `quire` is another project, so `quire[tracing]` would install that."""
    assert PROJECT["name"] == DISTRIBUTION != "quire"
    names = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    texts = {
        name: (ROOT / name).read_text()
        for name in names
        if name.endswith((".py", ".md", ".yml", "Dockerfile", "run")) and (ROOT / name).is_file()
    }
    other = re.compile(r"quire\[[a-z,]+\]|pip install [^`\n&]*(?<![/\w.-])quire(?![\w/-])")
    assert other.search("pip install 'quire[ray]'") and other.search("pip install -U quire")
    found = [name for name, text in texts.items() if other.search(text)]
    assert found == ["tests/test_packaging.py"]
    assert "frontend/telemetry/tracing.py" in texts and "docs/ranks.md" in texts


def test_the_changelog_has_this_version() -> None:
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build (sdist, wheel): the sdist from the tracked files, the wheel from the sdist."""
    scratch = tmp_path_factory.mktemp("packaging")
    checkout = scratch / "checkout"
    for name in run("git", "ls-files", "-z", cwd=ROOT).split("\0"):
        if name and (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)
    build = "from setuptools.build_meta import *; import sys; print(build_{}(sys.argv[1]))"
    run(sys.executable, "-c", build.format("sdist"), scratch / "dist", cwd=checkout)
    [sdist] = (scratch / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch / "unpacked", filter="data")
    [unpacked] = (scratch / "unpacked").iterdir()
    run(sys.executable, "-c", build.format("wheel"), scratch / "dist", cwd=unpacked)
    [wheel] = (scratch / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, distributions) -> Path:
    """Return `bin` of a new virtual environment with the wheel installed. The dependencies come
    from the running environment, so nothing is downloaded.
    """
    home = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", home, cwd=home)
    [site_packages] = home.glob("lib/python*/site-packages")
    mine = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site_packages / "dependencies.pth").write_text("\n".join(mine))
    options = ("--no-deps", "--no-index", "--ignore-installed", "--quiet")
    run(home / "bin/python", "-m", "pip", "install", *options, distributions[1], cwd=home)
    return home / "bin"


@pytest.mark.packaging
@pytest.mark.timeout(900)
def test_contents_of_sdist_and_wheel(distributions) -> None:
    sdist, wheel = distributions
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "docs/serving.md", "setup.py"} <= names
    assert {"kernels/cpu/native/src/abi.h", "frontend/bundled_model/model.safetensors"} <= names
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = run("git", "ls-files", "frontend", "core", "executor", "kernels", "ipc", cwd=ROOT)
    assert sorted({f"quire/{name}" for name in ["py.typed", *tracked.split()]} - names) == []
    assert [name for name in names if name.endswith(".so")] == [
        "quire/kernels/cpu/native/_native.so"
    ]
    assert not [name for name in names if name.startswith(("quire/tests", "quire/setup", "tests"))]


@pytest.mark.packaging
@pytest.mark.timeout(900)
def test_the_installed_wheel_generates(environment: Path, tmp_path: Path) -> None:
    words = ("generate", "Once upon a time", "--max-tokens", "8")
    assert run(environment / "quire", *words, cwd=tmp_path, HF_HUB_OFFLINE="1").strip()
    show = (
        "from quire.kernels.cpu.native.library import *; print(__import__('quire').__file__, "
        "library)"
    )
    home, library = run(environment / "python", "-c", show, cwd=tmp_path).split(maxsplit=1)
    assert Path(home).is_relative_to(environment.parent)
    assert "Library" in library, "the wheel's native library is not loaded"


@pytest.mark.packaging
@pytest.mark.timeout(900)
def test_the_plugin_in_the_docs(environment: Path, tmp_path: Path) -> None:
    """The files that docs/extending.md shows are installed as the page says. A child engine loads
    the plugin too.
    """
    (tmp_path / "plugin").mkdir()
    for _, above, text in read_blocks("docs/extending.md"):
        if match := FILE.match(above):
            (tmp_path / "plugin" / match[1]).write_text(text + "\n")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")
    python = environment / "python"
    run(python, "-m", "pip", "install", *options, ".", cwd=tmp_path / "plugin")
    overrides = '{"architectures": ["MyModelForCausalLM"]}'
    words = ("generate", "Once upon a time", "--max-tokens", "8", "--temperature", "0")
    theirs = run(environment / "quire", *words, cwd=tmp_path)
    mine = run(environment / "quire", *words, "--hf-overrides", overrides, cwd=tmp_path)
    assert mine.strip() and mine == theirs
