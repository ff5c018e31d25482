"""Quire and other engines on the same work in one interleaved run; JSON and a Markdown table.

    PEERS=DIR python tests/bench/bench_peers.py --model qwen05b --minutes 15
    [--groups bf16,int8,int4] [--workloads W1,W4,W2,W3] [--write]

Rounds alternate; results are medians with extremes. Engines of one group are loaded together and
alternate, so that disturbances affect all of them. Groups follow each other, since memory does not
hold all. An engine that takes FAR times as long as the best one is measured once; entries of
SKIPPED are measured only with --slow.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from quire.tests.bench.report import hardware, write_result

HERE = Path(__file__).resolve().parent
# followed by an engine's name: its virtual environment
VENVS = os.path.expanduser(os.environ.get("PEERS_VENVS", "~/venv-peer-"))
FAR = 1.6  # times the best of a workload: slower engines are not measured again
NOISY = 0.25  # cores that other processes used: such a measurement is repeated once
START_TIMEOUT_S, RUN_TIMEOUT_S, SLOW_TIMEOUT_S = 400, 300, 900  # the last one with --slow

OUT, PROMPT = "out_tok_s", "prompt_tok_s"
MEASURED = {"W1": OUT, "W2": OUT, "W3": OUT, "W4": PROMPT}


class Peer(NamedTuple):
    label: str
    venv: str | None  # None: this interpreter
    command: str  # a script of the harness or of this folder, with its arguments


GROUPS = {
    "bf16": [
        Peer("quire bf16", None, "bench_quire.py --dtype bf16"),
        Peer("OpenVINO bf16", "ov", "bench_ov.py --dtype bf16"),
        Peer("vLLM bf16", "vllm", "bench_vllm.py --dtype bf16"),
        Peer("llama.cpp bf16", None, "bench_llamacpp.py --dtype bf16"),
        Peer("transformers bf16", None, "bench_hf.py --dtype bf16"),
    ],
    "int8": [
        Peer("quire int8", None, "bench_quire.py --quantization int8"),
        Peer("OpenVINO int8", "ov", "bench_ov.py --dtype int8"),
        Peer("llama.cpp Q8_0", None, "bench_llamacpp.py --dtype Q8_0"),
        Peer("CTranslate2 int8", "ct2", "bench_ct2.py --dtype int8"),
    ],
    "int4": [
        Peer("quire int4", None, "bench_quire.py --quantization int4"),
        Peer("llama.cpp Q4_K_M", None, "bench_llamacpp.py --dtype Q4_K_M"),
        Peer("llama.cpp Q4_0", None, "bench_llamacpp.py --dtype Q4_0"),
    ],
}
# Minutes for one measurement of the large model, and several times slower than the others in any
# group.
SKIPPED = {
    ("qwen05b", label, workload)
    for label in (
        "llama.cpp bf16",
        "llama.cpp Q4_K_M",
        "llama.cpp Q4_0",
        "CTranslate2 int8",
        "transformers bf16",
    )
    for workload in ("W2", "W3")
} | {("qwen05b", "llama.cpp Q8_0", "W3"), ("qwen05b", "OpenVINO int8", "W3")}


class Engine:
    """A peer that is loaded and waits for work."""

    def __init__(self, peer: Peer, model: str, threads: int, peers: Path):
        self.peer = peer
        python = sys.executable if peer.venv is None else f"{VENVS}{peer.venv}/bin/python"
        script, *arguments = peer.command.split()
        path = HERE / script if (HERE / script).exists() else peers / script
        errors = Path(os.environ["PEERS_DIR"]) / f"{peer.label.replace(' ', '-')}.err"
        command = [
            python,
            str(path),
            *arguments,
            "--model",
            model,
            "--threads",
            str(threads),
            "--label",
            peer.label,
            "--serve",
            "--no-pin",
        ]
        with errors.open("w") as stderr:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, cwd=peers
            )
        self.hello = self._answer(START_TIMEOUT_S)
        if "ready" not in self.hello:
            raise OSError(f"{peer.label} does not start: see {errors}")

    def measure(
        self, workload: str, repetition: int, timeout_s: float = RUN_TIMEOUT_S
    ) -> dict[str, Any]:
        """One JSON line of the harness; {"error": ...} if it gives none."""
        try:
            self.process.stdin.write(f"{workload} {repetition}\n".encode())
            self.process.stdin.flush()
        except OSError:
            return {"error": "died before"}
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            self.process.kill()
            return {"error": f"no answer in {timeout_s} s"}
        line = self.process.stdout.readline()
        return json.loads(line) if line.strip() else {"error": "died"}

    def close(self) -> None:
        try:
            self.process.communicate(b"quit\n", timeout=20)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()


def run_group(group: str, args: argparse.Namespace, seconds: float) -> list[dict[str, Any]]:
    """All measurements of a group: first a round of each workload, after which peak memory is
    compared; then more rounds. The workloads share the remaining time evenly. Loading is not
    counted.
    """
    engines: list[Engine] = []
    for peer in GROUPS[group]:
        if args.only and not any(word in peer.label for word in args.only.split(",")):
            continue
        try:
            engines.append(Engine(peer, args.model, args.threads, args.peers))
            print(f"  {peer.label}: {json.dumps(engines[-1].hello)}", file=sys.stderr)
        except (OSError, ValueError) as error:
            print(f"  {peer.label}: left out: {error}", file=sys.stderr)
    deadline = time.monotonic() + seconds
    rows: dict[str, list[dict[str, Any]]] = {workload: [] for workload in args.workloads.split(",")}
    for engine in engines:
        # warm-up: the first request of an engine belongs to its start-up
        engine.measure("W1", new_repetition())
    for workload, found in rows.items():
        taking_part = [
            engine
            for engine in engines
            if args.slow or (args.model, engine.peer.label, workload) not in SKIPPED
        ]
        run_round(
            workload,
            taking_part,
            0,
            found,
            timeout_s=SLOW_TIMEOUT_S if args.slow else RUN_TIMEOUT_S,
        )
    for i, (workload, found) in enumerate(rows.items()):
        until = time.monotonic() + max(0.0, deadline - time.monotonic()) / (len(rows) - i)
        run_rounds(workload, engines, until, args.rounds, found)
    for engine in engines:
        engine.close()
    return [row for found in rows.values() for row in found]


def run_rounds(
    workload: str, engines: list[Engine], until: float, max_rounds: int, rows: list[dict[str, Any]]
) -> None:
    """After the first round: further rounds in alternating order until the time is over, with
    engines that are not far behind.
    """
    for round_ in range(1, max_rounds):
        best = min((row["makespan_s"] for row in rows if "error" not in row), default=None)
        contenders = [engine for engine in engines if is_near(rows, engine.peer.label, best)]
        expected_s = sum(
            min(row["wall_s"] for row in rows if row["peer"] == e.peer.label and "error" not in row)
            for e in contenders
        )
        if not contenders or time.monotonic() + expected_s > until:
            break
        run_round(
            workload, contenders if round_ % 2 == 0 else contenders[::-1], round_, rows, until
        )


def run_round(
    workload: str,
    engines: list[Engine],
    round_: int,
    rows: list[dict[str, Any]],
    until: float = 0.0,
    timeout_s: float = RUN_TIMEOUT_S,
) -> None:
    """Measures once more, until `until`, if other processes used the machine."""
    for engine in engines:
        row = engine.measure(workload, new_repetition(), timeout_s)
        if (
            "error" not in row
            and row["other_cpus"] > NOISY
            and time.monotonic() + row["wall_s"] < until
        ):
            row = engine.measure(workload, new_repetition())
        rows.append({"peer": engine.peer.label, "workload": workload} | row | {"round": round_})
        print(
            f"  {workload} {engine.peer.label}: {row.get(MEASURED[workload], row.get('error'))}",
            file=sys.stderr,
        )


def is_near(rows: list[dict[str, Any]], label: str, best_s: float | None) -> bool:
    mine = [row["makespan_s"] for row in rows if row["peer"] == label and "error" not in row]
    return bool(mine) and best_s is not None and min(mine) <= FAR * best_s


_repetitions = iter(range(int(time.time()) % 100_000 * 1000, 10**12))


def new_repetition() -> int:
    """A number that is never repeated. Prompts depend on it, so no cache contains them."""
    return next(_repetitions)


# ---------------------------------------------------------------- results


def summarize(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By engine: for each workload the median, the extremes and the number of measurements; peak
    memory of the first rounds; start-up time.
    """
    table: dict[str, dict[str, Any]] = {}
    for row in rows:
        cells = table.setdefault(
            row["peer"], {"version": None, "peak_rss_mb": 0, "startup_s": None}
        )
        if "error" in row:
            cells.setdefault(row["workload"], {"error": row["error"]})
            continue
        cells |= {"version": row["version"], "startup_s": row["startup_s"]}
        if row["round"] == 0:  # later rounds differ between engines, and fill prefix caches
            cells["peak_rss_mb"] = max(cells["peak_rss_mb"], row["peak_rss_mb"])
        cell = cells.get(row["workload"])
        if cell is None or "values" not in cell:
            cell = cells[row["workload"]] = {"values": []}
        cell["values"].append(row[MEASURED[row["workload"]]])
    for cells in table.values():
        for workload in MEASURED:
            if values := cells.get(workload, {}).get("values"):
                cells[workload] |= {
                    "median": statistics.median(values),
                    "least": min(values),
                    "most": max(values),
                    "rounds": len(values),
                }
    return table


