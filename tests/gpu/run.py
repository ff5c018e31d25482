"""Runs the tests that a GPU concerns, then the measurement, each part with its own deadline.

From the repository; only Quire's dependencies and those of its tests have to be installed:

    python3 tests/gpu/run.py --out DIR                         # all parts
    python3 tests/gpu/run.py --out DIR --only kernels engine   # some of them
    python3 tests/gpu/run.py --out DIR --only racecheck        # needs compute-sanitizer
    python3 tests/gpu/run.py --out DIR --device cpu            # a dry run, without a GPU

`kernels` compares every operation with torch, `engine` the engine with that on a CPU, and `suite`
and `wide` run tests of the CPU's suite whose engines are on the GPU. They share the GPU among
several processes (--workers). `measure` is tests/bench/bench_gpu.py; racecheck runs the one-launch
decode.

A part's output goes to a file in DIR as it is printed, so a part that fails, hangs or is cut off
keeps its output so far, and the next part runs. DIR receives at most: machine.txt, a text file for
each part, tests.xml, gpu.json, summary.json. A table of all parts is printed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120  # per part
GRACE_S = 10  # seconds for a part to end after SIGTERM
NEEDS_NO_GPU = ("tests/gpu/test_run.py", "tests/gpu/test_bench.py")
PARTS = ["kernels", "engine", "suite", "wide", "measure"]
KERNELS = [
    f"tests/kernels/test_{name}.py"
    for name in ("parity", "state_rows", "moe", "logits", "sampling", "random_gumbel")
]
SUITE = [
    "tests/test_hybrid_models.py",
    "tests/executor/test_models.py",
    "tests/test_same_seed.py",
    "tests/test_feature_matrix.py",
]
WIDE = [
    "tests/test_speculation.py",
    "tests/test_kv_offload.py",
    "tests/test_loras.py",
    "tests/test_beam_search.py",
    "tests/executor/models/fallback/test_model.py",
    "tests/executor/models/test_draft_heads.py",
    "tests/executor/models/test_mtp_heads.py",
    "tests/executor/runner/speculation/test_draft_model.py",
]
SANITIZER = "compute-sanitizer"


@dataclass(frozen=True)
class Part:
    name: str  # name of its file in DIR
    command: list[str]


def make_parts(out: Path, device: str, wanted: list[str], workers: int = 1) -> list[Part]:
    is_gpu = device == "cuda"
    python = [sys.executable, "-P", "-m"]
    pytest = [*python, "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
    pytest += ["-n", str(workers)] if workers > 1 else []
    ignored = [word for path in NEEDS_NO_GPU for word in ("--ignore", path)]
    dry = ["--device", "cpu", "--models", "tiny", "--seconds", "0.01"]
    dry += ["--skip", "workload", "peers"]
    sanitizer = [shutil.which(SANITIZER) or "/usr/local/cuda/bin/" + SANITIZER]
    sanitizer += ["--tool", "racecheck", "--error-exitcode", "9"]
    about = [sys.executable, "-c", "import platform; print(platform.platform())"]
    measure = [*python, "quire.tests.bench.bench_gpu", "--out", str(out)]
    commands = {
        "machine": ["nvidia-smi", "-q"] if is_gpu else about,
        "kernels": [*pytest, *KERNELS, "-k", "triton or cublas"],  # a CPU tests its own
        "engine": [*pytest, f"--junitxml={out / 'tests.xml'}", *ignored, "tests/gpu"],
        # -rs prints why a test is skipped (tests/not_on_a_gpu.py)
        "suite": [*pytest, "-rs", "--device", "cuda", *SUITE],
        "wide": [*pytest, "-rs", "--device", "cuda", *WIDE],
        "measure": [*measure, *(["--write"] if is_gpu else dry)],
        "racecheck": [
            *sanitizer,
            *pytest,
            "tests/gpu/test_attention.py",
            "-k",
            "is_handed_over_once",
        ],
    }
    return [Part(name, commands[name]) for name in ("machine", *wanted)]


def run_part(part: Part, out: Path, environment: dict[str, str], limit_s: float) -> dict[str, Any]:
    """Runs a part to its end or its deadline, at which its process group is killed."""
    begin, path = time.monotonic(), out / f"{part.name}.txt"
    with path.open("w", encoding="utf-8") as file:
        try:
            process = subprocess.Popen(
                part.command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            file.write(f"{part.command[0]} cannot be run: {error}\n")
            return {
                "part": part.name,
                "exit_code": None,
                "seconds": 0.0,
                "last": f"cannot be run: {error}",
            }
        try:
            process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            file.write(f"\ncut off after {limit_s:.0f} s\n")
        finally:
            _end(process)
    lines = [
        line
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    return {
        "part": part.name,
        "exit_code": process.returncode,
        "seconds": round(time.monotonic() - begin, 1),
        "last": lines[-1][:200] if lines else "",
    }


def _end(process: subprocess.Popen) -> None:
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(timeout=patience)
            except subprocess.TimeoutExpired:
                continue


def run(parts: list[Part], out: Path, limit_s: float = LIMIT_S) -> bool:
    """Runs all parts in order, even if some fail; returns whether all succeeded."""
    out.mkdir(parents=True, exist_ok=True)
    found = []
    with tempfile.TemporaryDirectory() as directory:
        # makes the repository importable as the package, installed or not
        (Path(directory) / "quire").symlink_to(ROOT)
        found_first = [directory, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(found_first),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        for part in parts:
            found.append(run_part(part, out, environment, limit_s))
            print(
                "{part}: exit code {exit_code}, {seconds} s: {last}".format(**found[-1]), flush=True
            )
            (out / "summary.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print_table(found)
    return all(one["exit_code"] == 0 for one in found)


def print_table(found: list[dict[str, Any]]) -> None:
    print(f"\n{'part':<10}{'exit code':>10}{'seconds':>9}  last line")
    for one in found:
        print("{part:<10}{exit_code!s:>10}{seconds:>9}  {last}".format(**one))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, help="directory for the results")
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "racecheck"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--workers", type=int, default=1, help="processes of a part of tests")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help="deadline of each part in seconds"
    )
    args = parser.parse_args()
    out = args.out.resolve()
    # a CPU runs what is in `kernels` and `suite` in its own suite
    wanted = args.only or (PARTS if args.device == "cuda" else ["engine", "measure"])
    parts = make_parts(out, args.device, wanted, args.workers)
    return 0 if run(parts, out, args.limit) else 1


if __name__ == "__main__":
    sys.exit(main())
