"""Public suites through servers with OpenAI's API: scores, their intervals, and speed.

    python tests/suites/run.py --server quire=http://127.0.0.1:8000 \\
        --server llama.cpp=http://127.0.0.1:8080 [--suite gsm8k …] [--limit 50] [--data FOLDER]

All answers are greedy. The servers are asked in turns, so that one at a time computes. Of two
servers, the answers are compared, too; the exit status is 1 if the first one's score lies below the
interval of the second one's. docs/testing.md says what to install.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
from quire.tests.suites import bfcl, following, gsm8k, humaneval
from quire.tests.suites.intervals import wilson
from quire.tests.suites.questions import Answer, NoData, Question

SUITES: dict[str, Callable[[Path | None], list[Question]]] = {
    "bfcl": bfcl.load,
    "bfcl-strict": partial(bfcl.load, is_strict=True),
    "ifeval": following.load_ifeval,
    "ifbench": following.load_ifbench,
    "gsm8k": gsm8k.load,
    "gsm8k-few-shot": gsm8k.load_few_shot,
    "humaneval": humaneval.load,
}
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Server:
    """`model`: the first one that the server names."""

    name: str
    url: str
    model: str

    @classmethod
    def at(cls, name: str, url: str) -> Server:
        url = url.rstrip("/").removesuffix("/v1")
        models = httpx.get(f"{url}/v1/models", timeout=TIMEOUT_S).raise_for_status().json()
        return cls(name, url, models["data"][0]["id"])


@dataclass(frozen=True)
class Reply:
    """`answer` is None where the server refused, and `error` says why."""

    answer: Answer | None
    error: str
    is_right: bool


@dataclass(frozen=True)
class Result:
    """One suite on one server; `seconds` are those of all questions together."""

    suite: str
    server: str
    replies: tuple[Reply, ...]
    seconds: float

    @property
    def num_right(self) -> int:
        return sum(reply.is_right for reply in self.replies)

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.num_right, len(self.replies))

    @property
    def score(self) -> float:
        return self.num_right / len(self.replies)

    @property
    def tokens_per_s(self) -> float:
        answers = [reply.answer for reply in self.replies if reply.answer is not None]
        return sum(answer.num_tokens for answer in answers) / self.seconds

    def row(self) -> str:
        low, high = self.interval
        refused = Counter(reply.error for reply in self.replies if reply.error)
        return (
            f"| {self.suite} | {self.server} | {len(self.replies)} | {100 * self.score:.1f} % "
            f"| {100 * low:.1f} to {100 * high:.1f} | {self.tokens_per_s:.1f} | {self.seconds:.0f} "
            f"| {'; '.join(f'{count} times {why}' for why, count in refused.items()) or '0'} |"
        )


HEAD = (
    "| suite | server | questions | score | 95 % | tokens/s | seconds | refused |\n"
    "|---|---|---|---|---|---|---|---|"
)


def ask(server: Server, client: httpx.Client, question: Question) -> tuple[Answer | None, str]:
    """Return the answer, or None and why there is none."""
    body = question.body | {"model": server.model}
    response = client.post(server.url + question.path, json=body)
    if response.status_code != 200:
        return None, f"HTTP {response.status_code}: {response.text[:200]}"
    return Answer.of(response.json()), ""


def run(suite: str, server: Server, questions: list[Question], concurrency: int) -> Result:
    """Ask all questions, then judge the answers."""
    with httpx.Client(timeout=TIMEOUT_S) as client, ThreadPoolExecutor(concurrency) as pool:
        began = time.perf_counter()
        found = list(pool.map(lambda question: ask(server, client, question), questions))
        seconds = time.perf_counter() - began
    replies = tuple(
        Reply(answer, error, answer is not None and question.is_right(answer))
        for question, (answer, error) in zip(questions, found, strict=True)
    )
    return Result(suite, server.name, replies, seconds)


def compare(first: Result, second: Result) -> tuple[str, bool]:
    """Return a sentence, and whether the first one's score reaches the second one's interval."""
    pairs = list(zip(first.replies, second.replies, strict=True))
    equal = sum(mine.answer is not None and same(mine, other) for mine, other in pairs)
    only = [
        sum(a.is_right > b.is_right for a, b in of)
        for of in (pairs, [(other, mine) for mine, other in pairs])
    ]
    reaches = first.score >= second.interval[0]
    return (
        f"{first.suite}: {equal} of {len(pairs)} answers are equal; only {first.server} is right "
        f"{only[0]} times, only {second.server} {only[1]} times; the score of {first.server} is "
        f"{'not ' if reaches else ''}below the interval of {second.server}.",
        reaches,
    )


def same(mine: Reply, other: Reply) -> bool:
    """Whether text and calls are the same; white space around a text is a matter of style."""
    if mine.answer is None or other.answer is None:
        return mine.answer is other.answer
    return (mine.answer.text.strip(), mine.answer.calls) == (
        other.answer.text.strip(),
        other.answer.calls,
    )


def chosen(questions: list[Question], limit: int | None, max_tokens: int | None) -> list[Question]:
    """Return `limit` of the questions, always the same, with shorter answers if so wanted."""
    if limit is not None and limit < len(questions):
        questions = random.Random(0).sample(questions, limit)
    if max_tokens is None:
        return questions
    return [
        replace(question, body=question.body | {"max_tokens": max_tokens}) for question in questions
    ]


def as_json(results: list[Result], questions: dict[str, list[Question]]) -> list[dict[str, Any]]:
    """Return a row for each question and server."""
    return [
        {"suite": result.suite, "server": result.server, "question": question.name} | asdict(reply)
        for result in results
        for question, reply in zip(questions[result.suite], result.replies, strict=True)
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--suite", nargs="*", choices=SUITES, default=list(SUITES))
    parser.add_argument("--limit", type=int, help="questions of each suite [all]")
    parser.add_argument("--max-tokens", type=int, help="of each answer [the suite's]")
    parser.add_argument("--data", type=Path, help="a folder with gsm8k.jsonl and ifeval.jsonl")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every answer to this file")
    args = parser.parse_args(argv)
    servers = [Server.at(*named.split("=", 1)) for named in args.server]
    results, sentences, asked, all_reach = [], [], {}, True
    print(HEAD)
    for suite in args.suite:
        try:
            asked[suite] = chosen(SUITES[suite](args.data), args.limit, args.max_tokens)
        except (NoData, ImportError) as error:
            sys.exit(f"{suite}: {error}")
        of_suite = [run(suite, server, asked[suite], args.concurrency) for server in servers]
        print("\n".join(result.row() for result in of_suite), flush=True)
        results += of_suite
        if len(servers) == 2:
            sentence, reaches = compare(*of_suite)
            sentences.append(sentence)
            all_reach &= reaches
    print("", *sentences, sep="\n")
    if args.json:
        args.json.write_text(json.dumps(as_json(results, asked), indent=1))
    return 0 if all_reach else 1


if __name__ == "__main__":
    sys.exit(main())
