"""The tokens of interactive streams with and without a batch behind them; and the memory of a batch
of many lines.

    python tests/bench/bench_batches.py first-token [--lines 5000] [--max-tokens 64] [--streams 4]
        [--requests 20] [--rounds 3] [--pause 0] [--model bundled] [--before DIRECTORY]
    python tests/bench/bench_batches.py memory [--lines 1000000]

first-token: phases without and with a batch take turns on one server. In each, --streams clients
send one request after the other, after --pause seconds. The figures are medians over the phases:
the first token, and the time of one further token. The goal: the first token beside a batch comes
within 1.2 times of that without. --before: a directory with another version's package `quire`,
whose server takes turns with this version's. `memory` runs a batch whose lines are answered at
once, without a server or an engine, and prints how much the process has grown at its largest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from quire.frontend.batches.batch_run import BatchRun
from quire.frontend.batches.formats import Answer
from quire.frontend.batches.input_file import InputLine, InputRules
from quire.frontend.batches.line_run import Gate
from quire.frontend.batches.store import Store, StoredBatch

URL = "/v1/completions"
ANSWER = json.dumps({"choices": [{"text": "word " * 60}], "usage": {}}).encode()
NUM_PLACES = 64
NUM_TOKENS = 16  # of each request of a stream


def write_lines(path: Path, num_lines: int, max_tokens: int = 0, **body: Any) -> None:
    """max_tokens: of a line on average, so that lines that begin together do not end together."""
    with path.open("w") as file:
        for i in range(num_lines):
            asked = {"prompt": f"{i} is the number of this line", **body}
            if max_tokens:
                asked["max_tokens"] = 1 + 37 * i % (2 * max_tokens)
            line = {"custom_id": f"line-{i}", "method": "POST", "url": URL, "body": asked}
            file.write(json.dumps(line) + "\n")


# ---------------------------------------------------------------- memory


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory(num_lines: int) -> dict[str, float]:
    """Returns the growth of this process, in MiB, and the seconds that the batch takes."""

    async def answer(asked: InputLine, request_id: str) -> Answer:
        await asyncio.sleep(0)
        return Answer(200, request_id, ANSWER)

    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store", 2**40, time.time)
        now = int(time.time())
        batch = StoredBatch(
            id=store.new_id("batch_"),
            owner="",
            kind="openai",
            urls=[URL],
            created_at=now,
            expires_at=now + 86400,
            output_file_id=store.new_id("file-"),
            error_file_id=store.new_id("file-"),
        )
        store.add_batch(batch, lambda path: write_lines(path, num_lines))
        rules = InputRules([URL], lambda name: None, 2**20, num_lines)
        before, began = peak_mib(), time.perf_counter()
        gate = Gate(lambda: NUM_PLACES)
        asyncio.run(BatchRun(store, batch, rules, answer, gate).run())
        assert batch.counts.completed == num_lines, batch
        input_mib = (store.batch_folder(batch) / "input.jsonl").stat().st_size / 2**20
        output_mib = store.content("", batch.output_file_id).stat().st_size / 2**20
    return {
        "lines": num_lines,
        "input_mib": round(input_mib, 1),
        "output_mib": round(output_mib, 1),
        "growth_mib": round(peak_mib() - before, 1),
        "seconds": round(time.perf_counter() - began, 1),
    }


# ---------------------------------------------------------------- first token


async def chunk_times(address: str, args: argparse.Namespace, name: str) -> list[list[float]]:
    """When the chunks of each request came, in seconds after it was sent. Each of the streams sends
    one request after the other.
    """
    from quire.frontend.bench.http_client import HttpClient
    from quire.frontend.bench.openai_client import RequestOptions, stream_request

    options = RequestOptions(endpoint="completions", ignore_eos=True, temperature=0.0)
    client = HttpClient(f"{address}/v1", {}, 600)

    async def stream(number: int) -> list[list[float]]:
        found = []
        for i in range(args.requests):
            await asyncio.sleep(args.pause)
            prompt = f"{name} {number} {i} asks a short question"
            outcome = await stream_request(client, options, prompt, NUM_TOKENS)
            assert outcome.failure is None, outcome.failure_text
            found.append([when - outcome.start for when in outcome.token_times])
        return found

    try:
        streams = await asyncio.gather(*map(stream, range(args.streams)))
    finally:
        client.close()
    return [times for one in streams for times in one]


class Phases:
    """The phases of one server."""

    def __init__(self, port: int, file: Path, args: argparse.Namespace):
        import httpx2 as httpx

        self._address = f"http://127.0.0.1:{port}"
        self._args = args
        self._client = httpx.Client(base_url=f"{self._address}/v1", timeout=600)
        sent = self._client.post(
            "/files", files={"file": file.read_bytes()}, data={"purpose": "batch"}
        )
        self._file_id = sent.json()["id"]
        self.ratios: dict[str, list[float]] = {"first token": [], "further token": []}
        self.num_lines = 0  # that were answered beside streams

    def run(self, name: str) -> dict[str, float]:
        """Returns the medians of a phase in seconds."""
        requests = asyncio.run(chunk_times(self._address, self._args, name))
        return {
            "first token": statistics.median(times[0] for times in requests),
            # several tokens may come in a chunk
            "further token": statistics.median(
                (times[-1] - times[0]) / (NUM_TOKENS - 1) for times in requests
            ),
        }

    def run_both(self, name: str) -> None:
        """A phase without a batch and one with it."""
        alone = self.run(f"{name} alone")
        body = {"input_file_id": self._file_id, "endpoint": URL, "completion_window": "24h"}
        batch_id = self._client.post("/batches", json=body).json()["id"]
        before = self._wait_for(batch_id, ("in_progress",), num_completed=1)
        beside = self.run(f"{name} beside")
        self._client.post(f"/batches/{batch_id}/cancel")
        self.num_lines += self._wait_for(batch_id, ("cancelled", "completed")) - before
        for kind, ratios in self.ratios.items():
            ratios.append(beside[kind] / alone[kind])
            figures = f"{1e3 * alone[kind]:.1f} ms alone, {1e3 * beside[kind]:.1f} ms beside"
            print(f"{name}, {kind}: {figures} a batch", flush=True)

    def _wait_for(self, batch_id: str, statuses: tuple[str, ...], num_completed: int = 0) -> int:
        """Returns how many lines were answered."""
        while True:
            found = self._client.get(f"/batches/{batch_id}").json()
            number = found["request_counts"]["completed"]
            if found["status"] in statuses and number >= num_completed:
                return number
            time.sleep(0.1)


def first_token(args: argparse.Namespace) -> None:
    from quire.tests.bench.servers import free_port, wait_until_ready

    versions = {"now": ""} | ({"before": args.before} if args.before else {})
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ending:
        file = Path(folder) / "lines.jsonl"
        write_lines(file, args.lines, max_tokens=args.max_tokens, ignore_eos=True)
        phases = {}
        for name, directory in versions.items():
            port = free_port()
            flags = ["--port", str(port), "--no-access-log", "--batch-dir", f"{folder}/{name}"]
            server = subprocess.Popen(
                [sys.executable, "-P", "-m", "quire", "serve", args.model, *flags],
                env=os.environ | ({"PYTHONPATH": directory} if directory else {}),
            )
            ending.callback(server.wait)
            ending.callback(server.terminate)
            wait_until_ready(port, server)
            phases[name] = Phases(port, file, args)
            phases[name].run("warm")
        for i in range(args.rounds):
            for name in list(phases)[:: 1 if i % 2 else -1]:
                phases[name].run_both(f"{name} {i}")
        for name, found in phases.items():
            for kind, ratios in found.ratios.items():
                print(
                    f"{name}, {kind}: ratio {statistics.median(ratios):.2f} (median), "
                    f"{min(ratios):.2f} to {max(ratios):.2f}"
                )
            print(f"{name}: {found.num_lines} lines were answered beside streams")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    streams = modes.add_parser("first-token")
    streams.add_argument("--lines", type=int, default=5000)
    streams.add_argument("--max-tokens", type=int, default=64)
    streams.add_argument("--streams", type=int, default=4)
    streams.add_argument("--requests", type=int, default=20)
    streams.add_argument("--rounds", type=int, default=3)
    streams.add_argument("--pause", type=float, default=0.0)
    streams.add_argument("--model", default="bundled")
    streams.add_argument("--before")
    modes.add_parser("memory").add_argument("--lines", type=int, default=1_000_000)
    args = parser.parse_args()
    if args.mode == "memory":
        print(json.dumps(memory(args.lines)))
    else:
        first_token(args)


if __name__ == "__main__":
    main()
