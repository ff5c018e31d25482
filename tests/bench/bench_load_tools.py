"""Load generators of others beside `quire bench serve`, with one load on one server.

    python tests/clients/environments.py install guidellm aiperf llama-benchy vllm
    python3.12 tests/clients/environments.py install inference-perf
    python tests/bench/bench_load_tools.py [NAME …] [--rounds 3] [--requests 8] [--concurrency 1]
        [--output-len 24] [--address URL] [--tokenizer FOLDER]

They take turns, in rounds. Prints a Markdown table of medians, and of the rounds' ratios to Quire's
figures: what is to be seen is whether the tools agree, not how fast the machine is. The server has
the bundled model; --address names another server whose model is called quire, and --tokenizer its
tokenizer, if that is not the bundled model's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path

import quire
from quire.tests.clients.environments import environments, server_of
from quire.tests.clients.load_tools import TOOLS, Figures, Load, measure, programs_here

TOKENIZER = Path(quire.__file__).parent / "frontend" / "bundled_model"
OWN = "quire"


def programs_of(name: str) -> Path:
    """Return the folder of a tool's programs. Ends the program if it is not installed."""
    folder = programs_here() if name == OWN else environments() / name / "bin"
    if not folder.exists():
        sys.exit(f"{name} is not installed: python tests/clients/environments.py install {name}")
    return folder


def table(rounds: list[dict[str, Figures]]) -> str:
    """Return a row for each tool."""
    lines = [
        "| tool | requests | output tokens/s | to Quire's | mean TTFT, ms | to Quire's |",
        "|---|---|---|---|---|---|",
    ]
    for name in rounds[0]:
        found = [of_round[name] for of_round in rounds]
        own = [of_round[OWN] for of_round in rounds]
        cells = [name, str(sum(one.num_requests for one in found))]
        for field in ("output_tokens_per_s", "ttft_ms"):
            pairs = [(getattr(a, field), getattr(b, field)) for a, b in zip(found, own)]
            cells.append(f"{statistics.median(a for a, _ in pairs):.1f}")
            cells.append(f"{statistics.median(a / b for a, b in pairs):.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    others = [name for name in TOOLS if name != OWN]
    parser.add_argument("names", nargs="*", metavar="NAME", default=others)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=Load.num_requests)
    parser.add_argument("--concurrency", type=int, default=Load.concurrency)
    parser.add_argument("--output-len", type=int, default=Load.output_len)
    parser.add_argument("--address")
    parser.add_argument("--tokenizer", default=str(TOKENIZER))
    args = parser.parse_args()
    programs = {name: programs_of(name) for name in [OWN, *args.names]}
    load = Load(args.requests, args.concurrency, output_len=args.output_len)
    rounds: list[dict[str, Figures]] = []
    with nullcontext(args.address) if args.address else server_of((), "") as address:
        for _ in range(args.rounds):
            rounds.append({})
            for name, folder in programs.items():
                rounds[-1][name] = measure(name, address, args.tokenizer, load, folder)
                print(name, rounds[-1][name], file=sys.stderr, flush=True)
    print(table(rounds))


if __name__ == "__main__":
    main()
