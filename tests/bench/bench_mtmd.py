"""Encoders of images of Quire, llama.cpp and OpenVINO, in turns; and the time to the first token of
two questions about one image, by Quire and by llama-server.

    python tests/bench/bench_mtmd.py encoders DIRECTORY --llama-bin DIRECTORY [--openvino PYTHON]
    [--rounds 5] [--side 896] [--threads 2]
    python tests/bench/bench_mtmd.py questions DIRECTORY --llama-bin DIRECTORY [--rounds 5]

DIRECTORY is what tests/bench/seeing_gguf.py writes with --type f16. Quire encodes in bf16 and int8,
llama.cpp with --flash-attention, OpenVINO in bf16 by the interpreter
PYTHON that has it. A round asks each for a new image of noise. The seconds of llama.cpp are those
of its prompt, which has the tiny text model's tokens beside the image. Questions go over HTTP and
through LLM (offline), in bf16; the second question has the first one's image and answer before it.
`chrt -f 10` before the command keeps other programs of the machine out of all engines alike.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from quire.tests.bench.compare_mtmd import MARKER, LlamaServer
from quire.tests.bench.servers import free_port, wait_until_ready

ENGINES = Path(__file__).with_name("vision_engines.py")
Engine = Callable[[Image.Image], float]


def noise(side: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng().integers(0, 256, (side, side, 3), np.uint8))


@contextmanager
def process(python: str, engine: str, args: argparse.Namespace, *flags: str) -> Iterator[Engine]:
    """An engine of vision_engines.py, which makes its images itself."""
    command = [python, "-P", str(ENGINES), engine, str(args.directory)]
    command += ["--side", str(args.side), "--threads", str(args.threads), *flags]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:

        def encode(image: Image.Image) -> float:
            print(file=running.stdin, flush=True)
            return float(running.stdout.readline())

        yield encode
        running.stdin.close()


@contextmanager
def llama(args: argparse.Namespace, *flags: str) -> Iterator[LlamaServer]:
    files = (args.directory / "f16" / name for name in ("model.gguf", "mmproj-model.gguf"))
    flags = "-c", "2048", "-ub", "1024", *flags
    server = LlamaServer(args.llama_bin, *files, *flags, threads=args.threads)
    try:
        yield server
    finally:
        server.close()


def encoders(args: argparse.Namespace) -> None:
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name, flags in (("Quire bf16", ()), ("Quire int8", ("--quantization", "int8"))):
            made = process(sys.executable, "quire", args, *flags)
            engines[name] = stack.enter_context(made)
            engines[name](noise(args.side))  # warms up before the next one starts
        server = stack.enter_context(llama(args, "-fa", args.flash_attention))

        def encode(image: Image.Image) -> float:
            options = {"n_predict": 1, "cache_prompt": False}
            return server.complete(MARKER, image, **options)["timings"]["prompt_ms"] / 1e3

        engines["llama.cpp f16"] = encode
        encode(noise(args.side))
        if args.openvino:
            made = process(args.openvino, "openvino", args)
            engines["OpenVINO bf16"] = stack.enter_context(made)
            engines["OpenVINO bf16"](noise(args.side))
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(args.rounds):
            for name, engine in engines.items():
                seconds[name].append(engine(noise(args.side)))
                print(f"{name}: {seconds[name][-1]:.3f} s", file=sys.stderr, flush=True)
        for name, own in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(own, seconds["Quire bf16"]))
            every = " ".join(f"{one:.2f}" for one in own)
            print(f"{name:13} {statistics.median(own):7.3f} s, {ratio:5.2f} times: {every}")


# ---------------------------------------------------------------- questions


def first_token(port: int, messages: list[dict[str, Any]]) -> float:
    """Seconds until the first token of a chat comes over HTTP."""
    body = {"model": "tiny", "messages": messages, "stream": True, "temperature": 0}
    body |= {"max_tokens": 4, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    began, first = time.perf_counter(), None
    try:
        answer = urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        sys.exit(f"refused: {error.read().decode()[:500]}")
    with answer:
        for line in answer:
            if first is None and b'"content":"' in line.replace(b": ", b":"):
                first = time.perf_counter() - began
    assert first is not None
    return first


def conversation(image: Image.Image) -> list[list[dict[str, Any]]]:
    """The messages of the first and the second question."""
    file = io.BytesIO()
    image.save(file, "png")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is this?"},
    ]
    first = [{"role": "user", "content": parts}]
    second = [{"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Why?"}]
    return [first, first + second]


@contextmanager
def quire_server(args: argparse.Namespace) -> Iterator[int]:
    port = free_port()
    command = [sys.executable, "-P", "-m", "quire", "serve", str(args.directory), "--port"]
    command += [str(port), "--dtype", "bfloat16", "--num-threads", str(args.threads)]
    command += ["--max-model-len", "2048", "--served-model-name", "tiny"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(port, server)
        yield port
    finally:
        server.terminate()
        server.wait()


def encoded_of(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    [line] = [one for one in lines if "images_encoded" in one and not one.startswith("#")]
    return int(float(line.rpartition(" ")[2]))


def questions(args: argparse.Namespace) -> None:
    from quire import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    seconds: dict[str, list[list[float]]] = {}
    with ExitStack() as stack:
        template = str(args.directory / "chat_template.jinja")
        other = stack.enter_context(llama(args, "--jinja", "--chat-template-file", template))
        port = stack.enter_context(quire_server(args))
        options = {"dtype": "bfloat16", "num_threads": args.threads, "max_model_len": 2048}
        llm = stack.enter_context(LLM(str(args.directory), **options))

        def offline(messages: list[dict[str, Any]]) -> float:
            began = time.perf_counter()
            llm.chat(messages, params, use_tqdm=False)
            return time.perf_counter() - began

        ways = {
            "Quire, HTTP": lambda messages: first_token(port, messages),
            "Quire, LLM": offline,
            "llama-server": lambda messages: first_token(other.port, messages),
        }
        for number in range(-1, args.rounds):
            for name, ask in ways.items():
                image = noise(args.side)
                pair = [ask(messages) for messages in conversation(image)]
                if number >= 0:
                    seconds.setdefault(name, []).append(pair)
        for name, pairs in seconds.items():
            first, second = (statistics.median(of) for of in zip(*pairs))
            every = " ".join(f"{1e3 * b:.0f}" for _, b in pairs)
            print(f"{name:13} first {first:.3f} s, second {1e3 * second:.1f} ms: {every}")
        print(
            f"images encoded for {2 * (args.rounds + 1)} questions: over HTTP {encoded_of(port)}, "
            f"through LLM {llm.get_metrics()['num_images_encoded']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", choices=("encoders", "questions"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--llama-bin", type=Path, required=True)
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--flash-attention", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", type=int, default=896)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    {"encoders": encoders, "questions": questions}[args.work](args)


if __name__ == "__main__":
    main()
