"""The command that runs all parts on a GPU: a part that fails, hangs or cannot be started keeps its
output and stops no other; and its dry run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from quire.tests.gpu import run as runner
from quire.tests.gpu.run import Part
from quire.tests.not_on_a_gpu import REASONS, reason_for


def python(name: str, code: str) -> Part:
    return Part(name, [sys.executable, "-P", "-c", code])


def test_no_part_stops_another_and_each_keeps_its_output(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "GRACE_S", 0.2)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('begun', flush=True); time.sleep(600)"
    )
    parts = [
        python("good", "import quire; print(quire.__name__)"),
        python("bad", "print('half'); 1 / 0"),
        python("hung", stubborn),
        Part("absent", ["no-such-program"]),
        python("last", "print('done')"),
    ]
    assert not runner.run(parts, tmp_path, limit_s=3)
    found = {one["part"]: one for one in json.loads((tmp_path / "summary.json").read_text())}
    assert {name: one["exit_code"] for name, one in found.items()} == {
        "good": 0,
        "bad": 1,
        "hung": -9,
        "absent": None,
        "last": 0,
    }
    assert [found[name]["last"] for name in ("good", "bad", "last")] == [
        "quire",
        "ZeroDivisionError: division by zero",
        "done",
    ]
    assert (
        tmp_path / "hung.txt"
    ).read_text() == "begun\n\ncut off after 3 s\n" and "no-such-program" in (
        tmp_path / "absent.txt"
    ).read_text()
    assert runner.run(parts[:1], tmp_path)


@pytest.mark.slow
def test_a_dry_run(tmp_path):
    """As a user runs it, with Python alone; only the parts that a CPU supports."""
    command = [
        sys.executable,
        str(Path(runner.__file__)),
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines, names = done.stdout.splitlines(), ("machine", "engine", "measure")
    assert [line.split(",")[0] for line in lines[:3]] == [f"{name}: exit code 0" for name in names]
    assert [line.split()[:2] for line in lines[5:]] == [[name, "0"] for name in names]
    assert {path.name for path in tmp_path.iterdir()} == {
        "machine.txt",
        "engine.txt",
        "tests.xml",
        "measure.txt",
        "gpu.json",
        "summary.json",
    }
    steps = {
        "decode tiny b=1 ctx=64",
        "decode tiny b=4 ctx=64",
        "prefill tiny 32",
        "prefill tiny 128",
    }
    names = {
        "machine",
        "ceilings",
        *steps,
        *(f"encoder {name} 224" for name in ("siglip-400m", "qwen3-vl-2b")),
        *(f"encoder attention {name}" for name in ("siglip-400m 256", "qwen3-vl-2b 196")),
        "attention tiny decode b=4 ctx=64",
        "attention tiny prefill 64",
    }
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert {
        name for name in found if not name.startswith("kernel tiny")
    } == names and "kernel tiny rms_norm" in found
    assert '"failed"' not in (tmp_path / "measure.txt").read_text()


def test_on_a_gpu(tmp_path):
    """The parts that a dry run leaves out."""
    wanted = [*runner.PARTS, "racecheck"]
    made = runner.make_parts(tmp_path, "cuda", wanted, workers=8)
    parts = {part.name: part.command for part in made}
    assert list(parts) == ["machine", *wanted]
    assert parts["measure"][-3:] == ["--out", str(tmp_path), "--write"]
    (chosen,) = parts["racecheck"][-1:]
    assert (
        parts["racecheck"][0].endswith("compute-sanitizer")
        and chosen in (Path(runner.__file__).parent / "test_attention.py").read_text()
    )
    words = [word for name in ("kernels", "engine", "suite", "wide") for word in parts[name]]
    paths = [word for word in words if word.startswith("tests/")]
    assert len(paths) > 10 and all((runner.ROOT / path).exists() for path in paths)


def test_the_table_of_what_cannot_pass_on_a_gpu():
    """Each entry names tests that exist, and the wide part is not all of them."""
    known = "\n".join(
        f"tests/{path.relative_to(runner.ROOT / 'tests')}::{name}[int8]"
        for path in (runner.ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    )
    for pattern, reason in REASONS.items():
        assert re.search(pattern, known, re.M), pattern
        assert reason and reason[0].islower()
    assert reason_for("tests/executor/test_models.py::test_x[qwen2-int4]") is None
    assert reason_for("tests/executor/ranks/test_rank.py::test_x")
    assert reason_for("tests/test_kv_offload.py::test_what_is_refused[settings0]") is None
