"""What a decode step costs outside the model: the engine over a model that computes nothing.

    python tests/bench/bench_overhead.py [--batches 1 32 128] [--vocabs 2048 151936]
    [--modes inproc process] [--profile] [--write]

In one process and in two. Microseconds per step. "median" and "quiet" (the tenth percentile,
without disturbances by other processes) are what the caller of LLMEngine.step sees, measured
without a timer inside. The parts come from a second run with timers and are tenth percentiles; the
difference between "step" and their sum is the loop between them. "process": the engine is in a
child process, where the frontend's part overlaps with the engine's next step. Steps arrive in
bursts there, so both numbers are of means over 50 steps each. The model's program, argmax included,
takes no time here: other benchmarks measure it.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from quire import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from quire.tests.bench.report import hardware, write_result
from quire.tests.executor.on_device import use_forward

SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}
CHOICES = {
    "greedy": {"temperature": 0.0},
    "sampled": SAMPLED,
    "temperature": {"temperature": 0.8},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}
NUM_PROMPT_TOKENS = 16
BURST = 50  # steps
COMMAND = [sys.executable, "-P", "-m", "quire.tests.bench.bench_overhead", "--as-engine"]
# column -> (one of the step's objects, its method). A column's time excludes that of the columns
# before it, which it calls.
PARTS = {
    "schedule": ("core", "_schedule"),
    "prepare": ("runner", "make_inputs"),
    "model": ("runner", "program"),
    "sample": ("runner", "sampler"),
    "rows": ("executor", "execute_model"),
    "process": ("core", "_process_model_outputs"),
    "frontend": ("output_processor", "process_outputs"),
}


class StubProgram:
    """Replaces a step's program. Hidden states are the rows' numbers; each row always has the same
    logits and the same argmax. No token of the bundled model is much more likely than others.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int):
        import torch

        torch.manual_seed(0)
        self.logits = 2.5 * torch.randn(max_num_seqs, vocab_size)
        self.logits[:, :2048] += 2.5
        self.hidden = torch.zeros(2**16, 1)
        self.largest, self.is_finite = (
            self.logits.argmax(1),
            torch.ones(max_num_seqs, dtype=torch.bool),
        )

    def __call__(
        self, token_ids: Any, positions: Any, metadata: Any, logits_indices: Any
    ) -> tuple[Any, ...]:
        num_rows = len(logits_indices)
        return (
            self.hidden[: len(token_ids)],
            self.logits[:num_rows],
            self.largest[:num_rows],
            self.is_finite[:num_rows],
        )


def make_executor(config: Any) -> Any:
    from quire.executor.worker import Worker

    class StubExecutor(Worker):
        def initialize_kv_cache(self, num_blocks: int) -> int:
            num_bytes = super().initialize_kv_cache(num_blocks)
            vocab_size = self.model.config.vocab_size
            use_forward(self, StubProgram(vocab_size, config.scheduler_config.max_num_seqs))
            return num_bytes

    return StubExecutor(config)


