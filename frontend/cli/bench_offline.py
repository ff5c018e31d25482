"""`quire bench throughput`, `latency` and `embed`: their flags, their engine and their output.

Must not know: how an engine is reached, HTTP, torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from ...ipc.errors import InvalidParameterError
from ..bench.options import WorkloadOptions, require_at_least
from ..bench.workloads import WorkloadRequest, make_requests
from .bench_flags import (
    add_ignore_eos,
    add_json,
    add_workload,
    options_of,
    write_report,
)
from .flags import ENGINE, engine_flags, given
from .parser import Parser
from .session import COMMON_ENGINE

if TYPE_CHECKING:
    from ...ipc.params import SamplingParams
    from ..bench.offline import OfflineRun, Phases, ReadLimit, Steps
    from ..llm import LLM


def throughput_parser(argv: list[str]) -> Parser:
    parser = Parser(
        "bench throughput",
        "[--model NAME] [workload flags] [engine flags]",
        "Submits all requests to the offline engine at once and reports tokens per second.",
        argv,
    )
    add_workload(parser, tokenizer=False)
    _add_run(parser)
    return parser


def latency_parser(argv: list[str]) -> Parser:
    parser = Parser(
        "bench latency",
        "[--batch-size N] [--input-len N] [--output-len N] [engine flags]",
        "Runs one batch repeatedly and reports its time and what the machine's memory would allow.",
        argv,
    )
    add = parser.group("batch")
    add("--batch-size", "N", "requests per batch", 8)
    add("--input-len", "N", "tokens of each prompt", 32)
    add("--output-len", "N", "tokens of each answer", 128)
    add("--num-iters", "N", "measured runs of the batch", 10)
    add("--num-iters-warmup", "N", "runs before those", 2, rare=True)
    _add_run(parser)
    return parser


def _add_run(parser: Parser) -> None:
    add = parser.group("run")
    add_ignore_eos(add, True)
    add_json(add)
    add("--temperature", "X", "0: greedy", 1.0, rare=True)
    parser.add_flags("engine", [*engine_flags(), ENGINE], COMMON_ENGINE)


def throughput(argv: list[str]) -> int:
    args = throughput_parser(argv).parse(argv)
    options = options_of(WorkloadOptions, args)
    with open_llm(args) as llm:
        from ..bench.offline import run_throughput
        from ..bench.report import milliseconds_table

        requests, params, limit = _prepare(llm, options, args)
        run = run_throughput(llm, requests, params, use_tqdm=sys.stderr.isatty())
    print(format_throughput(run, len(requests)))
    phases = [
        ("in the queue", "queued_time"),
        ("prefill, first step to first token", "prefill_time"),
        ("decode, first to last token", "decode_time"),
    ]
    print("\nper request, ms, measured by the engine")
    print("\n".join(milliseconds_table([(title, run.phases[phase]) for title, phase in phases])))
    print("\n" + format_steps(run.steps, limit))
    write_report(args, {"read_limit": asdict(limit), "num_requests": len(requests), **asdict(run)})
    return 1 if run.num_failures == len(requests) else 0


def format_throughput(run: OfflineRun, num_requests: int) -> str:
    num_tokens = run.num_input_tokens + run.num_output_tokens
    lines = [
        f"{num_requests} requests in {run.seconds:.2f} s: {num_requests / run.seconds:.2f} "
        f"requests/s",
        f"{run.num_input_tokens} tokens in, {run.num_output_tokens} out: "
        f"{run.num_output_tokens / run.seconds:.1f} output tokens/s, "
        f"{num_tokens / run.seconds:.1f} tokens/s in total",
    ]
    if run.num_failures:
        lines.append(f"{run.num_failures} requests failed; the first: {run.first_error}")
    return "\n".join(lines)


def format_steps(steps: Steps, limit: ReadLimit) -> str:
    """Returns text about the last steps: the share of each phase, and the decode-only steps
    compared with the minimum set by memory bandwidth.
    """
    total = steps.schedule_s + steps.execute_s + steps.process_s or 1.0
    parts = {"schedule": steps.schedule_s, "execute": steps.execute_s, "process": steps.process_s}
    shares = [f"{name} {100 * seconds / total:.1f} %" for name, seconds in parts.items()]
    text = f"the last {steps.count} steps: {', '.join(shares)}"
    if steps.decode_step_s is None:
        return text
    return (
        f"{text}\ndecode-only step of {steps.decode_batch:.0f} requests: "
        f"{1000 * steps.decode_step_s:.2f} ms (median); "
        f"reading the weights once takes {1000 / limit.max_steps_per_s:.2f} ms on this machine"
    )


def latency(argv: list[str]) -> int:
    args = latency_parser(argv).parse(argv)
    require_at_least(1, batch_size=args.batch_size, num_iters=args.num_iters)
    require_at_least(0, num_iters_warmup=args.num_iters_warmup)
    require_at_least(2, output_len=args.output_len)
    options = WorkloadOptions(
        num_prompts=args.batch_size,
        input_len=args.input_len,
        output_len=args.output_len,
        token_ids=True,
        seed=getattr(args, "seed", 0),
    )
    with open_llm(args) as llm:
        from ..bench.offline import run_latency
        from ..bench.report import milliseconds_table
        from ..bench.statistics import summarize

        requests, params, limit = _prepare(llm, options, args)
        run_latency(llm, requests, params, args.num_iters_warmup, use_tqdm=False)
        seconds, phases = run_latency(llm, requests, params, args.num_iters, use_tqdm=True)
    rows = [
        ("the batch", summarize(seconds)),
        ("prefill, first step to first tokens", summarize(phase.prefill_s for phase in phases)),
        ("decode, from there to the last token", summarize(phase.decode_s for phase in phases)),
    ]
    print(
        f"{args.batch_size} x ({args.input_len} tokens in, {args.output_len} out), "
        f"{args.num_iters} times; ms\n"
    )
    print("\n".join(milliseconds_table(rows)))
    print("\n" + format_phases(phases, limit, args.batch_size))
    result = {"seconds": seconds, "phases": list(map(asdict, phases)), "read_limit": asdict(limit)}
    write_report(args, result)
    return 0


def format_phases(phases: list[Phases], limit: ReadLimit, batch_size: int) -> str:
    """Returns the rates of the median run. A decode step produces one token for each request of the
    batch.
    """
    prefill = sorted(phases, key=lambda phase: phase.prefill_s)[len(phases) // 2]
    decode = sorted(phases, key=lambda phase: phase.decode_s)[len(phases) // 2]
    prefill_rate = prefill.num_prefill_tokens / prefill.prefill_s
    if not decode.decode_s:  # with --num-scheduler-steps
        return f"prefill {prefill_rate:.0f} tokens/s (median); all tokens were produced in one step"
    decode_rate = decode.num_decode_tokens / decode.decode_s
    steps = decode_rate / batch_size
    return "\n".join(
        [
            f"prefill {prefill_rate:.0f} tokens/s, decode {decode_rate:.0f} tokens/s (medians)",
            f"decode {steps:.0f} steps/s read {steps * limit.weight_bytes / 1e9:.2f} GB/s of "
            f"weights; "
            f"this machine reads {limit.weight_bytes / 1e6:.1f} MB at {limit.bandwidth / 1e9:.2f} "
            f"GB/s: {100 * steps / limit.max_steps_per_s:.0f} % of its limit",
        ]
    )


def embed_parser(argv: list[str]) -> Parser:
    parser = Parser(
        "bench embed",
        "[--model NAME] [--batch-size N] [--input-len N] [engine flags]",
        "Embeds batches of texts one after the other, each text once, and reports texts and tokens "
        "per second.",
        argv,
    )
    add = parser.group("batch")
    add("--batch-size", "N", "texts per batch", 32)
    add("--input-len", "N", "tokens of each text, without the special ones", 32)
    add("--num-iters", "N", "measured batches", 20)
    add("--num-iters-warmup", "N", "batches before those", 2, rare=True)
    add_json(parser.group("run"))
    parser.add_flags("engine", [*engine_flags(), ENGINE], COMMON_ENGINE)
    return parser


def embed(argv: list[str]) -> int:
    args = embed_parser(argv).parse(argv)
    require_at_least(1, batch_size=args.batch_size, num_iters=args.num_iters)
    require_at_least(0, num_iters_warmup=args.num_iters_warmup)
    num_batches = args.num_iters_warmup + args.num_iters
    with open_llm(args) as llm:
        from ..bench.offline import run_embed
        from ..bench.report import milliseconds_table
        from ..bench.statistics import summarize

        tokenizer = llm.get_tokenizer()
        if tokenizer is None:
            problem = "the tokenizer is needed to generate texts"
            raise InvalidParameterError("skip_tokenizer_init", problem)
        options = WorkloadOptions(
            num_prompts=args.batch_size * num_batches,
            input_len=args.input_len,
            seed=getattr(args, "seed", 0),
        )
        texts = [str(request.prompt) for request in make_requests(options, tokenizer)]
        batches = [texts[i::num_batches] for i in range(num_batches)]
        run_embed(llm, batches[: args.num_iters_warmup])
        seconds, num_tokens = run_embed(llm, batches[args.num_iters_warmup :])
    summary = summarize(seconds)
    assert summary is not None  # there is at least one batch
    print(
        f"{args.num_iters} batches of {args.batch_size} texts, {num_tokens} tokens; ms\n\n"
        + "\n".join(milliseconds_table([("a batch", summary)]))
        + f"\n\n{args.batch_size / summary.percentiles[50]:.1f} texts/s (median), "
        f"{num_tokens / sum(seconds):.0f} tokens/s"
    )
    write_report(args, {"seconds": seconds, "num_tokens": num_tokens})
    return 0


@contextmanager
def open_llm(args: argparse.Namespace) -> Iterator[LLM]:
    """Yields the engine that the flags configure. Its default seed is 0, so that runs are
    comparable.
    """
    from ..llm import LLM

    arguments = given(args, engine_flags())
    with LLM(
        arguments.pop("model", "bundled"),
        engine=getattr(args, "engine", ENGINE.default),
        **arguments,
    ) as llm:
        yield llm


def _prepare(
    llm: LLM, options: WorkloadOptions, args: argparse.Namespace
) -> tuple[list[WorkloadRequest], list[SamplingParams], ReadLimit]:
    """Returns the requests and their parameters, and the limit, which is measured while the engine
    is idle.
    """
    from ..bench.offline import measure_read_limit, sampling_params

    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        problem = "the tokenizer is needed to generate prompts"
        raise InvalidParameterError("skip_tokenizer_init", problem)
    requests = make_requests(options, tokenizer)
    params = sampling_params(
        requests,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        seed=options.seed,
    )
    return requests, params, measure_read_limit(llm.llm_engine.config)
