"""Faults of the table in README.md that no other file injects; and that the table is right."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from quire import SamplingParams
from quire.ipc.params import RequestOutputKind
from quire.tests.fake_engine import Hold
from quire.tests.frontend.supervision.test_supervised_client import (
    Asyncio,
    assert_expected,
    kill,
    some_requests,
)

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| F(\d+) \|[^|]*\| (?P<test>[^|]*) \| (?P<outcome>[^|]*) \|$", re.MULTILINE)


def run(requests, *, kill_after_s: tuple[float, ...] = (), hold: Hold | None = None, **settings):
    """The requests' outputs from an engine that is killed at these times, compared; returns its
    client.

    hold: set until the engine is killed.
    """
    engine = Asyncio(**settings)
    if hold is not None:
        hold.begin()

    def harm() -> None:
        for seconds in kill_after_s:
            time.sleep(seconds)
            kill(engine.client, signal.SIGKILL)
        if hold is not None:
            hold.end()

    thread = threading.Thread(target=harm)
    thread.start()
    try:
        assert_expected(requests, engine.generate(requests), engine.client.ready.config)
        assert engine.call("check_integrity") is True
        return engine.client
    finally:
        thread.join()
        engine.close()


def test_sigkill_in_a_chunk_of_a_prompt(tmp_path: Path) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=5, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    requests = {"r": ([i % 90 for i in range(240)], params)}
    hold = Hold(tmp_path, 10)
    client = run(
        requests,
        kill_after_s=(0.3,),
        hold=hold,
        max_num_batched_tokens=16,  # fifteen chunks
        block_size=16,
        hf_overrides={"delay_s": 0.05} | hold.overrides,
    )
    assert client.restarts.by_cause == {"SIGKILL": 1}


def test_sigkill_of_one_stream_and_again_while_it_resumes(tmp_path: Path) -> None:
    requests, hold = some_requests(1, max_tokens=150), Hold(tmp_path, 30)
    client = run(
        requests,
        kill_after_s=(0.3, 0.6),
        hold=hold,
        hf_overrides={"delay_s": 0.02} | hold.overrides,
    )
    assert client.restarts.by_cause["SIGKILL"] >= 1


@pytest.mark.parametrize("where", ["scheduler", "model"])
def test_an_exception_in_a_step(where: str, tmp_path: Path) -> None:
    settings = {"delay_s": 0.005, "raise_once": [where, str(tmp_path / "raised")]}
    client = run(some_requests(6), hf_overrides=settings)
    assert (tmp_path / "raised").exists()
    assert client.restarts.by_cause.total() == 1 and client.restarts.num_quarantined == 0


# ------------------------------------------------------------ the table


def rows() -> list[tuple[int, str, str]]:
    text = (Path(__file__).parent / "README.md").read_text()
    return [
        (int(row[1]), row["test"].strip(), row["outcome"].strip()) for row in ROW.finditer(text)
    ]


def test_the_table_names_tests_that_exist() -> None:
    assert [number for number, _, _ in rows()] == list(range(1, 41))
    for number, tests, outcome in rows():
        assert outcome.split(":")[0] in ("survived", "clean error", "GPU"), (number, outcome)
        for test in re.findall(r"`([^`]+)`", tests):
            path, _, name = test.partition("::")
            text = (ROOT / "tests" / path).read_text()
            assert not name or f"def {name}(" in text, (number, test)


def many_tests() -> dict[str, str]:
    """Test -> the faults that it injects."""
    found: dict[str, str] = {}
    for number, tests, outcome in rows():
        if not outcome.startswith("GPU"):
            for test in re.findall(r"`([^`]+)`", tests):
                found[test] = f"{found[test]}, F{number}" if test in found else f"F{number}"
    return found


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("test", "faults"), many_tests().items(), ids=many_tests().values())
def test_each_fault_many_times(test: str, faults: str) -> None:
    """FAULT_RUNS times (20), see repeat.py."""
    plugins = ("-p", "no:cacheprovider", "-p", "quire.tests.faults.repeat")
    command = [sys.executable, "-m", "pytest", "-q", "-x", *plugins, f"tests/{test}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    print(f"\n{faults}: {test}: {done.stdout.splitlines()[-1]}")