def make_engine(vocab_size: int, mode: str, num_steps: int, async_scheduling: bool) -> LLMEngine:
    args = EngineArgs(
        max_model_len=2048,
        max_num_seqs=128,
        num_gpu_blocks_override=128 * (num_steps // 16 + 3),
        load_format="dummy",
        num_scheduler_steps=1,
        # there is no work to share, and idle threads would be woken for it between steps
        num_threads=1,
        hf_overrides={"vocab_size": vocab_size, "hidden_size": 64, "num_hidden_layers": 1},
        swap_space=0.0,
        disable_log_stats=True,
        async_scheduling=async_scheduling,
    )
    config = args.create_engine_config()
    if mode == "inproc":
        from quire.frontend.clients.inproc_client import InprocClient

        return LLMEngine(config, InprocClient(config, executor=make_executor(config)))
    from quire.frontend.clients.mp_client import MPClient
    from quire.tests.fake_engine import open_blocking

    return LLMEngine(config, open_blocking(MPClient.start(config, command=COMMAND)))


def run(engine: LLMEngine, batch: int, params: SamplingParams, prefix: str) -> list[float]:
    """Seconds of each decode step except the first ones."""
    for i in range(batch):
        engine.add_request(
            f"{prefix}-{i}",
            {"prompt_token_ids": [2 + (i * 7 + j) % 2000 for j in range(NUM_PROMPT_TOKENS)]},
            params,
        )
    times = []
    while engine.has_unfinished_requests():
        begin = perf_counter()
        engine.step()
        times.append(perf_counter() - begin)
    return times[8:-8]


def add_timers(engine: LLMEngine) -> dict[str, list[float]]:
    """Records seconds by part and step from now on."""
    core = engine.client._engine.core
    objects = SimpleNamespace(
        core=core,
        executor=core.executor,
        runner=core.executor.runner,
        output_processor=engine.session.output_processor,
    )
    spent: dict[str, list[float]] = {part: [] for part in PARTS}
    inside = 0.0

    def timed(part: str, function: Callable) -> Callable:
        def call(*args: Any) -> Any:
            nonlocal inside
            before, inside = inside, 0.0
            begin = perf_counter()
            result = function(*args)
            whole = perf_counter() - begin
            spent[part].append(whole - inside)
            inside = before + whole
            return result

        return call

    for part, (owner, name) in PARTS.items():
        target = getattr(objects, owner)
        setattr(target, name, timed(part, getattr(target, name)))
    return spent


def quiet(times: list[float]) -> float:
    """Microseconds: the tenth percentile."""
    return 1e6 * sorted(times)[len(times) // 10]


def measure(
    vocab_size: int, mode: str, batch: int, choice: str, args: argparse.Namespace
) -> dict[str, float]:
    """Microseconds per step by column."""
    num_steps = (
        args.steps if vocab_size * batch < 2**21 or choice == "greedy" else max(40, args.steps // 8)
    )
    params = SamplingParams(
        **CHOICES[choice],
        seed=1,
        max_tokens=num_steps,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    engine = make_engine(vocab_size, mode, num_steps, args.async_scheduling)
    try:
        run(engine, batch, params, "warm")
        rounds = [run(engine, batch, params, str(i)) for i in range(args.rounds)]
        if mode == "process":
            size = min(BURST, len(rounds[0]))
            rounds = [
                [
                    statistics.mean(times[i : i + size])
                    for i in range(0, len(times) - size + 1, size)
                ]
                for times in rounds
            ]
        times = [seconds for times in rounds for seconds in times]
        row = {"median": 1e6 * statistics.median(times), "quiet": quiet(times)}
        if mode == "inproc":
            spent = add_timers(engine)
            row |= {"step": quiet(run(engine, batch, params, "timed"))} | {
                part: quiet(times) for part, times in spent.items()
            }
            if args.profile:
                with cProfile.Profile() as profile:
                    run(engine, batch, params, "profiled")
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return row
    finally:
        engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--vocabs", type=int, nargs="+", default=[2048, 151936])
    parser.add_argument(
        "--modes", nargs="+", default=["inproc", "process"], choices=["inproc", "process"]
    )
    parser.add_argument(
        "--choices", nargs="+", default=["greedy", "sampled"], choices=list(CHOICES)
    )
    parser.add_argument(
        "--steps", type=int, default=400, help="tokens per request; fewer where they take long"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--async-scheduling", action="store_true")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="print where the time goes, function by function (in one process)",
    )
    parser.add_argument(
        "--write", action="store_true", help="append the result to tests/bench/results/"
    )
    args = parser.parse_args()
    print(f"{hardware()}; microseconds per step")
    print(f"{'':34}" + "".join(f"{column:>10}" for column in ("median", "quiet", "step", *PARTS)))
    results = {}
    for vocab_size in args.vocabs:
        for choice in args.choices:
            for mode in args.modes:
                for batch in args.batches:
                    row = measure(vocab_size, mode, batch, choice, args)
                    name = f"{vocab_size} {choice} {mode} {batch}"
                    results[name] = row
                    print(
                        f"{name:34}" + "".join(f"{number:10.0f}" for number in row.values()),
                        flush=True,
                    )
    if args.write:
        print(write_result("none", "overhead", results))


if __name__ == "__main__":
    if "--as-engine" in sys.argv:
        from quire.core.engine_proc import leave
        from quire.core.engine_proc import main as engine_main

        sys.argv.remove("--as-engine")
        leave(engine_main(make_executor=make_executor))
    main()
