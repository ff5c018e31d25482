"""`quire bench serve`: its flags, the progress line and the destinations of the results.

Must not know: how anything is measured. The measuring modules are imported after the flags have
been checked.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from ...ipc.errors import InvalidParameterError
from ..bench.workloads import Request, make_requests
from .bench_flags import Adder, add_sampling, add_workload, settings_of, workload_options
from .parser import Parser

if TYPE_CHECKING:
    from ..bench.openai_client import Outcome, RequestOptions
    from ..bench.serve import ServeOptions, ServeRun

# Added to the seed for warm-up requests: they resemble the workload, but share no prefix with it.
WARMUP_SEED = 1_000_003


def serve_parser(argv: list[str]) -> Parser:
    parser = Parser(
        "quire bench serve",
        "quire bench serve --base-url URL [--model NAME] [workload flags]",
        "Sends requests to a server of the OpenAI API and reports throughput and latencies. Ctrl-C "
        "reports the results so far.",
        show_all="--help-all" in argv,
    )
    add = Adder(parser, "server")
    add(
        "--base-url",
        "the server, with or without /v1",
        default="http://127.0.0.1:8000",
        metavar="URL",
    )
    add("--model", "name of the model [the first of /v1/models]", metavar="NAME")
    add("--api-key", "API key [$OPENAI_API_KEY]", metavar="KEY")
    add(
        "--endpoint",
        "/v1/completions or /v1/chat/completions",
        choices=("completions", "chat"),
        default="completions",
    )
    add(
        "--ready-timeout",
        "seconds to wait for a server that is starting",
        rare=True,
        type=float,
        default=0.0,
        metavar="S",
    )
    add(
        "--timeout",
        "timeout of a request in seconds",
        rare=True,
        type=float,
        default=3600.0,
        metavar="S",
    )
    add_workload(parser, num_prompts=200, tokenizer=True)
    add = Adder(parser, "load")
    add(
        "--request-rate",
        "requests per second; inf: all at once",
        type=float,
        default=float("inf"),
        metavar="X",
    )
    add(
        "--burstiness",
        "1: Poisson arrivals; below 1: bursts; above 1: more regular (gamma distribution)",
        rare=True,
        type=float,
        default=1.0,
        metavar="X",
    )
    add(
        "--max-concurrency",
        "maximum number of concurrent requests [no limit]",
        type=int,
        metavar="N",
    )
    add(
        "--num-warmups",
        "requests before the measurement",
        rare=True,
        type=int,
        default=1,
        metavar="N",
    )
    add(
        "--seed",
        "equal seeds produce equal prompts and arrival times",
        rare=True,
        type=int,
        default=0,
        metavar="N",
    )
    add("--temperature", "sent if given", rare=True, type=float, metavar="X")
    add(
        "--extra-body",
        "JSON object of fields to send with every request; null removes a field",
        rare=True,
        metavar="JSON",
    )
    add(
        "--no-usage",
        "do not request token counts (stream_options)",
        rare=True,
        action="store_true",
    )
    add(
        "--goodput",
        "count requests that keep these limits in ms, e.g. ttft:200 tpot:50",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
    )
    add_sampling(add, ignore_eos=False)
    return parser


def serve(argv: list[str]) -> int:
    args = serve_parser(argv).parse(argv)

    from dataclasses import replace

    from ..bench.openai_client import RequestOptions
    from ..bench.report import format_results, results_as_json, write_json
    from ..bench.serve import ServeOptions
    from ..bench.statistics import parse_goodput, summarize_run

    if args.token_ids and args.endpoint == "chat":
        raise InvalidParameterError(
            "--token-ids", "requires --endpoint completions, because chat messages are text"
        )
    limits = parse_goodput(args.goodput)
    timing = {"ready_timeout_s": args.ready_timeout, "timeout_s": args.timeout}
    names = ("base_url", "request_rate", "burstiness", "max_concurrency", "num_warmups", "seed")
    options = ServeOptions(
        api_key=args.api_key or _key_of_environment(),
        **timing,
        **{name: getattr(args, name) for name in names},
    )
    request_options = RequestOptions(
        args.model,
        args.endpoint,
        not args.no_usage,
        args.ignore_eos,
        args.temperature,
        _json_object("--extra-body", args.extra_body),
    )
    workload = workload_options(args, args.seed)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    requests = make_requests(workload, tokenizer)
    warmup = (
        replace(workload, num_prompts=args.num_warmups, seed=args.seed + WARMUP_SEED)
        if args.num_warmups
        else None
    )
    run = _run_serve(
        options,
        request_options,
        requests,
        make_requests(warmup, tokenizer) if warmup else [],
        tokenizer,
    )
    report = run.report
    results = summarize_run(
        [outcome for outcome in report.outcomes if outcome is not None], report.duration_s, limits
    )
    print(f"{args.endpoint} of {run.model} at {args.base_url}: {describe_workload(args)}\n")
    print(format_results(report, results, limits))
    if args.json:
        write_json(
            args.json, results_as_json(report, results, settings_of(args) | {"model": run.model})
        )
    return 130 if report.was_interrupted else 0 if results.num_successes else 1


def _run_serve(
    options: ServeOptions,
    request_options: RequestOptions,
    requests: list[Request],
    warmups: list[Request],
    tokenizer: Any,
) -> ServeRun:
    """Runs on uvloop, which halves the client's cost per chunk."""
    import asyncio

    from ..bench.serve import run_serve

    try:
        from uvloop import new_event_loop
    except ImportError:  # uvloop does not support Windows
        from asyncio import new_event_loop
    bar = Bar(sum(1 + len(request.follow_ups) for request in requests))
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(
                run_serve(
                    options, request_options, requests, warmups, tokenizer, bar.start, bar.add
                )
            )
    finally:
        bar.close()


class Bar:
    """One line on stderr if that is a terminal: completed requests, including failures."""

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


def _key_of_environment() -> str | None:
    import os

    return os.environ.get("OPENAI_API_KEY")


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
