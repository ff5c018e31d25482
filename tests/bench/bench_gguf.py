"""Quire and llama.cpp's server on the same GGUF file, over HTTP.

    python tests/bench/bench_gguf.py FILE.gguf --llama-server PATH [--rounds 5] [--threads 2]
    [--cells "one request" eight] [--write]

Both servers stay loaded and take turns, so that disturbances affect both. Prompts are random token
ids, new ones in every round; sampling is greedy and ignores the end of the sequence. Figures are
medians: tokens per second for decoding, prompt tokens per second for the long prompt. Starts are
timed from the command to the first token, with the file in the page cache and llama.cpp in one
slot. Peak memory is the sum of the processes' largest resident sets: after the first token of such
a start, and after all work.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from quire.ipc.models.gguf import read_gguf
from quire.tests.bench.report import hardware, write_result
from quire.tests.bench.servers import free_port, post_together, wait_until_ready

FIRST_ORDINARY_TOKEN = 300  # lower ids may be control tokens


@dataclass(frozen=True)
class Cell:
    """`requests` prompts of `shared` equal and `own` random tokens, with `out` tokens each."""

    requests: int
    shared: int
    own: int
    out: int
    counts_prompt: bool = False


CELLS = {
    "one request": Cell(1, 0, 128, 128),
    "eight": Cell(8, 0, 128, 64),
    "sixteen": Cell(16, 0, 128, 64),
    "sixteen, 700 shared": Cell(16, 700, 32, 32),
    "prompt of 4096": Cell(1, 0, 4096, 1, counts_prompt=True),
}


class Server:
    """A server process. Subclasses have its command and its request."""

    name = ""
    path = ""
    ready_path = "/health"

    def __init__(self, command: list[str], log: Path):
        self.started = time.perf_counter()
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        self.log = log

    def body(self, prompt: list[int], out: int) -> dict[str, Any]:
        raise NotImplementedError

    def peak_mib(self) -> float:
        processes = [psutil.Process(self.process.pid)]
        processes += processes[0].children(recursive=True)
        peaks = 0
        for process in processes:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peaks += int(status.split("VmHWM:")[1].split()[0])
        return peaks / 1024

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class Quire(Server):
    name = "quire"
    path = "/v1/completions"
    ready_path = "/health/ready"

    def __init__(self, args: argparse.Namespace, slots: int, port: int, log: Path):
        command = [sys.executable, "-m", "quire", "serve", args.file, "--port", str(port)]
        command += ["--num-threads", str(args.threads), "--max-model-len", str(args.context)]
        super().__init__(command, log)

    def body(self, prompt: list[int], out: int) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": out, "temperature": 0, "ignore_eos": True}


class LlamaServer(Server):
    name = "llama.cpp"
    path = "/completion"

    def __init__(self, args: argparse.Namespace, slots: int, port: int, log: Path):
        command = [args.llama_server, "-m", args.file, "--port", str(port), "-np", str(slots)]
        command += ["-t", str(args.threads), "-c", str(args.context * slots), "--no-webui"]
        super().__init__(command, log)

    def body(self, prompt: list[int], out: int) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "n_predict": out,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": True,
        }


def start(kind: type, args: argparse.Namespace, slots: int) -> tuple[Server, int, float]:
    """A running server, its port, and the seconds from its start to its first token."""
    port = free_port()
    server = kind(args, slots, port, Path(args.logs) / f"{kind.name}.log")
    wait_until_ready(port, server.process, server.ready_path)
    prompt = list(range(FIRST_ORDINARY_TOKEN, FIRST_ORDINARY_TOKEN + 16))
    post_together(port, server.path, [server.body(prompt, 1)])
    return server, port, time.perf_counter() - server.started


def run(server: Server, port: int, cell: Cell, prompts: list[list[int]]) -> float:
    """Sends the prompts together; returns tokens per second until the last answer."""
    begin = time.perf_counter()
    bodies = [server.body(prompt, cell.out) for prompt in prompts]
    answers = post_together(port, server.path, bodies)
    seconds = time.perf_counter() - begin
    for answer in answers:
        count = answer.get("tokens_predicted") or answer["usage"]["completion_tokens"]
        if count != cell.out:
            sys.exit(f"{server.name} answered {count} tokens instead of {cell.out}")
    tokens = sum(map(len, prompts)) if cell.counts_prompt else cell.requests * cell.out
    return tokens / seconds


def make_prompts(cell: Cell, vocab_size: int, seed: str) -> list[list[int]]:
    random_ids = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [random_ids.randrange(FIRST_ORDINARY_TOKEN, vocab_size) for _ in range(count)]

    shared = ids(cell.shared)
    return [shared + ids(cell.own) for _ in range(cell.requests)]


def number_of_tokens(file: str) -> int:
    return len(read_gguf(Path(file)).metadata["tokenizer.ggml.tokens"])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    vocab_size = number_of_tokens(args.file)
    kinds = [Quire, LlamaServer]
    starts: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    first_peaks: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    for _ in range(args.rounds):
        for kind in kinds:
            server, _, seconds = start(kind, args, slots=1)
            starts[kind.name].append(seconds)
            first_peaks[kind.name].append(server.peak_mib())
            server.stop()
    cells = {name: CELLS[name] for name in args.cells}
    slots = max(cell.requests for cell in cells.values())
    servers = [start(kind, args, slots)[:2] for kind in kinds]
    rates: dict[str, dict[str, list[float]]] = {
        name: {server.name: [] for server, _ in servers} for name in cells
    }
    try:
        for name, cell in cells.items():
            for i in range(args.rounds + 1):  # the first one is a warm-up
                prompts = make_prompts(cell, vocab_size, f"{name} {i} {time.time()}")
                for server, port in servers if i % 2 else servers[::-1]:
                    rate = run(server, port, cell, prompts)
                    if i:
                        rates[name][server.name].append(rate)
        peaks = {server.name: round(server.peak_mib()) for server, _ in servers}
    finally:
        for server, _ in servers:
            server.stop()

    def medians(of: dict[str, list[float]]) -> dict[str, float]:
        return {name: round(statistics.median(values), 2) for name, values in of.items()}

    return {
        "file": Path(args.file).name,
        "threads": args.threads,
        "rounds": args.rounds,
        "tokens_per_s": {name: medians(values) for name, values in rates.items()},
        "start_to_first_token_s": medians(starts),
        "first_token_peak_mib": medians(first_peaks),
        "peak_mib": peaks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="a GGUF file")
    parser.add_argument("--llama-server", required=True, help="llama.cpp's llama-server program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--context", type=int, default=4352, help="tokens of one request")
    parser.add_argument("--logs", default="/tmp", help="folder for the servers' logs")
    parser.add_argument("--write", action="store_true", help="keep the figures in results/")
    args = parser.parse_args()
    numbers = measure(args)
    print(json.dumps(numbers, indent=1))
    for name, of in numbers["tokens_per_s"].items():
        print(f"{name:22} {of['quire']:9.1f} {of['llama.cpp']:9.1f} tok/s", end="")
        print(f"  ratio {of['quire'] / of['llama.cpp']:.2f}")
    if args.write:
        print(hardware(), write_result(Path(args.file).stem, "gguf-llama-cpp", numbers))


if __name__ == "__main__":
    main()
