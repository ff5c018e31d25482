"""Embeddings by Quire and other engines on the same texts, in one interleaved run.

    PEERS_VENVS=PREFIX python tests/bench/bench_embed.py MODELS/minilm --llama-server PATH
    [--rounds 5] [--threads 2] [--only quire fastembed] [--cells short long one] [--write]

The model's folder is made by make_embedders.py. PEERS_VENVS followed by st, fe or inf is the
virtual environment of sentence-transformers, fastembed or infinity. All contenders stay loaded and
take turns, so that disturbances affect all. Texts are new in every round: no cache helps.
The table has each contender's least cosine with sentence-transformers in fp32; less than COSINE
(COSINE_INT8 for int8) is told before. Figures are medians. Servers answer /v1/embeddings over one
connection.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from quire.tests.bench.embed_engines import pools_cls
from quire.tests.bench.report import hardware, write_result
from quire.tests.bench.servers import START_TIMEOUT_S, free_port
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
VENVS = os.path.expanduser(os.environ.get("PEERS_VENVS", "~/venv-peer-"))
PAUSE_S = 0.3  # the pause lets the threads of the one before fall asleep
COSINE, COSINE_INT8, LENGTH_ERROR = 0.99, 0.9, 0.02
REFERENCE = "sentence-transformers torch float32"


class Cell(NamedTuple):
    """`texts` per call, of `least` to `most` tokens each, [CLS] and [SEP] included."""

    texts: int
    least: int
    most: int
    calls: int  # in one round


CELLS = {"short": Cell(32, 8, 24, 5), "long": Cell(32, 256, 256, 1), "one": Cell(1, 8, 24, 25)}


class Contender(NamedTuple):
    engine: str
    venv: str | None  # None: this interpreter
    dtype: str
    is_server: bool = False

    @property
    def label(self) -> str:
        name = self.engine.replace("st-", "sentence-transformers ")
        return f"{name} {self.dtype}{' over HTTP' if self.is_server else ''}"


CONTENDERS = [
    *(Contender("quire", None, dtype) for dtype in ("bfloat16", "float32", "int8")),
    *(Contender("st-torch", "st", dtype) for dtype in ("float32", "bfloat16")),
    *(Contender("st-onnx", "st", dtype) for dtype in ("float32", "int8")),
    *(Contender("st-openvino", "st", dtype) for dtype in ("float32", "bfloat16", "int8")),
    *(Contender("fastembed", "fe", dtype) for dtype in ("float32", "int8")),
    *(Contender("infinity", "inf", dtype) for dtype in ("float32", "bfloat16", "int8")),
    *(Contender("quire", None, dtype, True) for dtype in ("bfloat16", "float32", "int8")),
    *(Contender("infinity", "inf", dtype, True) for dtype in ("float32", "bfloat16", "int8")),
    *(Contender("llama.cpp", None, dtype, True) for dtype in ("f32", "bf16", "Q8_0")),
]


class Engine:
    """A contender's process. Subclasses have its command and its calls."""

    def __init__(self, contender: Contender, args: argparse.Namespace):
        self.label = contender.label
        self.is_int8 = contender.dtype in ("int8", "Q8_0")
        begin = time.perf_counter()
        self.log = Path(args.logs) / f"embed-{self.label.replace(' ', '-')}.log"
        with self.log.open("wb") as log:
            self.process = self._start(contender, args, log)
        self.version = self._wait_until_ready()
        self.start_s = time.perf_counter() - begin

    def _start(self, contender: Contender, args: argparse.Namespace, log: Any) -> Any:
        raise NotImplementedError

    def _wait_until_ready(self) -> str:
        """The version, when one text has been embedded."""
        raise NotImplementedError

    def embed(self, calls: list[list[str]]) -> tuple[list[float], np.ndarray]:
        """Seconds of each call, and the vectors of the last one [texts, hidden]."""
        raise NotImplementedError

    def processes(self) -> list[psutil.Process]:
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]

    def peak_mib(self) -> float:
        statuses = [Path(f"/proc/{p.pid}/status").read_text() for p in self.processes()]
        return sum(int(status.split("VmHWM:")[1].split()[0]) for status in statuses) / 1024

    def cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self.processes())

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class InProcess(Engine):
    def _start(self, contender: Contender, args: argparse.Namespace, log: Any) -> Any:
        self.vectors = Path(args.logs) / f"embed-{self.label.replace(' ', '-')}.npy"
        command = [python(contender), str(HERE / "embed_engines.py"), contender.engine, args.model]
        command += ["--dtype", contender.dtype, "--threads", str(args.threads)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)

    def _wait_until_ready(self) -> str:
        return self._answer()["version"]

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise OSError(f"{self.label} ended; its log is {self.log}")
        return json.loads(line)

    def embed(self, calls: list[list[str]]) -> tuple[list[float], np.ndarray]:
        line = json.dumps({"calls": calls, "save": str(self.vectors)}) + "\n"
        self.process.stdin.write(line.encode())
        self.process.stdin.flush()
        return self._answer()["seconds"], np.load(self.vectors)


