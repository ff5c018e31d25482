"""`quire doctor` says what every plugin registers, and which one no engine starts with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from quire.frontend.diagnosis.plugins import check_plugins
from quire.tests.installed_plugins import install_plugin

REGISTERS = """
print("a plugin may print")
from quire.kernels.registry import register

@register("silu_and_mul", name="mine")
def silu_and_mul(x):
    return x
"""


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_without_plugins_nothing_is_run(site) -> None:
    assert list(check_plugins(timeout_s=0)) == []


def test_what_each_registers_and_what_is_wrong(site) -> None:
    install_plugin(site, REGISTERS, module="fast_kernels", name="fast")
    install_plugin(site, "", module="no_kernels", name="silent")
    install_plugin(site, "import not_there", module="old_kernels", name="old")
    found = {finding.name: finding for finding in check_plugins(timeout_s=100)}
    assert {name: finding.status for name, finding in found.items()} == {
        "plugin fast": "pass",
        "plugin silent": "warn",
        "plugin old": "fail",
    }
    assert found["plugin fast"].detail == "implementations: silu_and_mul (mine)"
    assert found["plugin silent"].detail == "importing no_kernels registers nothing"
    assert found["plugin old"].detail == (
        "the plugin old = old_kernels cannot be loaded: ModuleNotFoundError: "
        f"No module named 'not_there' ({site}/old_kernels.py:1); no engine starts"
    )
    assert found["plugin old"].fix == "repair the package old_kernels, or pip uninstall old_kernels"


def test_one_that_kills_the_process_is_named(site) -> None:
    install_plugin(site, "import os; os.kill(os.getpid(), 11)")
    [finding] = check_plugins()
    assert (finding.name, finding.status) == ("plugin mine", "fail")
    assert finding.detail == (
        "the process that imports my_kernels ends by SIGSEGV, so no engine starts"
    )


@pytest.mark.parametrize(
    ("printed", "problem"),
    [
        (b'{"name": "mine"}\n', "my_kernels does not end within 3 s, so no engine starts"),
        (b"", "plugins does not end within 3 s, before the first of them"),
    ],
    ids=["hangs", "before_plugins"],
)
def test_a_process_that_does_not_end(site, monkeypatch, printed, problem) -> None:
    def run(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout, output=printed)

    install_plugin(site, "")
    monkeypatch.setattr(subprocess, "run", run)
    [finding] = check_plugins(timeout_s=3)
    assert finding.status == "fail" and finding.fix
    assert finding.detail == f"the process that imports {problem}"