def as_markdown(table: dict[str, dict[str, Any]], workloads: list[str]) -> str:
    """A row per engine, and for each group a row with Quire's figures divided by the best of the
    others.
    """
    lines = [
        "| | " + " | ".join(workloads) + " | peak MB | start s |",
        "|---" * (len(workloads) + 3) + "|",
    ]
    for peers in GROUPS.values():
        labels = [peer.label for peer in peers if peer.label in table]
        for label in labels:
            cells = table[label]
            shown = [_cell(cells.get(workload, {})) for workload in workloads]
            lines.append(
                f"| {label} | "
                + " | ".join(shown)
                + f" | {cells['peak_rss_mb']} | {cells['startup_s'] or 0:.1f} |"
            )
        mine, others = (
            [label for label in labels if label.startswith("quire")],
            [label for label in labels if not label.startswith("quire")],
        )
        if mine and others:
            ratios = [_ratio(table, mine[0], others, workload) for workload in workloads]
            lines.append(f"| *{mine[0]} / best of the others* | " + " | ".join(ratios) + " | | |")
    return "\n".join(lines)


def _cell(cell: dict[str, Any]) -> str:
    if "median" not in cell:
        return "failed" if cell else "–"
    digits = 0 if cell["median"] >= 100 else 1
    text = f"{cell['median']:.{digits}f}"
    return (
        text
        if cell["rounds"] == 1
        else f"{text} ({cell['least']:.{digits}f}–{cell['most']:.{digits}f})"
    )


