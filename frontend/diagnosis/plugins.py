"""Checks of the installed plugins: what each registers, or why no engine starts with it.

Must not know: torch, how findings are printed.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

from ...ipc.plugins import installed_plugins
from .machine import Finding, failure, passed, warning

REPORT = "quire.executor.plugin_report"
TIMEOUT_S = 60.0  # of all imports, torch's with them


def check_plugins(timeout_s: float = TIMEOUT_S) -> Iterator[Finding]:
    """Yields a finding for each plugin. They are imported in another process, as an engine does."""
    plugins = installed_plugins()
    if not plugins:
        return
    reports, end = run_report(timeout_s)
    if not reports:
        problem = f"the process that imports plugins {end}, before the first of them"
        yield failure("plugins", problem, f"{sys.executable} -P -m {REPORT} shows why")
    for i, plugin in enumerate(plugins):
        if i >= len(reports):  # a plugin before it ended the report
            return
        yield _finding(plugin, reports[i], end)


def run_report(timeout_s: float) -> tuple[list[dict[str, Any]], str]:
    """Returns (per plugin what executor/plugin_report.py prints, how the process ended). The last
    report has only a name if importing that plugin ended the process.
    """
    command = [sys.executable, "-P", "-m", REPORT]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
        text, code = done.stdout, done.returncode
        end = f"ends by {signal.Signals(-code).name}" if code < 0 else f"ends with code {code}"
    except subprocess.TimeoutExpired as error:
        text, end = error.stdout or b"", f"does not end within {timeout_s:g} s"
    reports: list[dict[str, Any]] = []
    for line in text.splitlines():
        report = json.loads(line)
        if len(report) > 1:
            reports.pop()  # its announcement
        reports.append(report)
    return reports, end


def _finding(plugin: EntryPoint, report: dict[str, Any], end: str) -> Finding:
    name = f"plugin {plugin.name}"
    package = plugin.dist.name if plugin.dist is not None else plugin.module
    repair = f"repair the package {package}, or pip uninstall {package}"
    if len(report) == 1:
        problem = f"the process that imports {plugin.value} {end}, so no engine starts"
        return failure(name, problem, repair)
    if error := report.get("error"):
        return failure(name, f"{error}; no engine starts", repair)
    parts = [
        f"{kind}: {', '.join(_named(report[kind]))}"
        for kind in ("operations", "implementations", "layers", "models")
        if report[kind]
    ]
    if parts:
        return passed(name, "; ".join(parts))
    advice = "the module must register what it has when it is imported; see docs/extending.md"
    return warning(name, f"importing {plugin.value} registers nothing", advice)


def _named(entries: list[str] | dict[str, list[str]]) -> list[str]:
    if isinstance(entries, list):
        return entries
    return [f"{op} ({', '.join(names)})" for op, names in entries.items()]
