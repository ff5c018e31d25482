"""Servers with speculation on the texts of bench_speculation.py, one request at a time, in turns.

    python tests/bench/bench_speculation_peers.py NAME=URL NAME=URL [--rounds 5]

The servers run already, with one model file. A name that begins with "llama" is llama.cpp's server;
others speak vLLM's names. Each round has other names in its texts, because servers remember earlier
answers. A text's prompt is in the prefix cache before it is timed. The result is the median of
tokens per second; answers of several engines need not be equal.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import httpx2 as httpx
from quire.tests.bench.bench_speculation import NUM_TOKENS, SCHEMA, TEXTS

# what stands for these words in a round
WORDS = ["fox", "river", "committee", "call", "Ada", "Turing"]
OTHERS = [
    ["wolf", "lake", "council", "run", "Emmy", "Gauss"],
    ["bear", "hill", "board", "action", "Mary", "Euler"],
    ["hare", "field", "assembly", "work", "Carl", "Noether"],
    ["cat", "garden", "party", "task", "Marie", "Curie"],
    ["bird", "forest", "company", "job", "Max", "Planck"],
    ["horse", "road", "society", "step", "Niels", "Bohr"],
    ["dog", "street", "club", "thing", "Lise", "Meitner"],
]


def variant(text: str, number: int) -> str:
    """The text of a round, with other words."""
    for word, other in zip(WORDS, OTHERS[number % len(OTHERS)]):
        text = text.replace(word, other)
    return text


def body(engine: str, name: str, text: str) -> dict[str, Any]:
    """What is asked of an engine. Only the schema has two names."""
    asked: dict[str, Any] = {"prompt": text, "max_tokens": NUM_TOKENS, "temperature": 0.0}
    if "JSON" not in name:
        return asked | {"ignore_eos": True}
    if engine.startswith("llama"):
        return asked | {"json_schema": SCHEMA}
    return asked | {"structured_outputs": {"json": SCHEMA}}


def speed(client: httpx.Client, asked: dict[str, Any]) -> float:
    """Tokens per second of one request."""
    client.post("/v1/completions", json=asked | {"max_tokens": 1}).raise_for_status()
    begin = time.perf_counter()
    answer = client.post("/v1/completions", json=asked).raise_for_status().json()
    return answer["usage"]["completion_tokens"] / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="+", metavar="NAME=URL")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    clients = {
        name: httpx.Client(base_url=url, timeout=600)
        for name, url in (engine.split("=", 1) for engine in args.engines)
    }
    print("| text | " + " | ".join(clients) + " |\n|---|" + "---|" * len(clients))
    for name, text in TEXTS.items():
        speeds: dict[str, list[float]] = {engine: [] for engine in clients}
        for number in range(args.rounds):
            turn = list(clients)[:: 1 - 2 * (number % 2)]
            for engine in turn:
                asked = body(engine, name, variant(text, number))
                speeds[engine].append(speed(clients[engine], asked))
        cells = [
            f"{statistics.median(of_one):.1f} ({min(of_one):.1f}, {max(of_one):.1f})"
            for of_one in speeds.values()
        ]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
