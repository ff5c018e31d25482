"""How many of other people's JSON schemas are compiled, whether the right instances are accepted,
and how long compilations and masks take.

    git clone https://github.com/guidance-ai/jsonschemabench
    python tests/bench/bench_json_schemas.py jsonschemabench/maskbench/data [--every 10]
    python tests/bench/bench_json_schemas.py jsonschemabench/data

The first folder (MaskBench) has instances to accept and to refuse; the second only schemas. Quire
refuses what its check refuses, also for time and memory. With `--engine llguidance`, llguidance
reads the schemas itself; `--engine xgrammar` needs that package. Times are of what is compiled.
"""

from __future__ import annotations

import argparse
import json
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from quire import StructuredOutputsParams
from quire.executor.sampling.grammar_check import CompilerSettings, GrammarCheck
from quire.executor.sampling.grammar_compiler import (
    GrammarCompiler,
    normalize,
    refusal,
    to_llguidance,
)
from quire.ipc.errors import InvalidParameterError
from tokenizers import Tokenizer

BUNDLED = Path(__file__).resolve().parents[2] / "frontend" / "bundled_model"
MOST_CHARACTERS = 20_000  # of an instance
STACK_BYTES = 64 * 2**20  # as the engine's thread that compiles


class Engine(Protocol):
    def admit(self, schema: str) -> None:
        """Raises ValueError for a schema that is not compiled."""

    def compile(self, schema: str) -> Any:
        """Returns a matcher. Raises ValueError."""

    def accepts(self, matcher: Any, token_ids: list[int], masks: list[float]) -> bool:
        """Whether a copy of a matcher takes all tokens and may end; adds each mask's seconds."""


class Llguidance:
    def __init__(self, directory: Path, vocab_size: int):
        self.compiler = GrammarCompiler(str(directory), vocab_size, None)
        self.tokenizer = self.compiler.tokenizer
        self.words = np.zeros(self.compiler.num_mask_words, np.int32)

    def admit(self, schema: str) -> None:
        """Whatever it takes."""

    def compile(self, schema: str) -> Any:
        from llguidance import LLMatcher

        params = normalize(StructuredOutputsParams(json=schema))
        matcher = LLMatcher(self.tokenizer, to_llguidance(params), log_level=0)
        if matcher.is_error():
            raise refusal(matcher.get_error())
        return matcher

    def accepts(self, matcher: Any, token_ids: list[int], masks: list[float]) -> bool:
        copy = matcher.deep_copy()
        for token in token_ids:
            start = time.thread_time()
            copy.unsafe_compute_mask_ptr(self.words.ctypes.data, self.words.nbytes)
            masks.append(time.thread_time() - start)
            if not copy.try_consume_tokens([token]):
                return False
        return copy.is_accepting()


class Quire(Llguidance):
    def __init__(self, directory: Path, vocab_size: int):
        super().__init__(directory, vocab_size)
        self.check = GrammarCheck(CompilerSettings(str(directory), vocab_size, None))

    def admit(self, schema: str) -> None:
        self.check.check(normalize(StructuredOutputsParams(json=schema)))

    def compile(self, schema: str) -> Any:
        return self.compiler.compile(normalize(StructuredOutputsParams(json=schema)))


class Xgrammar:
    def __init__(self, directory: Path, vocab_size: int):
        import xgrammar  # pyright: ignore[reportMissingImports]
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(directory)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self.xgrammar = xgrammar
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.mask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def admit(self, schema: str) -> None:
        """Whatever it takes."""

    def compile(self, schema: str) -> Any:
        try:
            return self.compiler.compile_json_schema(schema, strict_mode=False)
        except RuntimeError as error:
            raise ValueError(str(error)) from None

    def accepts(self, matcher: Any, token_ids: list[int], masks: list[float]) -> bool:
        copy = self.xgrammar.GrammarMatcher(matcher, terminate_without_stop_token=True)
        for token in token_ids:
            start = time.thread_time()
            copy.fill_next_token_bitmask(self.mask)
            masks.append(time.thread_time() - start)
            if not copy.accept_token(token):
                return False
        return copy.is_terminated() or copy.is_completed()


ENGINES = {"quire": Quire, "llguidance": Llguidance, "xgrammar": Xgrammar}


def read(directory: Path, every: int) -> Iterator[tuple[str, str, list[tuple[bool, str]]]]:
    """Names, schemas, and instances with whether they are valid."""
    for path in sorted(directory.rglob("*.json"))[::every]:
        contents = json.loads(path.read_text())
        tests = contents.get("tests", []) if "schema" in contents else []
        schema = contents.get("schema", contents)
        texts = [(test["valid"], json.dumps(test["data"], ensure_ascii=False)) for test in tests]
        yield path.name, json.dumps(schema), texts


def reason_of(error: Exception) -> str:
    """A refusal without what differs between schemas."""
    text = str(error).removeprefix("structured_outputs: ").split(" while processing ")[0]
    return re.sub(r"'[^']*'|\"[^\"]*\"|/.*/|#\S*|\d+", "…", text)[:100]


def show_times(name: str, seconds: list[float]) -> None:
    if seconds:
        values = np.array(seconds) * 1e6
        quantiles = [f"p{q} {np.percentile(values, q):,.0f} us" for q in (50, 99)]
        print(f"{name}: {len(values):,}, {', '.join(quantiles)}, most {values.max():,.0f} us")


def measure(arguments: argparse.Namespace) -> None:
    directory = Path(arguments.tokenizer)
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    engine: Engine = ENGINES[arguments.engine](directory, vocab_size)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    reasons: Counter[str] = Counter()
    wrong: dict[str, list[str]] = defaultdict(list)
    compilations, masks, num_texts, count = [], [], Counter(), 0
    for name, schema, texts in read(Path(arguments.directory), arguments.every):
        count += 1
        try:
            engine.admit(schema)
            start = time.thread_time()
            matcher = engine.compile(schema)
        except (ValueError, InvalidParameterError) as error:
            reasons[reason_of(error)] += 1
            wrong["refused"].append(name)
            continue
        compilations.append(time.thread_time() - start)
        for index, (is_valid, text) in enumerate(texts):
            if len(text) > MOST_CHARACTERS:
                continue
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            num_texts[is_valid] += 1
            if engine.accepts(matcher, ids, masks) != is_valid:
                wrong["rejected" if is_valid else "accepted"].append(f"{name}:{index}")
    refused = len(wrong["refused"])
    print(f"{arguments.engine}: {count:,} schemas, {refused:,} refused ({refused / count:.2%})")
    print(f"of {num_texts[True]:,} valid instances, {len(wrong['rejected']):,} are rejected")
    print(f"of {num_texts[False]:,} invalid instances, {len(wrong['accepted']):,} are accepted")
    show_times("compilations", compilations)
    show_times("masks", masks)
    for reason, number in reasons.most_common(arguments.reasons):
        print(f"{number:6}  {reason}")
    if arguments.wrong:
        Path(arguments.wrong).write_text(json.dumps(wrong, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory")
    parser.add_argument("--engine", choices=list(ENGINES), default="quire")
    parser.add_argument("--tokenizer", default=str(BUNDLED), help="a model's directory")
    parser.add_argument("--every", type=int, default=1, help="only every Nth schema")
    parser.add_argument("--reasons", type=int, default=30, help="how many to print")
    parser.add_argument("--wrong", help="a file for the names of what was refused or wrong")
    arguments = parser.parse_args()
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=measure, args=(arguments,))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
