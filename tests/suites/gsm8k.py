"""GSM8K: word problems for pupils; the answer is the last number of the text."""

from __future__ import annotations

import re
from decimal import Decimal
from functools import partial
from pathlib import Path

from quire.tests.suites.questions import (
    CHAT,
    COMPLETIONS,
    Answer,
    NoData,
    Question,
    chat,
    lines_of,
)

MAX_TOKENS = 320
NUM_EXAMPLES = 5
HOW = "Think step by step. End with the line: #### and the number."
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def load(data: Path | None) -> list[Question]:
    """`data` has gsm8k.jsonl: test.jsonl of OpenAI's grade-school-math."""
    return [
        Question(
            f"gsm8k_{i}",
            CHAT,
            chat(f"{line['question']}\n{HOW}", MAX_TOKENS),
            partial(is_right, line["answer"]),
        )
        for i, line in enumerate(lines_of(folder(data) / "gsm8k.jsonl"))
    ]


def load_few_shot(data: Path | None) -> list[Question]:
    """The same questions for a base model, each at the end of a text of solved problems. `data`
    also has gsm8k_train.jsonl: train.jsonl, from which the solved problems are.
    """
    solved = lines_of(folder(data) / "gsm8k_train.jsonl")[:NUM_EXAMPLES]
    text = "".join(f"Question: {line['question']}\nAnswer: {line['answer']}\n\n" for line in solved)
    return [
        Question(
            f"gsm8k_{i}",
            COMPLETIONS,
            {
                "prompt": f"{text}Question: {line['question']}\nAnswer:",
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "stop": ["Question:"],
            },
            partial(is_right, line["answer"]),
        )
        for i, line in enumerate(lines_of(folder(data) / "gsm8k.jsonl"))
    ]


def folder(data: Path | None) -> Path:
    if data is None:
        raise NoData("gsm8k.jsonl is needed: name its folder with --data")
    return data


def number_of(text: str) -> Decimal | None:
    """Return the last number, as "flexible-extract" of lm-eval does."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def is_right(solution: str, answer: Answer) -> bool:
    """`solution` ends with "#### N"."""
    return number_of(answer.text) == number_of(solution.rpartition("####")[2])
