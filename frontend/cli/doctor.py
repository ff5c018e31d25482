"""`quire doctor`: checks the machine, plugins and a model before anything is loaded. Every check
passes, warns or fails, with advice.

Must not know: how anything is checked, torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from .flags import ENGINE, engine_flags, given, server_flags
from .parser import Parser

if TYPE_CHECKING:
    from ..diagnosis.machine import Finding
    from ..engine_args import EngineArgs

USAGE = "[MODEL] [--json] [server flags] [engine flags]"
DESCRIPTION = (
    "Checks this machine, the installed plugins and MODEL for problems with `quire serve` and the "
    "same flags. No weights are loaded."
)
COLOURS = {"pass": "32", "warn": "33", "fail": "31"}


def make_parser(argv: list[str]) -> Parser:
    parser = Parser("doctor", USAGE, DESCRIPTION, argv)
    parser.add_model()
    parser.add.switch("--json", "the findings as one JSON object")
    parser.add_flags("server", server_flags(), ("host", "port"))
    parser.add_flags(
        "engine",
        [*engine_flags(without=("model",)), ENGINE],
        ("dtype", "max_model_len", "tokenizer"),
    )
    return parser


def main(argv: list[str]) -> int:
    args = make_parser(argv).parse(argv)
    from ..engine_args import EngineArgs

    findings = []
    for finding in diagnose(EngineArgs(**given(args, engine_flags())), given(args, server_flags())):
        findings.append(finding)
        if not args.json:
            print_finding(finding)
    failed = [finding for finding in findings if finding.status == "fail"]
    if args.json:
        print(msgspec.json.encode({"ok": not failed, "findings": findings}).decode())
    else:
        warned = sum(finding.status == "warn" for finding in findings)
        print(f"\n{len(findings) - len(failed) - warned} pass, {warned} warn, {len(failed)} fail")
    return 1 if failed else 0


def diagnose(engine_args: EngineArgs, server: dict[str, Any]) -> Iterator[Finding]:
    """Yields the findings as they are made.

    A missing library ends neither the other checks of the machine nor the report.
    """
    from ..diagnosis.machine import Finding, check_machine
    from ..server.config import ServerConfig

    config = ServerConfig(**server)
    try:
        yield from check_machine(
            config.host, config.port, config.max_connections, engine_args.cpu_isa
        )
        from ..diagnosis.model import check_model
        from ..diagnosis.plugins import check_plugins
        from ..server.state import read_template

        yield from check_plugins()
        yield from check_model(engine_args, config, read_template(config.chat_template))
    except ImportError as error:
        yield Finding(
            "further checks", "fail", f"a library is missing: {error}", "pip install -e ."
        )


def print_finding(finding: Finding) -> None:
    on, off = (f"\x1b[{COLOURS[finding.status]}m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    print(f"{on}{finding.status}{off}  {finding.name:<18} {finding.detail}")
    if finding.fix and finding.status != "pass":
        print(f"{'':6}{'':<18} -> {finding.fix}", flush=True)
