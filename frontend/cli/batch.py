"""`quire batch`: answers the requests of a file in the format of /v1/batches, without a server.

Must not know: how a line is answered, torch.

The results are in their files as they come, with a journal beside them that says which lines are
done. The same command continues after Ctrl-C or a crash; the journal goes when all lines are done.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...ipc.errors import InvalidParameterError
from ...ipc.own_files import open_own
from .flags import ENGINE, Flag, engine_flags, given, server_flags
from .parser import Parser
from .plan import plan_beneath
from .session import loading_notice
from .sources import naming_sources
from .terminal import Interrupts

if TYPE_CHECKING:
    from ..async_llm import AsyncLLM
    from ..batches.formats import Answer
    from ..batches.input_file import InputLine, InputReport
    from ..batches.results import Results
    from ..engine_args import EngineArgs
    from ..progress import ProgressBar
    from ..server.config import ServerConfig
    from ..server.state import ServerState

USAGE = "FILE [--output FILE] [--errors FILE] [engine flags]"
DESCRIPTION = (
    "Answers each line of FILE, a request in the format of OpenAI's batches: "
    '{"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}. '
    "The same command continues after an interrupt. Exit status: 0, or 1 if any line failed."
)
COMMON_ENGINE = ("model", "dtype", "quantization", "num_threads", "max_model_len", "engine")
# The settings of a server that change how a request is answered.
COMMON_SERVER = ("unknown_model",)
SERVER = (
    *COMMON_SERVER,
    *("lora_modules", "model_aliases", "unknown_params", "chat_template", "chat_template_kwargs"),
    *("tool_call_parser", "reasoning_parser", "disable_any_whitespace"),
    *("disable_additional_properties", "max_concurrent_requests", "max_body_bytes"),
    *("max_prompts_per_request", "max_n"),
)
MAX_REQUESTS = 2**40  # a journal needs one byte of memory for each line
LOOK_S = 0.25  # between two looks at Ctrl-C and at the engine
MAX_SHOWN = 10  # lines that failed


def request_settings() -> list[Flag]:
    """Returns the flags that a command without a port shares with `quire serve`."""
    of_server = {flag.name: flag for flag in server_flags()}
    return [of_server[name] for name in SERVER]


def make_parser(argv: list[str]) -> Parser:
    parser = Parser("batch", USAGE, DESCRIPTION, argv)
    add = parser.add
    add("file", "FILE", "requests, one JSON object per line", nargs="?")
    parser.add_argument(
        "--output", "-o", metavar="FILE", help="answers, as JSON lines [FILE.output.jsonl]"
    )
    add("--errors", "FILE", "lines that failed, as JSON lines [beside the output: *.errors.jsonl]")
    add.on_off("--resume", "continue an interrupted run of the same FILE and model", True)
    add.on_off("--progress", "show a progress bar [on a terminal]")
    parser.add_flags("requests", request_settings(), COMMON_SERVER)
    parser.add_flags("engine", [*engine_flags(), ENGINE], COMMON_ENGINE)
    return parser


def main(argv: list[str]) -> int:
    args = make_parser(argv).parse(argv)
    from ...ipc.early_engine import early_engine
    from ..server.config import ServerConfig

    arguments = given(args, engine_flags())
    with naming_sources(args.settings):
        config = ServerConfig(**given(args, request_settings()))
    if config.lora_modules:
        arguments.setdefault("enable_lora", True)
    files = Files(args)
    models: set[str | None] = set()
    report = checked(files.input, config, models)
    kind = getattr(args, "engine", ENGINE.default)
    with files.locked(), early_engine(kind, arguments):
        from ..engine_args import EngineArgs

        engine_args = EngineArgs(**arguments)
        run = BatchFile(files, report, models, config, args)
        with naming_sources(args.settings), plan_beneath(engine_args, arguments):
            return asyncio.run(run.run(engine_args, kind))


class Files:
    """The files of a run: its input, both results, and the journal of an unfinished run."""

    def __init__(self, args: argparse.Namespace):
        if args.file is None:
            raise InvalidParameterError("FILE", "none given; try: quire batch requests.jsonl")
        self.input = Path(args.file)
        output = args.output or str(self.input.with_suffix(".output.jsonl"))
        self.output = Path(output)
        stem = str(self.output.with_suffix("")).removesuffix(".output")
        self.errors = Path(args.errors or f"{stem}.errors.jsonl")
        self.journal = self.output.with_name(self.output.name + ".journal")
        self._resumes = args.resume
        names = {path.resolve() for path in (self.input, self.output, self.errors)}
        if len(names) < 3:
            raise InvalidParameterError("--output", "input, output and errors must be three files")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from these files. Raises InvalidParameterError if there are results
        that this run must not touch.
        """
        try:
            lock = open_own(self.journal, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            problem = f"cannot write {self.journal}: {error.strerror or error}"
            raise InvalidParameterError("--output", problem) from None
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                problem = f"another process writes {self.output}"
                raise InvalidParameterError("--output", problem) from None
            self._begin()
            yield
        finally:
            if not os.fstat(lock).st_size:  # nothing has begun
                self.journal.unlink(missing_ok=True)
            os.close(lock)

    def _begin(self) -> None:
        if not self._resumes:
            for path in (self.output, self.errors):
                path.unlink(missing_ok=True)
            os.truncate(self.journal, 0)
        if os.stat(self.journal).st_size:
            return
        for path in (self.output, self.errors):
            if path.exists():
                problem = f"{path} exists; --no-resume replaces it"
                raise InvalidParameterError("--output", problem)

    def identity(self, engine: AsyncLLM) -> str:
        """Returns a text that names what the results depend on."""
        with self.input.open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").hexdigest()[:32]
        return f"{digest} {engine.config.model_config.model}"

    def finish(self, *, is_empty: bool) -> None:
        """Removes what a later run would continue, or all files if there are no results."""
        for path in (self.output, self.errors):
            if is_empty or not path.stat().st_size:
                path.unlink()
        self.journal.unlink()


def checked(path: Path, config: ServerConfig, models: set[str | None]) -> InputReport:
    """Checks every line of the input, and adds the names of models to `models`.

    Raises InvalidParameterError, after it has printed what is wrong with each line.
    """
    from ..batches.input_file import InputRules, check_input
    from ..server.routes.batches import ENDPOINTS

    def check_model(name: str | None) -> None:
        models.add(name)  # which ones there are is known when the engine is

    rules = InputRules(ENDPOINTS, check_model, config.max_body_bytes, MAX_REQUESTS)
    try:
        report = check_input(path, rules)
    except OSError as error:
        problem = f"cannot read {path}: {error.strerror}"
        raise InvalidParameterError("FILE", problem) from None
    for error in report.errors:
        where = "" if error.line is None else f" line {error.line}"
        tell(f"{path}{where}: {error.message}")
    if report.errors:
        raise InvalidParameterError("FILE", f"{path} is not a file of requests; nothing was run")
    return report


class Usage(msgspec.Struct):
    """Tokens, as each of the APIs calls them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class Body(msgspec.Struct):
    """What is read of an answer."""

    usage: Usage | None = None
    error: Any = None


class BatchFile:
    """One run over a file. `models` are the names of models in its lines."""

    def __init__(
        self,
        files: Files,
        report: InputReport,
        models: set[str | None],
        config: ServerConfig,
        args: argparse.Namespace,
    ):
        self._files = files
        self._report = report
        self._models = models
        self._config = config
        self._shows = sys.stderr.isatty() if args.progress is None else args.progress
        self._shown: list[str] = []  # lines that failed

    async def run(self, engine_args: EngineArgs, kind: str) -> int:
        """Returns the exit status."""
        from ..async_llm import AsyncLLM
        from ..server.state import ServerState

        state = ServerState(self._config, engine_args.served_model_name or engine_args.model)
        with loading_notice(engine_args.model):
            engine = await AsyncLLM.start(engine_args, kind)
        try:
            await state.loras.load_modules(engine, self._config.lora_modules)
            await state.adopt_engine(engine)
            self._check_models(state)
            return await self._run_lines(state, engine, kind)
        finally:
            await engine.shutdown_async()

    def _check_models(self, state: ServerState) -> None:
        from ..server.http.errors import ApiError

        for name in self._models:
            try:
                state.check_model(name)
            except ApiError as error:
                advice = "with --unknown-model default, the model answers for any name"
                raise InvalidParameterError("FILE", f"{error.message} ({advice})") from None

    async def _run_lines(self, state: ServerState, engine: AsyncLLM, kind: str) -> int:
        from ..batches.formats import OpenAIFormat
        from ..batches.line_run import Gate, LineRun
        from ..batches.results import OtherInputError, Results
        from ..progress import ProgressBar
        from ..server.app import App, make_app
        from ..server.batch_runner import WEIGHT, LineCaller

        files, report = self._files, self._report
        paths = files.output, files.errors, files.journal
        try:
            results = Results(*paths, report.num_lines, files.identity(engine))
        except OtherInputError:
            problem = f"{files.output} belongs to another FILE or model; --no-resume replaces it"
            raise InvalidParameterError("--output", problem) from None
        num_before = sum(results.counts.values())
        if num_before:
            tell(f"{num_before} of {report.num_requests} lines have been answered before")
        app = make_app(state)
        assert isinstance(app, App)
        caller = LineCaller(app)
        # Others may have the engine of a daemon, too: lines are in its background.
        owner, weight = ("batch:", WEIGHT) if kind.startswith("ipc://") else ("", 1.0)
        # Others wait in the engine, so that no step has an empty place.
        num_places = self._config.max_concurrent_requests or 2 * engine.config.num_seqs_at_once
        progress = ProgressBar(report.num_requests - num_before, self._shows)

        async def answer(asked: InputLine, request_id: str) -> Answer:
            found = await caller(asked, request_id, owner, weight)
            self._count(asked, found, progress)
            return found

        gate = Gate(lambda: num_places)
        run = LineRun(files.input, results, OpenAIFormat(), answer, gate, "batch_req_")
        began = time.monotonic()
        try:
            status = await self._until_end(run.run(), engine)
        finally:
            progress.close()
            results.close()
            self._leave(results, time.monotonic() - began)
        return status or (1 if results.counts["failed"] else 0)

    async def _until_end(self, work: Any, engine: AsyncLLM) -> int:
        """Returns 0 when the work has ended, 130 after Ctrl-C and 143 after SIGTERM. Raises
        EngineDeadError.
        """
        running = asyncio.create_task(work)
        try:
            with Interrupts(signal.SIGTERM) as interrupts:
                while not running.done():
                    await asyncio.wait([running], timeout=LOOK_S)
                    if interrupts.requested:
                        return 128 + interrupts.requested
                    if engine.dead_error is not None:
                        raise engine.dead_error
                await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return 0

    def _count(self, asked: InputLine, answer: Answer, progress: ProgressBar) -> None:
        body = Body()
        with suppress(msgspec.MsgspecError):
            body = msgspec.json.decode(answer.body, type=Body)
        usage = body.usage or Usage()
        progress.update(
            usage.prompt_tokens + usage.input_tokens,
            usage.completion_tokens + usage.output_tokens,
        )
        if not answer.is_success and len(self._shown) < MAX_SHOWN:
            error = body.error
            message = error.get("message") if isinstance(error, dict) else error
            self._shown.append(f"{asked.custom_id!r:.80}: {answer.status} {message}")

    def _leave(self, results: Results, seconds: float) -> None:
        """Tells what has been done, and how to continue."""
        counts, files = results.counts, self._files
        num_done = counts["completed"] + counts["failed"]
        is_complete = num_done == self._report.num_requests
        if is_complete or not num_done:
            files.finish(is_empty=not num_done)
        for line in self._shown:
            tell(line)
        words = f"{counts['completed']} lines answered"
        if counts["failed"]:
            words += f", {counts['failed']} failed ({files.errors})"
        tell(f"{words} in {seconds:.1f} s")
        if not is_complete:
            tell(
                f"stopped after {num_done} of {self._report.num_requests} lines; the same command "
                "continues after them"
            )


def tell(sentence: str) -> None:
    print(f"quire batch: {sentence}", file=sys.stderr)
