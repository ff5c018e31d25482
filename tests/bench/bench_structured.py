"""What a grammar costs: to check and compile, per mask, per step; and what jump-forward saves.

    python tests/bench/bench_structured.py [--tokenizer DIRECTORY --vocab-size N]

The default is the bundled model's tokenizer. Times of masks and compilations are medians and means
over random grammars. Throughput is per second of processor time, in interleaved rounds, so that
other processes have little influence. Jump-forward appends tokens that the grammar determines,
without the model.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.executor.sampling.grammar_check import CompilerSettings, GrammarCheck
from quire.executor.sampling.grammar_compiler import GrammarCompiler, normalize
from quire.ipc.errors import InvalidParameterError
from quire.kernels import registry
from quire.tests.structured.generator import numbered

BUNDLED = Path(__file__).resolve().parents[2] / "frontend" / "bundled_model"
PERSON = {
    "type": "object",
    "required": ["first_name", "last_name", "age", "is_student", "country"],
    "additionalProperties": False,
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "last_name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "is_student": {"type": "boolean"},
        "country": {"enum": ["Germany", "France", "Norway"]},
    },
}
NUM_ROUNDS = 5


def show(name: str, seconds: list[float]) -> None:
    values = np.array(seconds) * 1e6
    print(
        f"{name:28} median {np.median(values):8.1f} us, mean {values.mean():8.1f}, 99 % "
        f"{np.quantile(values, 0.99):9.1f}, most {values.max():9.1f}"
    )


def measure_masks(directory: str, vocab_size: int, count: int) -> None:
    start = time.perf_counter()
    compiler = GrammarCompiler(directory, vocab_size, None)
    eos = compiler.tokenizer.eos_token
    print(f"tokenizer of {vocab_size}: read in {time.perf_counter() - start:.2f} s")
    check, draw, words = (
        GrammarCheck(CompilerSettings(directory, vocab_size, None)),
        random.Random(0),
        np.zeros(compiler.num_mask_words, np.int32),
    )
    check.check(StructuredOutputsParams(choice=["a"]))
    checks, compilations, firsts, masks = [], [], [], []
    for _, params in numbered(0, count):
        params = normalize(params)
        try:
            checks.append(timed(check.check, params)[0])
        except InvalidParameterError as refusal:
            print(f"refused: {refusal}")
            continue
        seconds, matcher = timed(compiler.compile, params)
        compilations.append(seconds)
        for index in range(40):
            seconds, _ = timed(matcher.unsafe_compute_mask_ptr, words.ctypes.data, words.nbytes)
            (masks if index else firsts).append(seconds)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            if not len(allowed := allowed[allowed != eos]):
                break
            matcher.consume_token(int(draw.choice(allowed)))
    check.end()
    for name, values in (
        ("check in its process", checks),
        ("compile", compilations),
        ("first mask", firsts),
        ("mask", masks),
    ):
        show(name, values)
    for op in registry.implementations("apply_grammar_bitmask"):
        logits, bitmask, rows = (
            torch.randn(8, vocab_size),
            torch.randint(-(2**31), 2**31, (8, len(words)), dtype=torch.int32),
            torch.arange(8),
        )
        show(
            f"apply to a row, {op.name}",
            [timed(op.function, logits, bitmask, rows)[0] / 8 for _ in range(30)],
        )


def timed(function, *args) -> tuple[float, object]:
    start = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - start, result


def measure_jumps() -> None:
    compact = StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)
    workloads = {
        "random grammars": [params for _, params in numbered(0, 96)],
        "one object, fixed keys": [compact],
        "64 objects, fixed keys": [compact] * 64,
        "with free whitespace": [StructuredOutputsParams(json=PERSON)] * 32,
        "a choice": [StructuredOutputsParams(choice=["positive", "negative", "neutral"])] * 256,
        "nothing forced": [StructuredOutputsParams(regex="[a-z ]{100,200}")] * 32,
    }
    common = dict(
        engine="inproc",
        num_threads=1,
        max_num_seqs=32,
        max_model_len=256,
        num_gpu_blocks_override=1 + 32 * 16,
    )
    with (
        LLM(enable_jump_forward=True, **common) as jumping,
        LLM(enable_jump_forward=False, **common) as plain,
    ):
        compare(workloads, {True: jumping, False: plain})


def compare(workloads: dict[str, list[StructuredOutputsParams]], engines: dict[bool, LLM]) -> None:
    for name, grammars in workloads.items():
        params = [
            SamplingParams(max_tokens=100, temperature=0.8, seed=i, structured_outputs=g)
            for i, g in enumerate(grammars)
        ]
        speeds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(NUM_ROUNDS):
            answers = {}
            for jumps, llm in engines.items():
                start = time.process_time()
                answers[jumps] = [
                    o.outputs[0].token_ids
                    for o in llm.generate(["Answer: "] * len(params), params, use_tqdm=False)
                ]
                speeds[jumps].append(sum(map(len, answers[jumps])) / (time.process_time() - start))
            assert answers[True] == answers[False]
        jumping, plain = (statistics.median(speeds[jumps]) for jumps in (True, False))
        print(
            f"{name:28} {jumping:6.0f} tokens per second of processor time, {plain:6.0f} without: "
            f"{jumping / plain:.2f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", default=str(BUNDLED))
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--num-grammars", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measure_masks(arguments.tokenizer, arguments.vocab_size, arguments.num_grammars)
    if arguments.tokenizer == str(BUNDLED):
        measure_jumps()
