"""`quire embed`: embeds the texts of a file, or runs another pooling task on them.

Must not know: how an engine is reached, formats of the result (embed_writers.py), torch.

Texts are read, computed and written as a stream: memory does not depend on their number.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from ... import __version__
from ...ipc.errors import InvalidParameterError
from ...ipc.params import POOLING_TASKS, PoolingParams
from .parser import Parser
from .session import add_session_flags, open_engine
from .terminal import Interrupts

if TYPE_CHECKING:
    from ..llm_engine import LLMEngine
    from ..pooling_outputs import PoolingRequestOutput
    from .embed_writers import Writer

USAGE = "[FILE] [--output FILE] [--task TASK] [engine flags]"
DESCRIPTION = (
    "Embeds each text of FILE, which has one text per line, or with the name *.jsonl one object "
    '{"text": ...} per line, whose other fields are copied to the output; `-` is standard input.'
)
TEXT_KEYS = ("text", "prompt", "input")
BLOCK = 2**20

Record = dict[str, Any]


def make_parser(argv: list[str]) -> Parser:
    parser = Parser("embed", USAGE, DESCRIPTION, argv)
    add = parser.add
    add("file", "FILE", "texts, one per line; - is standard input", "-", nargs="?")
    parser.add_argument(
        "--output",
        "-o",
        default="-",
        metavar="FILE",
        help="*.npy, *.parquet (needs pyarrow) or *.jsonl; - is JSON lines on standard output [-]",
    )
    add("--task", None, "what is computed [the model's first task]", choices=POOLING_TASKS)
    add("--prompt-name", "NAME", "the model's prompt to put in front of each text")
    add("--dimensions", "N", "length of the embeddings (Matryoshka models)")
    add(
        "--truncate-prompt-tokens",
        "N",
        "cut texts after N tokens; -1: after as many as the model reads",
    )
    add.on_off("--resume", "continue an interrupted run of the same FILE, model and options", True)
    add.on_off("--progress", "show a progress bar [on a terminal]")
    add_session_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    args = make_parser(argv).parse(argv)
    params = PoolingParams(
        task=args.task,
        dimensions=args.dimensions,
        truncate_prompt_tokens=args.truncate_prompt_tokens,
    )
    from .embed_writers import check_output

    # both fail before an engine is loaded
    check_output(args.output, is_by_token=params.is_by_token)
    with open_texts(args.file) as file, open_engine(args) as engine:
        return embed(engine, file, params, args)


def open_texts(name: str) -> BinaryIO:
    if name == "-":
        if sys.stdin.isatty():
            raise InvalidParameterError("FILE", "none given; try: quire embed texts.txt")
        return sys.stdin.buffer
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise InvalidParameterError("FILE", f"cannot read {name}: {error.strerror}") from None


def embed(
    engine: LLMEngine, file: BinaryIO, params: PoolingParams, args: argparse.Namespace
) -> int:
    """Runs all texts and writes their results in order. Returns 130 after Ctrl-C and 143 after
    SIGTERM; a second run then continues.
    """
    from ..llm_engine import run_in_windows
    from ..progress import ProgressBar
    from .embed_writers import make_writer

    # the model's first task says the shape of the rows
    params = engine.session.input_processor.complete(params)
    num_lines, digest = count_lines(file)
    run = None if digest is None else run_of(engine, digest, params, args)
    writer = make_writer(args.output, is_by_token=params.is_by_token, run=run, resumes=args.resume)
    if writer.num_done:
        tell(f"continues after the first {writer.num_done} texts")
    ordered = InOrder(writer)
    shows = sys.stderr.isatty() if args.progress is None else args.progress
    progress = ProgressBar(None if num_lines is None else num_lines - writer.num_done, shows)
    began = time.monotonic()

    def take(index: int, output: PoolingRequestOutput) -> None:
        if interrupts.requested:
            raise KeyboardInterrupt
        ordered.take(index, output)
        progress.update(len(output.prompt_token_ids), 0)

    def prompts() -> Iterator[tuple[Any, PoolingParams]]:
        for text, record in islice(read_texts(file, args.file), writer.num_done, None):
            ordered.records.append(record)
            yield text, params

    interrupts = Interrupts(signal.SIGTERM)
    try:
        with interrupts:
            run_in_windows(
                engine,
                prompts(),
                None,
                0,
                take,
                num_before=writer.num_done,
                prompt_name=args.prompt_name,
            )
        writer.close()
    except KeyboardInterrupt:
        return 128 + (interrupts.requested or signal.SIGINT)
    finally:
        progress.close()
        if num_kept := writer.leave():
            tell(
                f"stopped; {args.output}.partial has the first {num_kept} texts, and the same "
                f"command continues after them"
            )
        engine.abort_all_requests()
    report(ordered, max(time.monotonic() - began, 1e-9))
    return 0


def report(ordered: InOrder, seconds: float) -> None:
    print(
        f"{ordered.num_written} texts, {ordered.num_tokens} tokens in {seconds:.1f} s "
        f"({ordered.num_written / seconds:.0f} texts/s)",
        file=sys.stderr,
    )


def tell(sentence: str) -> None:
    print(f"quire embed: {sentence}", file=sys.stderr)


def run_of(
    engine: LLMEngine, digest: str, params: PoolingParams, args: argparse.Namespace
) -> dict[str, Any]:
    """Returns what determines the rows, by the names that an error gives them."""
    config = engine.config
    settings = msgspec.to_builtins((config.model_config, config.load_config))
    settings[0].pop("seed")  # random unless it is given, and nothing is sampled
    return {
        "input": digest,
        "model": config.model_config.model,
        "setting of the engine": blake2b(msgspec.json.encode(settings)).hexdigest()[:32],
        "--task": params.task,
        "--dimensions": params.dimensions,
        "--truncate-prompt-tokens": params.truncate_prompt_tokens,
        "--prompt-name": args.prompt_name,
        "--lora": getattr(args, "lora", None),
        "version of Quire": __version__,
    }


class InOrder:
    """Passes results to the writer in the order of their texts. Few results wait, because requests
    run in windows.
    """

    def __init__(self, writer: Writer):
        self.records: list[Record | None] = []  # of the texts from `num_written` on
        self.num_written = self.num_tokens = 0
        self._writer = writer
        self._waiting: dict[int, PoolingRequestOutput] = {}

    def take(self, index: int, output: PoolingRequestOutput) -> None:
        """Takes a result. Raises QuireError for a text that failed."""
        self.num_tokens += len(output.prompt_token_ids)
        self._waiting[index] = output
        start = self.num_written
        while (ready := self._waiting.pop(self.num_written, None)) is not None:
            record = self.records[self.num_written - start]
            self._writer.write(record or {}, ready.outputs.data)
            self.num_written += 1
        del self.records[: self.num_written - start]


def read_texts(file: BinaryIO, name: str) -> Iterator[tuple[str, Record]]:
    """Yields each text with the other fields of its record, or with its index if it has none.
    Raises InvalidParameterError with the number of the line.
    """
    is_json: bool | None = True if name.endswith(".jsonl") else None if name == "-" else False
    for index, raw in enumerate(file):
        where = f"{'standard input' if name == '-' else name} line {index + 1}"
        try:
            line = raw.decode("utf-8-sig" if index == 0 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InvalidParameterError(
                "FILE", f"{where} is not UTF-8 (byte {error.start})"
            ) from None
        if is_json is None:
            is_json = line.lstrip().startswith("{")
        yield parse_record(line, where, index) if is_json else (line, {"index": index})


def parse_record(line: str, where: str, index: int) -> tuple[str, Record]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidParameterError("FILE", f"{where} is not JSON: {error}") from None
    if isinstance(record, str):
        return record, {"index": index}
    keys = [key for key in TEXT_KEYS if isinstance(record, dict) and key in record]
    if len(keys) != 1 or not isinstance(record[keys[0]], str):
        raise InvalidParameterError(
            "FILE", f'{where} must be a text, or an object whose "text" is one'
        )
    text = record.pop(keys[0])
    return text, record or {"index": index}


def count_lines(file: BinaryIO) -> tuple[int | None, str | None]:
    """Returns the number of lines of a regular file, for the progress bar, and a digest of its
    content. Both are None for a stream.
    """
    if not file.seekable():
        return None, None
    number, last, digest = 0, b"\n", blake2b(digest_size=16)
    while block := file.read(BLOCK):
        number, last = number + block.count(b"\n"), block
        digest.update(block)
    file.seek(0)
    return number + (not last.endswith(b"\n")), digest.hexdigest()