class Server(Engine):
    def _start(self, contender: Contender, args: argparse.Namespace, log: Any) -> Any:
        self.port = free_port()
        self.client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_TIMEOUT_S)
        self.model = contender.engine
        command = server_command(contender, args, self.port)
        # infinity finds ONNX files only in the working folder
        folder = f"{args.model}/onnx-int8" if "." in command else None
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)

    def _wait_until_ready(self) -> str:
        deadline = time.perf_counter() + START_TIMEOUT_S
        while time.perf_counter() < deadline:
            if self.process.poll() is not None:
                raise OSError(f"{self.label} ended while it started; its log is {self.log}")
            try:
                self._post(["one text"])
                return self.label
            except (OSError, http.client.HTTPException):
                self.client.close()
                time.sleep(0.02)
        raise OSError(f"{self.label} is not ready after {START_TIMEOUT_S} s; its log is {self.log}")

    def _post(self, texts: list[str]) -> dict[str, Any]:
        body = json.dumps({"model": self.model, "input": texts})
        headers = {"Content-Type": "application/json"}
        self.client.request("POST", "/v1/embeddings", body, headers)
        response = self.client.getresponse()
        answer = response.read()
        if response.status != 200:
            raise OSError(f"{self.label} answered {response.status}: {answer[:300]!r}")
        return json.loads(answer)

    def embed(self, calls: list[list[str]]) -> tuple[list[float], np.ndarray]:
        self.client.close()  # a server may have closed it for idleness
        self.client.connect()
        seconds, answer = [], {}
        for texts in calls:
            begin = time.perf_counter()
            answer = self._post(texts)
            seconds.append(time.perf_counter() - begin)
        return seconds, np.asarray([row["embedding"] for row in answer["data"]], np.float32)


def python(contender: Contender) -> str:
    return sys.executable if contender.venv is None else f"{VENVS}{contender.venv}/bin/python"


def server_command(contender: Contender, args: argparse.Namespace, port: int) -> list[str]:
    dtype, model = contender.dtype, args.model
    if contender.engine == "quire":
        command = [sys.executable, "-m", "quire", "serve", model, "--port", str(port)]
        command += ["--runner", "pooling", "--served-model-name", "quire"]
        precision = ["--quantization", "int8"] if dtype == "int8" else ["--dtype", dtype]
        return [*command, *precision, "--num-threads", str(args.threads)]
    if contender.engine == "infinity":
        command = [f"{VENVS}{contender.venv}/bin/infinity_emb", "v2"]
        command += ["--served-model-name", "infinity", "--port", str(port), "--device", "cpu"]
        command += ["--pooling-method", "cls" if pools_cls(model) else "mean"]
        if dtype == "int8":
            command += ["--model-id", ".", "--engine", "optimum", "--onnx-disable-optimize"]
        else:
            command += ["--model-id", model, "--engine", "torch", "--dtype", dtype]
            command += ["--no-bettertransformer"]
        return [*command, "--url-prefix", "/v1", "--no-model-warmup", "--log-level", "error"]
    command = [args.llama_server, "-m", f"{model}/{dtype}.gguf", "--port", str(port)]
    command += ["--embedding", "--pooling", "cls" if pools_cls(model) else "mean"]
    command += ["-t", str(args.threads), "-np", "32", "-c", "16384", "-b", "512", "-ub", "512"]
    return command


