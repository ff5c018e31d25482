"""The load generators' reports are read from the right fields, without the generators."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from quire.tests.bench.bench_load_tools import table
from quire.tests.clients.load_tools import TOOLS, Figures, Load, measure

WANTED = Figures(8, 40.5, 12.5)
# name -> (file, its contents): the fields that each tool's reports have among many others
REPORTS: dict[str, tuple[str, dict[str, Any]]] = {
    "quire": (
        "report.json",
        {
            "num_successes": 8,
            "output_tokens_per_s": 40.5,
            "metrics": {"ttft": {"mean": 0.0125}},
        },
    ),
    "guidellm": (
        "report.json",
        {
            "benchmarks": [
                {
                    "metrics": {
                        "request_totals": {"successful": 8, "errored": 0},
                        "output_tokens_per_second": {"successful": {"mean": 40.5}},
                        "time_to_first_token_ms": {"successful": {"mean": 12.5}},
                    }
                }
            ]
        },
    ),
    "aiperf": (
        "run/profile_export_aiperf.json",
        {
            "request_count": {"unit": "requests", "avg": 8.0},
            "output_token_throughput": {"avg": 40.5},
            "time_to_first_token": {"unit": "ms", "avg": 12.5},
        },
    ),
    "llama-benchy": (
        "report.json",
        {
            "benchmarks": [
                {
                    "tg_throughput": {"mean": 40.5},
                    "e2e_ttft": {"mean": 12.5, "values": [12.5] * 8},
                }
            ]
        },
    ),
    "vllm": (
        "report.json",
        {"completed": 8, "output_throughput": 40.5, "mean_ttft_ms": 12.5},
    ),
    "inference-perf": (
        "summary_lifecycle_metrics.json",
        {
            "successes": {
                "count": 8,
                "latency": {"time_to_first_token": {"mean": 0.0125}},
                "throughput": {"output_tokens_per_sec": 40.5},
            },
            "failures": {"count": 0},
        },
    ),
}


@pytest.mark.parametrize("name", TOOLS)
def test_a_report_is_read(name, tmp_path):
    file, contents = REPORTS[name]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps(contents))
    assert TOOLS[name].read(tmp_path) == WANTED


@pytest.mark.parametrize("name", TOOLS)
def test_a_command_names_the_server_the_tokenizer_and_the_load(name, tmp_path):
    load = Load(num_requests=24, concurrency=3, input_len=71, output_len=29)
    command = " ".join(TOOLS[name].command("http://127.0.0.1:1", "/tokens", load, tmp_path))
    command += "".join(file.read_text() for file in tmp_path.iterdir())  # settings
    requests = "8" if name == "llama-benchy" else "24"  # it repeats a batch of `concurrency`
    for wanted in ("http://127.0.0.1:1", "/tokens", requests, "3", "71", "29", str(tmp_path)):
        assert wanted in command


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(stat.S_IRWXU)


def test_aiperf_loads_the_tokenizer_from_its_folder(tmp_path, monkeypatch):
    """Where the hub is said to be out of reach, it takes the folder for a name."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    program(tmp_path, "aiperf", "echo offline=$HF_HUB_OFFLINE; exit 1")
    with pytest.raises(RuntimeError, match=r"offline=\n"):
        measure("aiperf", "http://127.0.0.1:1", "/tokens", Load(), tmp_path)


def test_what_a_tool_that_fails_printed_is_said(tmp_path):
    program(tmp_path, "aiperf", "echo no such model >&2; exit 3")
    with pytest.raises(RuntimeError, match=r"(?s)aiperf: exit status 3.*no such model"):
        measure("aiperf", "http://127.0.0.1:1", "/tokens", Load(), tmp_path)


def test_a_tool_runs_from_the_folder_of_its_environment(tmp_path):
    written = json.dumps(REPORTS["vllm"][1])
    # the folder of the report follows --result-dir
    loop = 'while [ "$1" != --result-dir ]; do shift; done'
    program(tmp_path, "vllm", f"{loop}; echo '{written}' > $2/report.json")
    assert measure("vllm", "http://127.0.0.1:1", "/tokens", Load(), tmp_path) == WANTED


def test_the_table_has_medians_and_ratios_within_rounds():
    rounds = [
        {"quire": Figures(8, 100.0, 10.0), "vllm": Figures(8, 90.0, 11.0)},
        {"quire": Figures(8, 50.0, 20.0), "vllm": Figures(8, 50.0, 20.0)},
        {"quire": Figures(8, 80.0, 10.0), "vllm": Figures(8, 40.0, 30.0)},
    ]
    assert table(rounds).splitlines()[2:] == [
        "| quire | 24 | 80.0 | 1.00 | 10.0 | 1.00 |",
        "| vllm | 24 | 50.0 | 0.90 | 20.0 | 1.10 |",
    ]
