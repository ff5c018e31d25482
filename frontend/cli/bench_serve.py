"""`quire bench serve`: its flags, the progress line and the destinations of the results.

Must not know: how anything is measured. The measuring modules are imported after the flags have
been checked.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

from ...ipc.checks import require
from ...ipc.errors import InvalidParameterError
from ..bench.options import ServeOptions, WorkloadOptions
from ..bench.workloads import WorkloadRequest, make_requests
from .bench_flags import (
    add_ignore_eos,
    add_json,
    add_workload,
    options_of,
    write_report,
)
from .parser import Parser

if TYPE_CHECKING:
    from ..bench.openai_client import Outcome, RequestOptions
    from ..bench.serve import ServeRun

# Added to the seed for warm-up requests: they resemble the workload, but share no prefix with it.
WARMUP_SEED = 1_000_003


def serve_parser(argv: list[str]) -> Parser:
    parser = Parser(
        "bench serve",
        "--base-url URL [--model NAME] [workload flags]",
        "Sends requests to a server of the OpenAI API and reports throughput and latencies. Ctrl-C "
        "reports the results so far.",
        argv,
    )
    add = parser.group("server")
    add.fields(ServeOptions, "base_url")
    add("--model", "NAME", "name of the model [the first of /v1/models]")
    add.fields(ServeOptions, "api_key")
    add(
        "--endpoint",
        None,
        "/v1/completions or /v1/chat/completions",
        "completions",
        choices=("completions", "chat"),
    )
    add.fields(ServeOptions, "ready_timeout_s", "timeout_s")
    add_workload(parser, tokenizer=True)
    add = parser.group("load")
    add.fields(ServeOptions, "request_rate", "burstiness", "max_concurrency", "num_warmups", "seed")
    add("--temperature", "X", "sent if given", rare=True)
    add(
        "--extra-body",
        "JSON",
        "JSON object of fields to send with every request; null removes a field",
        rare=True,
    )
    add.switch("--no-usage", "do not request token counts (stream_options)", rare=True)
    add(
        "--goodput",
        "METRIC:MS",
        "count requests that keep these limits in ms, e.g. ttft:200 tpot:50",
        [],
        nargs="+",
    )
    add_ignore_eos(add, False)
    add_json(add)
    return parser


def serve(argv: list[str]) -> int:
    args = serve_parser(argv).parse(argv)

    from dataclasses import replace

    from ..bench.openai_client import RequestOptions
    from ..bench.report import format_results, results_as_json
    from ..bench.statistics import parse_goodput, summarize_run

    require(
        not args.token_ids or args.endpoint != "chat",
        "--token-ids",
        "requires --endpoint completions, because chat messages are text",
    )
    limits = parse_goodput(args.goodput)
    args.api_key = args.api_key or os.environ.get("OPENAI_API_KEY")
    options = options_of(
        ServeOptions, args, ready_timeout_s=args.ready_timeout, timeout_s=args.timeout
    )
    request_options = RequestOptions(
        args.model,
        args.endpoint,
        not args.no_usage,
        args.ignore_eos,
        args.temperature,
        _json_object("--extra-body", args.extra_body),
    )
    workload = options_of(WorkloadOptions, args)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    requests, warmups = make_requests(workload, tokenizer), []
    if args.num_warmups:
        warmup = replace(workload, num_prompts=args.num_warmups, seed=args.seed + WARMUP_SEED)
        warmups = make_requests(warmup, tokenizer)
    run = _run_serve(options, request_options, requests, warmups, tokenizer)
    report, args.model = run.report, run.model
    outcomes = [outcome for outcome in report.outcomes if outcome is not None]
    results = summarize_run(outcomes, report.duration_s, limits)
    print(f"{args.endpoint} of {run.model} at {args.base_url}: {describe_workload(args)}\n")
    print(format_results(report, results, limits))
    write_report(args, results_as_json(report, results))
    return 130 if report.was_interrupted else 0 if results.num_successes else 1


def _run_serve(
    options: ServeOptions,
    request_options: RequestOptions,
    requests: list[WorkloadRequest],
    warmups: list[WorkloadRequest],
    tokenizer: Any,
) -> ServeRun:
    """Runs on uvloop, which halves the client's cost per chunk."""
    import asyncio

    from ..bench.serve import run_serve

    try:
        from uvloop import new_event_loop
    except ImportError:  # uvloop does not support Windows
        from asyncio import new_event_loop
    bar = RequestBar(sum(1 + len(request.follow_ups) for request in requests))
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(
                run_serve(
                    options, request_options, requests, warmups, tokenizer, bar.start, bar.add
                )
            )
    finally:
        bar.close()


class RequestBar:
    """Shows the completed requests, including failures, in one line on stderr if that is a
    terminal.
    """

    def __init__(self, total: int):
        self.total, self.num_failures, self._bar = total, 0, None

    def start(self) -> None:
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # no monitor thread beside the event loop
        self._bar = tqdm(
            total=self.total, desc="requests", dynamic_ncols=True, disable=None, mininterval=0.5
        )

    def add(self, outcome: Outcome) -> None:
        if self._bar is not None:
            self.num_failures += outcome.failure is not None
            if self.num_failures:
                self._bar.set_postfix_str(f"{self.num_failures} failed", refresh=False)
            self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def describe_workload(args: argparse.Namespace) -> str:
    limit = f", at most {args.max_concurrency} at a time" if args.max_concurrency else ""
    rate = "all at once" if args.request_rate == float("inf") else f"{args.request_rate:g} a second"
    return f"{args.num_prompts} x {args.dataset_name}, {rate}{limit}, seed {args.seed}"


def load_tokenizer(name: str) -> Any:
    from ..model_info.model_files import find_model_directory
    from ..text.tokenizer import Tokenizer

    return Tokenizer(find_model_directory(name, weights=False))


def _json_object(flag: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise InvalidParameterError(
            flag, f"must be a JSON object, got {text!r} ({error})"
        ) from None
    if not isinstance(value, dict):
        raise InvalidParameterError(flag, f"must be a JSON object, got {text!r}")
    return value
