"""BFCL's AST categories (the package bfcl-eval, version 4): one turn, one or several calls of
functions, which its own checker compares with the possible answers.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from quire.tests.suites.questions import CHAT, Answer, Question

CATEGORIES = (
    *("simple_python", "simple_java", "simple_javascript", "multiple", "parallel"),
    *("parallel_multiple", "live_simple", "live_multiple", "live_parallel"),
    "live_parallel_multiple",
)
MAX_TOKENS = 256
SERVER = "server"  # the checker's name of the model


def load(_data: Path | None, is_strict: bool = False) -> list[Question]:
    """Return the questions of all CATEGORIES. `is_strict`: with `strict` functions, whose calls a
    server must hold to their schemas; llama.cpp's does so for all functions.
    """
    name_the_model()
    from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry

    found = []
    for category in CATEGORIES:
        entries, answers = load_dataset_entry(category), load_ground_truth_entry(category)
        found += [question(category, is_strict, *of) for of in zip(entries, answers, strict=True)]
    return found


def name_the_model() -> None:
    """The checker looks a model up in a table whose module imports the clients of twenty services
    and torch. Of that table it reads one field: whether dots in names became underscores, as
    OpenAI's names have none.
    """
    table = ModuleType("bfcl_eval.constants.model_config")
    table.MODEL_CONFIG_MAPPING = {SERVER: SimpleNamespace(underscore_to_dot=True)}
    sys.modules[table.__name__] = table


def question(
    category: str, is_strict: bool, entry: dict[str, Any], answer: dict[str, Any]
) -> Question:
    from bfcl_eval.constants.enums import ModelStyle
    from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI
    from bfcl_eval.model_handler.utils import convert_to_tool

    assert entry["id"] == answer["id"], (entry["id"], answer["id"])
    style = ModelStyle.OPENAI_COMPLETIONS
    tools = convert_to_tool(entry["function"], GORILLA_TO_OPENAPI, style)
    for tool in tools if is_strict else ():
        tool["function"]["strict"] = True
    body = {
        "messages": entry["question"][0],
        "tools": tools,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    judge = partial(is_right, category, entry["function"], answer["ground_truth"])
    return Question(entry["id"], CHAT, body, judge)


def is_right(category: str, functions: list[Any], possible: list[Any], answer: Answer) -> bool:
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    languages = {"simple_java": Language.JAVA, "simple_javascript": Language.JAVASCRIPT}
    language = languages.get(category, Language.PYTHON)
    if not answer.calls:
        return False
    calls = list(answer.calls)
    return ast_checker(functions, calls, possible, language, category, SERVER)["valid"]