def _ratio(table: dict[str, dict[str, Any]], mine: str, others: list[str], workload: str) -> str:
    best = max((table[label].get(workload, {}).get("median", 0.0) for label in others), default=0.0)
    own = table[mine].get(workload, {}).get("median")
    return f"{own / best:.2f}" if own and best else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen05b", help="qwen05b or qwen30m")
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="for all groups together, loading not counted"
    )
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--workloads", default="W1,W4,W2,W3")
    parser.add_argument("--rounds", type=int, default=7, help="at most")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--slow",
        action="store_true",
        help="also measure entries that take minutes each",
    )
    parser.add_argument(
        "--only", default="", help="comma-separated words; only engines whose names contain one"
    )
    parser.add_argument(
        "--peers",
        type=Path,
        default=os.environ.get("PEERS", ""),
        help="the harness's folder [$PEERS]",
    )
    parser.add_argument(
        "--write", action="store_true", help="append the result to tests/bench/results/"
    )
    args = parser.parse_args()
    if not (args.peers / "common.py").exists():
        sys.exit(
            "bench_peers.py: name the folder that holds the harness's common.py with --peers DIR "
            "or $PEERS"
        )
    os.environ["PEERS"] = str(args.peers)
    os.environ.setdefault("PEERS_DIR", os.path.expanduser("~/.cache/quire-peers"))
    rows, groups = [], args.groups.split(",")
    for group in groups:
        print(f"{args.model}, {group}: loading", file=sys.stderr)
        rows += run_group(group, args, 60 * args.minutes / len(groups))
    table = summarize(rows)
    versions = "; ".join(
        dict.fromkeys(cells["version"] for cells in table.values() if cells["version"])
    )
    print(
        f"{args.model}, {hardware()}, {args.threads} threads, "
        f"{time.strftime('%Y-%m-%d', time.gmtime())}; {versions}\n"
    )
    print(as_markdown(table, sorted(args.workloads.split(","))))
    if args.write:
        print(
            write_result(
                args.model, "peers", {"threads": args.threads, "table": table, "rows": rows}
            ),
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