def make_texts(tokenizer: Tokenizer, cell: Cell, seed: str) -> list[list[str]]:
    """Random words of the vocabulary, frequent ones more often, every fifth one with an ending or
    joined to another by a hyphen: about 1.3 tokens a word, as in English.
    """
    words = sorted(
        (id_, word)
        for word, id_ in tokenizer.get_vocab().items()
        if word.isascii() and word.isalpha() and len(word) > 1
    )
    draw = random.Random(seed)

    def word() -> str:
        # Zipf's law: the logarithm of the rank is uniform
        drawn = words[int(len(words) ** draw.random()) - 1][1]
        return (
            drawn + draw.choice(("-based", "ish", "ness", "less")) if draw.random() < 0.2 else drawn
        )

    def text() -> str:
        tokens, said = draw.randint(cell.least, cell.most), []
        while len(tokenizer.encode(" ".join(said)).ids) < tokens:
            said += [word() for _ in range(1 + (tokens - len(said)) // 4)]
        while len(tokenizer.encode(" ".join(said)).ids) > tokens:
            said.pop()
        while len(tokenizer.encode(" ".join(said)).ids) < tokens:
            said.append("the")
        return " ".join(said)

    return [[text() for _ in range(cell.texts)] for _ in range(cell.calls)]


def start_all(args: argparse.Namespace) -> list[Engine]:
    engines: list[Engine] = []
    for contender in CONTENDERS:
        label = contender.label
        if args.only and label != REFERENCE and not any(word in label for word in args.only):
            continue
        if contender.engine == "llama.cpp" and not args.llama_server:
            continue
        try:
            kind = Server if contender.is_server else InProcess
            engines.append(kind(contender, args))
            print(f"  {label}: {engines[-1].start_s:.1f} s", file=sys.stderr)
        except OSError as error:
            print(f"  {label}: left out: {error}", file=sys.stderr)
    return engines


def check(engines: list[Engine], tokenizer: Tokenizer) -> dict[str, float]:
    """The least cosine of each engine with the reference. Says which engines' embeddings are
    others, or nearer to another text of the reference.
    """
    texts = make_texts(tokenizer, CELLS["short"], "check")[0] + ["The quick brown fox, 42 times!"]
    texts += make_texts(tokenizer, CELLS["long"]._replace(texts=4), "check")[0]
    vectors = {engine.label: engine.embed([texts])[1] for engine in engines}
    wanted, cosines = vectors[REFERENCE], {}
    for engine in engines:
        found = vectors[engine.label]
        lengths = np.linalg.norm(found, axis=1)
        products = found / lengths[:, None] @ wanted.T
        cosine = cosines[engine.label] = float(products.diagonal().min())
        moved = int((products.argmax(1) != np.arange(len(texts))).sum())
        least = COSINE_INT8 if engine.is_int8 else COSINE
        if cosine < least or moved or abs(lengths - 1).max() > LENGTH_ERROR:
            message = f"cosine {cosine:.4f}, lengths {lengths.min():.3f} to {lengths.max():.3f}"
            print(f"  {engine.label}: {message}, {moved} nearer to others", file=sys.stderr)
    return cosines


def measure(args: argparse.Namespace) -> dict[str, Any]:
    tokenizer = Tokenizer.from_file(f"{args.model}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    engines = start_all(args)
    try:
        cosines = check(engines, tokenizer)
        wall: dict[str, dict[str, list[float]]] = {
            engine.label: {cell: [] for cell in args.cells} for engine in engines
        }
        cpu = {engine.label: dict.fromkeys(args.cells, 0.0) for engine in engines}
        for name in args.cells:
            for i in range(args.rounds + 1):  # the first one is a warm-up
                calls = make_texts(tokenizer, CELLS[name], f"{name} {i} {time.time()}")
                for engine in engines if i % 2 else engines[::-1]:
                    time.sleep(PAUSE_S)
                    used = engine.cpu_s()
                    seconds = engine.embed(calls)[0]
                    if i:
                        wall[engine.label][name].append(statistics.median(seconds))
                        cpu[engine.label][name] += engine.cpu_s() - used
        return {
            "threads": args.threads,
            "rounds": args.rounds,
            "ms_per_call": {
                label: {name: round(1e3 * statistics.median(of), 3) for name, of in cells.items()}
                for label, cells in wall.items()
            },
            "least_ms": {
                label: {name: round(1e3 * min(of), 3) for name, of in cells.items()}
                for label, cells in wall.items()
            },
            "cpu_ms_per_call": {
                label: {
                    name: round(1e3 * of / args.rounds / CELLS[name].calls, 2)
                    for name, of in cells.items()
                }
                for label, cells in cpu.items()
            },
            "cosine": {label: round(of, 5) for label, of in cosines.items()},
            "start_s": {engine.label: round(engine.start_s, 2) for engine in engines},
            "peak_mib": {engine.label: round(engine.peak_mib()) for engine in engines},
            "versions": {engine.label: engine.version for engine in engines},
        }
    finally:
        for engine in engines:
            engine.close()


def as_markdown(numbers: dict[str, Any]) -> str:
    """Texts per second of batches, milliseconds of single texts."""
    cells = list(next(iter(numbers["ms_per_call"].values())))
    heads = [f"{name}, {'ms' if CELLS[name].texts == 1 else 'texts/s'}" for name in cells]
    lines = ["| | " + " | ".join(heads) + " | cosine | start s | peak MiB |"]
    lines.append("|---" * (len(cells) + 4) + "|")
    for label, of in numbers["ms_per_call"].items():
        shown = [
            f"{of[name]:.2f}"
            if CELLS[name].texts == 1
            else f"{CELLS[name].texts * 1e3 / of[name]:.0f}"
            for name in cells
        ]
        end = [f"{numbers['cosine'][label]:.4f}", f"{numbers['start_s'][label]:.1f}"]
        lines.append(
            f"| {label} | " + " | ".join([*shown, *end, str(numbers["peak_mib"][label])]) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder made by make_embedders.py")
    parser.add_argument("--llama-server", help="llama.cpp's llama-server program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--only", nargs="+", help="words; only contenders whose names contain one")
    parser.add_argument("--logs", default="/tmp", help="folder for logs and vectors")
    parser.add_argument("--write", action="store_true", help="keep the figures in results/")
    args = parser.parse_args()
    numbers = measure(args)
    print(json.dumps(numbers, indent=1))
    print(as_markdown(numbers))
    if args.write:
        print(hardware(), write_result(Path(args.model).name, "embed", numbers))


if __name__ == "__main__":
    main()
