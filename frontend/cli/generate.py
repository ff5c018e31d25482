"""`quire generate`: completes prompts from arguments, standard input or a file, all in one batch.

Must not know: how an engine is reached, tokens, torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...ipc.errors import InvalidParameterError
from ...ipc.params import MAX_N, RequestOutputKind, SamplingParams
from .attachments import read_image
from .flags import Flag, given, sampling_flags
from .parser import Parser
from .session import (
    add_session_flags,
    check_sampling,
    default_sampling,
    lora_of,
    open_engine,
    request_flags,
    require_generation,
)
from .sources import naming_sources
from .terminal import Interrupts, JsonWriter, Meter, TextWriter
from .values import convert_plain

if TYPE_CHECKING:
    from ..llm_engine import LLMEngine

USAGE = "[PROMPT ...] [--file FILE] [--image FILE] [--json] [sampling flags] [engine flags]"
DESCRIPTION = (
    "Completes each PROMPT; `-`, or no prompt at all, reads one from standard input. Several "
    "prompts run together."
)
IMAGE = Flag(
    "image",
    list[str],
    [],
    "Image of each prompt, whose text has the model's placeholder for it; may be repeated.",
)
COMMON_SAMPLING = ("temperature", "top_p", "max_tokens", "stop")
# The default of SamplingParams and vLLM, 16 tokens, is too short for a completion to read.
DEFAULTS = {"max_tokens": 256}

# a prompt of LLMEngine, and the sampling parameters of this prompt alone
Prompt = tuple[Any, dict[str, Any]]


def make_parser(argv: list[str]) -> Parser:
    parser = Parser("generate", USAGE, DESCRIPTION, argv)
    add = parser.add
    add("prompts", "PROMPT", "text to continue", nargs="*")
    add(
        "--file",
        "FILE",
        'one prompt per line; with the name *.jsonl, objects {"prompt": ..., any sampling flag}; '
        "- is standard input",
    )
    add.switch(
        "--json", "one JSON object per completion and line: text, token_ids, finish_reason, usage"
    )
    add.on_off("--echo", "print the prompt before its completion [on a terminal]")
    parser.add_flags("images", [IMAGE], ("image",))
    parser.add_flags("sampling", request_flags(**DEFAULTS), COMMON_SAMPLING)
    add_session_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    args = make_parser(argv).parse(argv)
    prompts, images = read_prompts(args), read_images(args)
    sampling = given(args, request_flags())
    with naming_sources(args.settings):
        check_sampling(sampling)
    with open_engine(args) as engine:
        require_generation(engine)
        if images:
            engine.images.require_vision("image")
        base = {**default_sampling(engine, **DEFAULTS), **sampling}
        return complete(engine, prompts, images, base, args)


def read_images(args: argparse.Namespace) -> list[str]:
    """Returns the images of --image as data URLs. Raises InvalidParameterError for a file that is
    none.
    """
    paths = [Path(path).expanduser() for path in getattr(args, "image", ())]
    return [read_image(path, "image").part["image_url"]["url"] for path in paths]


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    """Returns all prompts of the command line.

    Raises InvalidParameterError for no prompt, an unreadable file or an invalid line.
    """
    words = args.prompts
    if not words and args.file is None:
        if sys.stdin.isatty():
            raise InvalidParameterError(
                "prompt", 'none given; try: quire generate "Once upon a time"'
            )
        words = ["-"]
    prompts: list[Prompt] = [(read_stdin() if word == "-" else word, {}) for word in words]
    if args.file is not None:
        prompts += read_file(args.file)
    if not prompts:
        raise InvalidParameterError("--file", f"{args.file} holds no prompt")
    if not any(prompt for prompt, _ in prompts):  # fails before an engine is loaded
        raise InvalidParameterError("prompt", "must not be empty")
    return prompts


def read_stdin() -> str:
    text = decode(sys.stdin.buffer.read(), "standard input")
    if not text.strip():
        raise InvalidParameterError("prompt", "standard input is empty")
    return text.removesuffix("\n")


def read_file(name: str) -> list[Prompt]:
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise InvalidParameterError("--file", f"cannot read {name}: {error.strerror}") from None
    text = decode(raw, name)
    numbered = [
        (number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()
    ]
    if name.endswith(".jsonl") or (name == "-" and text.lstrip().startswith("{")):
        return [parse_line(line, f"{name} line {number}") for number, line in numbered]
    return [(line, {}) for _, line in numbered]


def decode(raw: bytes, source: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidParameterError(
            "prompt", f"{source} is not UTF-8 (byte {error.start})"
        ) from None


def parse_line(line: str, where: str) -> Prompt:
    """Parses {"prompt": text} or {"prompt_token_ids": [...]}, with sampling parameters in the same
    object.
    """
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidParameterError("--file", f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict) or ("prompt" in record) == ("prompt_token_ids" in record):
        raise InvalidParameterError(
            "--file", f'{where} must be an object with "prompt" or "prompt_token_ids"'
        )
    text = record.pop("prompt", None)
    prompt = text if text is not None else {"prompt_token_ids": record.pop("prompt_token_ids")}
    known = {flag.name: flag for flag in sampling_flags()}
    for name, value in record.items():
        if name not in known:
            raise InvalidParameterError("--file", f"{where} has an unknown key {name!r}")
        try:
            record[name] = convert_plain(value, known[name].type, strict=True)
        except (msgspec.ValidationError, InvalidParameterError) as error:
            raise InvalidParameterError("--file", f"{where}, {name}: {error}") from None
    return prompt, record


def complete(
    engine: LLMEngine,
    prompts: list[Prompt],
    images: list[str],
    base: dict[str, Any],
    args: argparse.Namespace,
) -> int:
    """Runs all prompts, each with the images, and prints their outputs.

    A prompt that is rejected is reported and does not affect the others. The exit code is then 2.
    """
    if args.json:
        writer: JsonWriter | TextWriter = JsonWriter(sys.stdout)
        kind = RequestOutputKind.FINAL_ONLY
    else:
        echo = sys.stdout.isatty() if args.echo is None else args.echo
        titles = [prompt if isinstance(prompt, str) else "" for prompt, _ in prompts]
        # larger values are rejected below
        counts = [min(overrides.get("n", base.get("n", 1)), MAX_N) for _, overrides in prompts]
        writer = TextWriter(titles, counts, echo=echo, out=sys.stdout)
        kind = RequestOutputKind.DELTA
    meter, code = Meter(), 0
    with Interrupts() as interrupts:
        for index, (prompt, overrides) in enumerate(prompts):
            try:
                params = SamplingParams(**{**base, **overrides, "output_kind": kind})
                engine.add_request(
                    str(index), with_images(prompt, images), params, lora_request=lora_of(args)
                )
            except InvalidParameterError as error:
                code = 2
                writer.refuse(index, str(error))
                complain(index, prompts, str(error))
        while engine.has_unfinished_requests() and not interrupts.requested:
            for output in engine.step():
                meter.count(output)
                writer.write(int(output.request_id), output)
                if output.finished and output.error:
                    # errors found by the engine (in a grammar, for example) are bad input, too
                    code = 2 if output.error_parameter else code or 1
                    complain(int(output.request_id), prompts, output.error)
        writer.end()
        if interrupts.requested:
            engine.abort_all_requests()
            return 130
    if not args.json:
        meter.report()
    return code


def with_images(prompt: Any, images: list[str]) -> Any:
    if not images:
        return prompt
    given = {"prompt": prompt} if isinstance(prompt, str) else prompt
    return given | {"multi_modal_data": {"image": images}}


def complain(index: int, prompts: list[Prompt], problem: str) -> None:
    which = f"prompt {index + 1}: " if len(prompts) > 1 else ""
    print(f"quire: {which}{problem}", file=sys.stderr)
