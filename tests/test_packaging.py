"""The package as users get it: metadata, sdist, wheel, an installation in a new environment."""

from __future__ import annotations

import os
import platform
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
# Of a test whose fixture compiles a wheel: eight minutes of a core, on which others may run, too.
LIMIT_S = 3600

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

SHOW_LIBRARY = """
import quire
from quire.kernels.cpu.native.library import library
print(quire.__file__, library)
"""

# the digest of what each native kernel computes, on each instruction set that this processor has
PRINT_BITS = """
import hashlib, torch
from quire.kernels.cpu.native.library import library
from quire.tests.kernels import cases
from quire.tests.kernels.native.test_isas import NATIVE, native

for isa in library.isas:
    library.use_isa(isa)
    for op, dtype in NATIVE:
        torch.manual_seed(0)
        for case in cases.MODEL_OPS[op](dtype):
            digest = hashlib.sha256()
            for result in case.run(native(op).function):
                digest.update(result.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            print(isa, op, dtype, case.name, digest.hexdigest(), sep="; ")
"""


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_build_requirements() -> None:
    tag, library, modules = run(sys.executable, "-c", READ_BUILD, cwd=ROOT).splitlines()[-3:]
    python, abi, system = tag.split()
    assert (python, abi) == ("py3", "none")
    assert system == sysconfig.get_platform().replace("-", "_").replace(".", "_")
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
        if name.endswith((".py", ".md", ".yml", "Dockerfile", "run", "build_wheel"))
        and (ROOT / name).is_file()
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
    sdist = build("sdist", checkout, scratch / "dist")
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch / "unpacked", filter="data")
    [unpacked] = (scratch / "unpacked").iterdir()
    return sdist, build("wheel", unpacked, scratch / "dist")


def build(kind: str, project: Path, folder: Path) -> Path:
    """Builds a project's sdist or wheel with the running environment's setuptools: that of a new
    environment may be older than projects ask for.
    """
    program = f"from setuptools.build_meta import *; import sys; print(build_{kind}(sys.argv[1]))"
    name = run(sys.executable, "-c", program, folder, cwd=project).splitlines()[-1]
    return folder / name


def install(wheel: Path, home: Path) -> Path:
    """Installs the wheel in a new virtual environment, and returns its `bin`. The dependencies come
    from the running environment, so nothing is downloaded.
    """
    run(sys.executable, "-m", "venv", home, cwd=wheel.parent)
    [site_packages] = home.glob("lib/python*/site-packages")
    mine = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site_packages / "dependencies.pth").write_text("\n".join(mine))
    options = ("--no-deps", "--no-index", "--ignore-installed", "--quiet")
    run(home / "bin/python", "-m", "pip", "install", *options, wheel, cwd=home)
    return home / "bin"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, distributions) -> Path:
    return install(distributions[1], tmp_path_factory.mktemp("environment"))


@pytest.mark.packaging
@pytest.mark.timeout(LIMIT_S)
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
@pytest.mark.timeout(LIMIT_S)
def test_the_installed_wheel_generates(environment: Path, tmp_path: Path) -> None:
    words = ("generate", "Once upon a time", "--max-tokens", "8")
    assert run(environment / "quire", *words, cwd=tmp_path, HF_HUB_OFFLINE="1").strip()
    home, library = run(environment / "python", "-c", SHOW_LIBRARY, cwd=tmp_path).split(maxsplit=1)
    assert Path(home).is_relative_to(environment.parent)
    assert "Library" in library, "the wheel's native library is not loaded"


@pytest.mark.packaging
@pytest.mark.timeout(LIMIT_S)
def test_the_plugin_in_the_docs(environment: Path, tmp_path: Path) -> None:
    """The files that docs/extending.md shows are installed as the page says. A child engine loads
    the plugin too.
    """
    (tmp_path / "plugin").mkdir()
    for _, above, text in read_blocks("docs/extending.md"):
        if match := FILE.match(above):
            (tmp_path / "plugin" / match[1]).write_text(text + "\n")
    plugin = build("wheel", tmp_path / "plugin", tmp_path)
    options = ("--no-deps", "--no-index", "--quiet")
    run(environment / "python", "-m", "pip", "install", *options, plugin, cwd=tmp_path)
    overrides = '{"architectures": ["MyModelForCausalLM"]}'
    words = ("generate", "Once upon a time", "--max-tokens", "8", "--temperature", "0")
    theirs = run(environment / "quire", *words, cwd=tmp_path)
    mine = run(environment / "quire", *words, "--hf-overrides", overrides, cwd=tmp_path)
    assert mine.strip() and mine == theirs


@pytest.fixture(scope="module")
def manylinux_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of `.ci/build_wheel`, which needs the package index."""
    if platform.machine() != "x86_64":
        pytest.skip("the script is for x86-64")
    folder = tmp_path_factory.mktemp("manylinux")
    run(ROOT / ".ci/build_wheel", folder, cwd=folder)
    [wheel] = folder.iterdir()
    return wheel


@pytest.mark.packaging
@pytest.mark.timeout(LIMIT_S)
def test_the_manylinux_wheel_generates_without_a_compiler(
    manylinux_wheel: Path, tmp_path: Path
) -> None:
    assert manylinux_wheel.name.endswith("-py3-none-manylinux_2_28_x86_64.whl")
    assert manylinux_wheel.stat().st_size <= 15 * 2**20
    folder = install(manylinux_wheel, tmp_path / "environment")
    alone = {"PATH": str(folder), "HF_HUB_OFFLINE": "1"}
    _, library = run(folder / "python", "-c", SHOW_LIBRARY, cwd=tmp_path, **alone).split(maxsplit=1)
    assert "Library" in library, "the wheel's native library is not loaded"
    words = ("generate", "Once upon a time", "--max-tokens", "8", "--temperature", "0")
    theirs = run(folder / "quire", *words, cwd=tmp_path, **alone)
    assert theirs.strip() and theirs == run(sys.executable, "-m", "quire", *words, cwd=tmp_path)


@pytest.mark.packaging
@pytest.mark.timeout(LIMIT_S)
def test_the_manylinux_wheel_computes_the_same_bits(manylinux_wheel: Path, tmp_path: Path) -> None:
    """Its compiler is another one than that of the running environment's library."""
    with zipfile.ZipFile(manylinux_wheel) as archive:
        # not in the working directory, where Python would take the folder for the package
        library = archive.extract("quire/kernels/cpu/native/_native.so", tmp_path / "wheel")
    mine = run(sys.executable, "-c", PRINT_BITS, cwd=tmp_path).splitlines()
    theirs = run(sys.executable, "-c", PRINT_BITS, cwd=tmp_path, QUIRE_NATIVE=library).splitlines()
    assert mine and len(mine) == len(theirs)
    assert [a for a, b in zip(mine, theirs, strict=True) if a != b] == []
