"""`quire bench cpu`: its flags and its output.

Must not know: how anything is measured, torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ipc.checks import require
from ...ipc.config import resolved
from ..bench.options import require_at_least
from .bench_flags import add_json, write_report
from .flags import engine_flags, given
from .parser import Parser
from .table import print_table

if TYPE_CHECKING:
    from ...ipc.config import EngineConfig
    from ..bench.cpu import CpuLimits, ModelWork, Phase, StepPlan

COLUMNS: dict[str, Callable[[Phase], str]] = {
    "phase": lambda phase: phase.name,
    "requests": lambda phase: str(phase.batch),
    "context": lambda phase: str(phase.context),
    "threads": lambda phase: str(phase.num_threads),
    "ms": lambda phase: f"{1000 * phase.seconds:.2f}",
    "fastest": lambda phase: f"{1000 * phase.fastest_s:.2f}",
    "GB/s": lambda phase: f"{phase.bandwidth / 1e9:.1f}",
    "GOP/s": lambda phase: f"{phase.flops / 1e9:.0f}",
    "limit": lambda phase: f"{1000 * phase.least_s:.2f}",
    "bound by": lambda phase: phase.bound,
    "of the limit": lambda phase: f"{100 * phase.fraction:.0f} %",
}
BATCHES, CONTEXTS = (1, 2, 4, 8, 16, 32, 64), (128, 512, 2048, 8192, 16384)


def cpu_parser(argv: list[str]) -> Parser:
    parser = Parser(
        "bench cpu",
        "[--model NAME] [--sweep] [engine flags]",
        "Measures the memory and arithmetic limits of this CPU, and each phase of a model as a "
        "fraction of that.",
        argv,
    )
    add = parser.group("measurement")
    add("--batch-sizes", "N", "requests per decode step", [1, 32], nargs="+")
    add("--context", "N", "context tokens of each request", 128)
    add("--prefill-len", "N", "tokens of the prompt, at most the model's context", 4096)
    add("--seconds", "S", "for each measurement", 1.0)
    add.switch(
        "--sweep",
        f"also {BATCHES[0]} to {BATCHES[-1]} requests, {CONTEXTS[0]} to {CONTEXTS[-1]} tokens of "
        f"context, 1 to all threads",
    )
    add("--svg", "DIR", "with --sweep: draw the costs, into files in this directory")
    add_json(add)
    parser.add_flags("engine", engine_flags(), ("model", "dtype", "num_threads"))
    return parser


def cpu(argv: list[str]) -> int:
    args = cpu_parser(argv).parse(argv)
    _check(args)
    from ..bench.cpu import ROOM, StepPlan, model_work, run_plan
    from ..engine_args import EngineArgs

    arguments = given(args, engine_flags())
    device = arguments.setdefault("device", "cpu")  # not a GPU that there may be
    require(device == "cpu", "--device", f"must be 'cpu', got {device!r}")
    asked = EngineArgs(arguments.pop("model", "bundled"), **arguments).create_engine_config()
    work, longest = model_work(asked), resolved(asked.model_config.max_model_len)
    plan = StepPlan(
        [(batch, args.context) for batch in args.batch_sizes],
        [max(1, min(args.prefill_len, longest - ROOM))],
        args.seconds,
    )
    limits, phases = run_plan(fitting(asked, plan, work), plan, work, None)
    print(format_limits(limits))
    print(
        f"\na step reads {work.weights_bytes / 1e6:.1f} MB of weights and "
        f"{work.kv_bytes_per_token / 1024:.1f} KiB per token of context\n"
    )
    print_phases(phases)
    swept: dict[str, list[Phase]] = {}
    if args.sweep:
        for name, config, part in sweeps(asked, args, longest, max(limits.read_bandwidth)):
            swept.setdefault(name, []).extend(
                run_plan(fitting(config, part, work), part, work, limits)[1]
            )
        for name, found in swept.items():
            print(f"\nas {name} grow:\n")
            print_phases(found)
        if args.svg:
            draw(Path(args.svg), swept)
    result = {
        "limits": asdict(limits),
        "phases": list(map(asdict, phases)),
        "sweeps": {name: list(map(asdict, found)) for name, found in swept.items()},
    }
    write_report(args, result)
    return 0


def _check(args: argparse.Namespace) -> None:
    require_at_least(
        1, batch_sizes=min(args.batch_sizes), context=args.context, prefill_len=args.prefill_len
    )
    require(args.seconds > 0, "--seconds", f"must be more than 0, got {args.seconds}")
    is_directory = not args.svg or Path(args.svg).is_dir()
    require(is_directory, "--svg", f"must be a directory, got {args.svg!r}")


def fitting(config: EngineConfig, plan: StepPlan, work: ModelWork) -> EngineConfig:
    """Returns the configuration with exactly as much room as the plan needs."""
    from ..engine_args import replace as replaced

    longest = resolved(config.model_config.max_model_len)
    block_size = config.cache_config.block_size
    require(
        plan.max_model_len <= longest,
        "--context",
        f"must leave room for {plan.max_model_len} tokens in total, the model's maximum is "
        f"{longest}",
    )
    num_bytes = max(
        plan.kv_cache_bytes(work.kv_bytes_per_token, block_size),
        2 * longest * work.kv_bytes_per_token,
    )
    return replaced(
        config,
        scheduler_config=replaced(config.scheduler_config, max_num_seqs=plan.max_num_seqs),
        cache_config=replaced(config.cache_config, kv_cache_memory_bytes=num_bytes),
    )


def sweeps(
    config: EngineConfig, args: argparse.Namespace, longest: int, most_threads: int
) -> list[tuple[str, EngineConfig, Any]]:
    """Returns (name of the varied quantity, configuration of the engine, phases to measure) for
    each sweep.
    """
    from ..bench.cpu import ROOM, StepPlan
    from ..engine_args import replace as replaced

    contexts = [context for context in CONTEXTS if context + ROOM <= longest] or [args.context]
    found: list[tuple[str, EngineConfig, Any]] = [
        (
            "requests",
            config,
            StepPlan([(batch, args.context) for batch in BATCHES], [], args.seconds),
        ),
        (
            "tokens of context",
            config,
            StepPlan([(1, context) for context in contexts], [], args.seconds),
        ),
    ]
    counts = sorted({2**i for i in range(most_threads.bit_length())} | {most_threads})
    for count in counts:
        device_config = replaced(config.device_config, num_threads=count)
        plan = StepPlan([(1, args.context)], [min(512, longest - ROOM)], args.seconds)
        found.append(("threads", replaced(config, device_config=device_config), plan))
    return found


def format_limits(limits: CpuLimits) -> str:
    rates = ", ".join(
        f"{rate / 1e9:.1f} GB/s with {count} thread{'s' * (count > 1)}"
        for count, rate in limits.read_bandwidth.items()
    )
    peaks = ", ".join(
        f"{dtype} {rate / 1e9:.0f} {'GOP/s' if dtype == 'int8' else 'GFLOP/s'}"
        for dtype, rate in limits.gemm_flops.items()
    )
    return (
        "this machine reads memory of the size of the weights (at most 1 GiB) at "
        f"{rates},\nand multiplies matrices at {peaks} (best measurements)"
    )


def print_phases(phases: list[Phase]) -> None:
    rows = [[shown(phase) for shown in COLUMNS.values()] for phase in phases]
    print_table(list(COLUMNS), rows, right=frozenset(COLUMNS) - {"phase", "bound by"})


def draw(directory: Path, swept: dict[str, list[Phase]]) -> None:
    from ..bench.plot import line_chart

    grows = {
        "requests": lambda phase: phase.batch,
        "tokens of context": lambda phase: phase.context,
        "threads": lambda phase: phase.num_threads,
    }
    for name, phases in swept.items():
        lines: dict[str, list[tuple[float, float]]] = {}
        for phase in phases:
            x = grows[name](phase)
            lines.setdefault(phase.name, []).append((x, 1000 * phase.seconds))
            lines.setdefault(f"{phase.name}, limit", []).append((x, 1000 * phase.least_s))
        path = directory / f"cost-of-{name.replace(' ', '-')}.svg"
        path.write_text(line_chart(f"A step's cost as {name} grow", name, "ms", lines))
        print(path)
