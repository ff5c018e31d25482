"""The first token of interactive streams with and without a batch behind them; and the memory of a
batch of many lines.

    python tests/bench/bench_batches.py first-token [--lines 5000] [--max-tokens 64] [--streams 4]
                                                    [--requests 20] [--rounds 3] [--model bundled]
    python tests/bench/bench_batches.py memory [--lines 1000000]

first-token: phases without and with a batch take turns on one server. In each, --streams clients
send one request after the other. The goal: the median first token beside a batch is at most 1.2
times that without. `memory` runs a batch whose lines are answered at once, without a server or an
engine, and prints how much the process has grown at its largest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
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


def write_lines(path: Path, num_lines: int, **body: Any) -> None:
    with path.open("w") as file:
        for i in range(num_lines):
            asked = {"prompt": f"{i} is the number of this line", **body}
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


async def first_tokens(address: str, args: argparse.Namespace, name: str) -> list[float]:
    """Seconds to the first token, of streams that send one request after the other."""
    from quire.frontend.bench.http_client import HttpClient
    from quire.frontend.bench.openai_client import RequestOptions, stream_request

    options = RequestOptions(endpoint="completions", ignore_eos=True, temperature=0.0)
    client = HttpClient(f"{address}/v1", {}, 600)

    async def stream(number: int) -> list[float]:
        found = []
        for i in range(args.requests):
            prompt = f"{name} {number} {i} asks a short question"
            outcome = await stream_request(client, options, prompt, 16)
            assert outcome.failure is None, outcome.failure_text
            found.append(outcome.token_times[0] - outcome.start)
        return found

    try:
        streams = await asyncio.gather(*map(stream, range(args.streams)))
    finally:
        client.close()
    return [seconds for one in streams for seconds in one]


def measure(address: str, file: Path, args: argparse.Namespace) -> None:
    import httpx2 as httpx

    def median(name: str) -> float:
        return statistics.median(asyncio.run(first_tokens(address, args, name)))

    with httpx.Client(base_url=f"{address}/v1", timeout=60) as client:

        def wait_for(batch_id: str, statuses: tuple[str, ...], num_completed: int = 0) -> None:
            while True:
                found = client.get(f"/batches/{batch_id}").json()
                counts = found["request_counts"]
                if found["status"] in statuses and counts["completed"] >= num_completed:
                    return
                time.sleep(0.1)

        sent = client.post(
            "/files", files={"file": file.read_bytes()}, data={"purpose": "batch"}
        ).json()
        body = {"input_file_id": sent["id"], "endpoint": URL, "completion_window": "24h"}
        median("warm")
        ratios = []
        for i in range(args.rounds):
            alone = median(f"alone {i}")
            batch_id = client.post("/batches", json=body).json()["id"]
            wait_for(batch_id, ("in_progress",), num_completed=1)
            beside = median(f"beside {i}")
            client.post(f"/batches/{batch_id}/cancel")
            wait_for(batch_id, ("cancelled", "completed"))
            ratios.append(beside / alone)
            print(f"{1e3 * alone:.1f} ms alone, {1e3 * beside:.1f} ms beside a batch")
        print(f"ratio: median {statistics.median(ratios):.2f}, most {max(ratios):.2f} (goal: 1.2)")


def first_token(args: argparse.Namespace) -> None:
    from quire.tests.bench.servers import free_port, wait_until_ready

    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--port", str(port), "--no-access-log", "--batch-dir", f"{folder}/batches"]
        server = subprocess.Popen([sys.executable, "-m", "quire", "serve", args.model, *flags])
        try:
            wait_until_ready(port, server)
            file = Path(folder) / "lines.jsonl"
            write_lines(file, args.lines, max_tokens=args.max_tokens, ignore_eos=True)
            measure(f"http://127.0.0.1:{port}", file, args)
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    streams = modes.add_parser("first-token")
    streams.add_argument("--lines", type=int, default=5000)
    streams.add_argument("--max-tokens", type=int, default=64)
    streams.add_argument("--streams", type=int, default=4)
    streams.add_argument("--requests", type=int, default=20)
    streams.add_argument("--rounds", type=int, default=3)
    streams.add_argument("--model", default="bundled")
    modes.add_parser("memory").add_argument("--lines", type=int, default=1_000_000)
    args = parser.parse_args()
    if args.mode == "memory":
        print(json.dumps(memory(args.lines)))
    else:
        first_token(args)


if __name__ == "__main__":
    main()
