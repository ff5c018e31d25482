"""`quire bench serve`: warms a server up, applies the load, and returns the report, also on Ctrl-C.

Must not know: command lines, how results are printed.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from ...ipc.errors import QuireError
from ...ipc.process import ignores_interrupts
from .http_client import CONNECTION_FAILED, CONNECTION_REFUSED, Failure, HttpClient
from .load import LoadReport, LoadRunner, arrival_times
from .openai_client import Outcome, RequestOptions, first_model, stream_request
from .options import ServeOptions
from .workloads import PromptTokenizer, WorkloadRequest

POLL_INTERVAL_S = 1.0
# Single-model servers without /v1/models ignore the name.
NO_MODEL_NAME = "default"


class BenchmarkError(QuireError):
    """The server could not be measured at all."""


@dataclass(frozen=True)
class ServeRun:
    model: str
    report: LoadReport


def with_v1(base_url: str) -> str:
    """Accepts http://host:port, .../v1 and .../v1/."""
    base_url = base_url.rstrip("/")
    return base_url if base_url.endswith("/v1") else base_url + "/v1"


async def run_serve(
    options: ServeOptions,
    request_options: RequestOptions,
    requests: list[WorkloadRequest],
    warmups: list[WorkloadRequest],
    tokenizer: PromptTokenizer | None = None,
    on_start: Callable[[], None] = lambda: None,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> ServeRun:
    """Runs the benchmark. Raises BenchmarkError if no warm-up succeeds; later failures are recorded
    in Outcomes.
    """
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    client = HttpClient(with_v1(options.base_url), headers, options.timeout_s)
    try:
        model = await _model_name(client, options, request_options.model)
        request_options = replace(request_options, model=model)
        send = partial(stream_request, client, request_options)
        as_messages = request_options.endpoint == "chat"
        if warmups:
            await _warm_up(options, LoadRunner(send, as_messages=as_messages), warmups)
        on_start()
        runner = LoadRunner(
            send,
            as_messages=as_messages,
            max_concurrency=options.max_concurrency,
            on_outcome=on_outcome,
        )
        with _interrupted_by_ctrl_c(runner):
            report = await runner.run(
                requests,
                arrival_times(
                    len(requests), options.request_rate, options.burstiness, options.seed
                ),
            )
    finally:
        client.close()
    if tokenizer is not None:
        _count_tokens(report, tokenizer)
    return ServeRun(model, report)


async def _model_name(client: HttpClient, options: ServeOptions, model: str | None) -> str:
    """Returns the user's name, or the server's.

    Waits for the server for options.ready_timeout_s.
    """
    deadline = asyncio.get_running_loop().time() + options.ready_timeout_s
    while True:
        try:
            found = await first_model(client)
            return model or found or NO_MODEL_NAME
        except Failure as failure:
            not_yet = failure.kind in (CONNECTION_REFUSED, CONNECTION_FAILED, "HTTP 503")
            if model is not None and not not_yet:
                return model
            if not not_yet or asyncio.get_running_loop().time() + POLL_INTERVAL_S > deadline:
                hint = (
                    "; --ready-timeout SECONDS waits for a server that is starting"
                    if not_yet and not options.ready_timeout_s
                    else ""
                )
                raise BenchmarkError(f"{options.base_url}: {failure}{hint}") from None
        await asyncio.sleep(POLL_INTERVAL_S)


async def _warm_up(
    options: ServeOptions, runner: LoadRunner, warmups: list[WorkloadRequest]
) -> None:
    report = await runner.run(warmups, [0.0] * len(warmups))
    outcomes = [outcome for outcome in report.outcomes if outcome is not None]
    if outcomes and all(outcome.failure is not None for outcome in outcomes):
        raise BenchmarkError(
            f"{options.base_url}: the warm-up failed: {outcomes[0].failure}: "
            f"{outcomes[0].failure_text}"
        )


@contextmanager
def _interrupted_by_ctrl_c(runner: LoadRunner) -> Iterator[None]:
    """In this context the first Ctrl-C ends the run and keeps the results; the second one is
    Python's default.
    """
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        runner.interrupt()

    if ignores_interrupts():
        yield
        return
    try:
        loop.add_signal_handler(signal.SIGINT, interrupt)
    except (ValueError, RuntimeError):  # not in the main thread, which then handles Ctrl-C
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _count_tokens(report: LoadReport, tokenizer: PromptTokenizer) -> None:
    """Counts the tokens of answers without usage. Runs after the load, so that it does not
    affect it.
    """
    for outcome in report.outcomes:
        if outcome is not None and outcome.counted_by == "chunks" and outcome.text:
            token_ids = tokenizer.encode(outcome.text, add_special_tokens=False)
            outcome.num_output_tokens = len(token_ids)
            outcome.counted_by = "tokenizer"
