"""Load generators of others, and `quire bench serve`: their command lines for one load, and where
their reports have what they measured. Needs the standard library only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIMEOUT_S = 800  # on a busy machine their imports alone take minutes


@dataclass(frozen=True)
class Load:
    """Chat requests over streams, `concurrency` at a time, each of `input_len` and `output_len`
    tokens.
    """

    num_requests: int = 8
    concurrency: int = 1
    input_len: int = 64
    output_len: int = 24


@dataclass(frozen=True)
class Figures:
    """Means. `num_requests`: those that were answered in full."""

    num_requests: int
    output_tokens_per_s: float
    ttft_ms: float


@dataclass(frozen=True)
class Tool:
    """`command(address, tokenizer folder, load, report folder)`; `read(report folder)`. The command
    is a program of the tool's environment and runs with these variables.
    """

    command: Callable[[str, str, Load, Path], list[str]]
    read: Callable[[Path], Figures]
    variables: Mapping[str, str] = field(default_factory=lambda: {"HF_HUB_OFFLINE": "1"})


def report(folder: Path, name: str) -> dict[str, Any]:
    """Read the only file of this name below the folder."""
    (found,) = folder.rglob(name)
    return json.loads(found.read_text())


def quire_command(address: str, tokenizer: str, load: Load, folder: Path) -> list[str]:
    return [
        *("quire", "bench", "serve", "--base-url", address, "--endpoint", "chat", "--ignore-eos"),
        *("--num-prompts", str(load.num_requests), "--max-concurrency", str(load.concurrency)),
        *("--input-len", str(load.input_len), "--output-len", str(load.output_len)),
        *("--tokenizer", tokenizer, "--json", str(folder / "report.json")),
    ]


def read_quire(folder: Path) -> Figures:
    found = report(folder, "report.json")
    return Figures(
        found["num_successes"],
        found["output_tokens_per_s"],
        1000 * found["metrics"]["ttft"]["mean"],
    )


def guidellm_command(address: str, tokenizer: str, load: Load, folder: Path) -> list[str]:
    lengths = f"prompt_tokens={load.input_len},output_tokens={load.output_len}"
    backend = f"kind=openai_http,target={address},request_format=/v1/chat/completions"
    return [
        *("guidellm", "run", "--disable-console", "--backend", backend),
        *("--profile", f"kind=concurrent,streams={load.concurrency}"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--data", f"kind=synthetic_text,{lengths}"),
        *("--constraint", f"kind=max_requests,count={load.num_requests}"),
        *("--output", f"kind=json,path={folder / 'report.json'}"),
    ]


def read_guidellm(folder: Path) -> Figures:
    [benchmark] = report(folder, "report.json")["benchmarks"]
    metrics = benchmark["metrics"]
    return Figures(
        metrics["request_totals"]["successful"],
        metrics["output_tokens_per_second"]["successful"]["mean"],
        metrics["time_to_first_token_ms"]["successful"]["mean"],
    )


def aiperf_command(address: str, tokenizer: str, load: Load, folder: Path) -> list[str]:
    return [
        *("aiperf", "profile", "--model", "quire", "--url", address, "--endpoint-type", "chat"),
        *("--streaming", "--tokenizer", tokenizer, "--extra-inputs", "ignore_eos:true"),
        *("--isl", str(load.input_len), "--isl-stddev", "0"),
        *("--osl", str(load.output_len), "--osl-stddev", "0"),
        *("--request-count", str(load.num_requests), "--concurrency", str(load.concurrency)),
        *("--output-artifact-dir", str(folder), "--ui", "none"),
    ]


def read_aiperf(folder: Path) -> Figures:
    found = report(folder, "profile_export_aiperf.json")
    return Figures(
        round(found["request_count"]["avg"]),
        found["output_token_throughput"]["avg"],
        found["time_to_first_token"]["avg"],
    )


def benchy_command(address: str, tokenizer: str, load: Load, folder: Path) -> list[str]:
    """Its prompts are pieces of a text that it downloads; here, the server's own description."""
    return [
        *("llama-benchy", "--base-url", f"{address}/v1", "--model", "quire"),
        *("--tokenizer", tokenizer, "--book-url", f"{address}/openapi.json", "--exact-tg"),
        *("--pp", str(load.input_len), "--tg", str(load.output_len)),
        *("--concurrency", str(load.concurrency), "--latency-mode", "none", "--skip-coherence"),
        *("--runs", str(load.num_requests // load.concurrency)),
        *("--format", "json", "--save-result", str(folder / "report.json")),
    ]


def read_benchy(folder: Path) -> Figures:
    """Its throughput counts from the first token on, so it lies above that of the others."""
    [benchmark] = report(folder, "report.json")["benchmarks"]
    times = benchmark["e2e_ttft"]
    return Figures(len(times["values"]), benchmark["tg_throughput"]["mean"], times["mean"])


def vllm_command(address: str, tokenizer: str, load: Load, folder: Path) -> list[str]:
    return [
        *("vllm", "bench", "serve", "--backend", "openai-chat", "--base-url", address),
        *("--endpoint", "/v1/chat/completions", "--model", "quire", "--tokenizer", tokenizer),
        *("--dataset-name", "random", "--random-input-len", str(load.input_len)),
        *("--random-output-len", str(load.output_len), "--ignore-eos"),
        *("--num-prompts", str(load.num_requests), "--max-concurrency", str(load.concurrency)),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "report.json"),
    ]


def read_vllm(folder: Path) -> Figures:
    found = report(folder, "report.json")
    return Figures(found["completed"], found["output_throughput"], found["mean_ttft_ms"])


def inference_perf_command(address: str, tokenizer: str, load: Load, folder: Path) -> list[str]:
    """Completions: it has no random prompts for chats. Its settings are a file."""

    def always(length: int) -> dict[str, int]:
        sizes = {"min": length, "max": length, "mean": length, "std_dev": 0}
        return {**sizes, "total_count": load.num_requests}

    stage = {"num_requests": load.num_requests, "concurrency_level": load.concurrency}
    settings = {
        "api": {"type": "completion", "streaming": True},
        "data": {
            "type": "random",
            "input_distribution": always(load.input_len),
            "output_distribution": always(load.output_len),
        },
        "load": {"type": "concurrent", "num_workers": 1, "interval": 0, "stages": [stage]},
        "server": {"type": "vllm", "model_name": "quire", "base_url": address, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": tokenizer},
        "storage": {"local_storage": {"path": str(folder)}},
    }
    (folder / "settings.json").write_text(json.dumps(settings))  # JSON is YAML
    return ["inference-perf", "--config_file", str(folder / "settings.json")]


def read_inference_perf(folder: Path) -> Figures:
    found = report(folder, "summary_lifecycle_metrics.json")["successes"]
    return Figures(
        found["count"],
        found["throughput"]["output_tokens_per_sec"],
        1000 * found["latency"]["time_to_first_token"]["mean"],
    )


TOOLS = {
    "quire": Tool(quire_command, read_quire),
    "guidellm": Tool(guidellm_command, read_guidellm),
    # whatever the variable says, aiperf then takes a tokenizer's folder for a name on the hub
    "aiperf": Tool(aiperf_command, read_aiperf, {"HF_HUB_OFFLINE": ""}),
    "llama-benchy": Tool(benchy_command, read_benchy),
    "vllm": Tool(vllm_command, read_vllm),
    "inference-perf": Tool(inference_perf_command, read_inference_perf),
}


def measure(name: str, address: str, tokenizer: str, load: Load, programs: Path) -> Figures:
    """Run a tool. Raises RuntimeError with what it printed if it fails."""
    tool = TOOLS[name]
    with tempfile.TemporaryDirectory() as directory:
        command = tool.command(address, tokenizer, load, Path(directory))
        command[0] = str(programs / command[0])
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, **tool.variables, "HOME": directory},
        )
        try:
            return tool.read(Path(directory))
        except (ValueError, KeyError) as error:
            said = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
            raise RuntimeError(
                f"{name}: exit status {done.returncode}, {error!r}\n{said}"
            ) from None


def programs_here() -> Path:
    """Return the folder of this environment's programs."""
    return Path(sys.executable).parent
