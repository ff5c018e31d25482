"""GSM8K: word problems for pupils; the answer is the last number of the text."""

from __future__ import annotations

import re
from decimal import Decimal
from functools import partial
from pathlib import Path

from quire.tests.suites.questions import CHAT, Answer, NoData, Question, chat, lines_of

MAX_TOKENS = 320
HOW = "Think step by step. End with the line: #### and the number."
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def load(data: Path | None) -> list[Question]:
    """`data` has gsm8k.jsonl: test.jsonl of OpenAI's grade-school-math."""
    if data is None:
        raise NoData("gsm8k.jsonl is needed: name its folder with --data")
    return [
        Question(
            f"gsm8k_{i}",
            CHAT,
            chat(f"{line['question']}\n{HOW}", MAX_TOKENS),
            partial(is_right, line["answer"]),
        )
        for i, line in enumerate(lines_of(data / "gsm8k.jsonl"))
    ]


def number_of(text: str) -> Decimal | None:
    """Return the last number, as "flexible-extract" of lm-eval does."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def is_right(solution: str, answer: Answer) -> bool:
    """`solution` ends with "#### N"."""
    return number_of(answer.text) == number_of(solution.rpartition("####")[2])
