"""A logits processor with which a prompt chooses its answer: the engine, its prefix cache and its
parsers are real, and the model says what the test wants.

A prompt contains `scripted(ANSWER)`. The model writes ANSWER, and after a tool's result DONE.
"""

from __future__ import annotations

import base64
import re
from functools import cache
from pathlib import Path
from typing import Any

DONE = "All done."
OTHER = "Fine."  # to a prompt without a script, such as one that asks for a title
EOS = 2
SCRIPT = re.compile(r"SCRIPT-([\w-]+)")


def scripted(answer: str) -> str:
    """The answer in a form that no agent and no template changes."""
    return "SCRIPT-" + base64.urlsafe_b64encode(answer.encode()).decode().rstrip("=")


def answer_to(prompt: str) -> str:
    found = list(SCRIPT.finditer(prompt))
    if not found:
        return OTHER
    if "<tool_response>" in prompt[found[-1].end() :]:
        return DONE
    return base64.urlsafe_b64decode(found[-1][1] + "==").decode()


@cache
def tokenizer() -> Any:
    import quire
    from tokenizers import Tokenizer

    folder = Path(quire.__file__).parent / "frontend" / "bundled_model"
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def follow_the_script(params: Any) -> Any:
    """The factory of a request's processor, which leaves one token at each place."""
    token_ids: list[int] = []

    def processor(prompt_token_ids: list[int], output_token_ids: list[int], logits: Any) -> Any:
        if not token_ids:
            prompt = tokenizer().decode(prompt_token_ids, skip_special_tokens=False)
            encoded = tokenizer().encode(answer_to(prompt), add_special_tokens=False)
            token_ids.extend([*encoded.ids, EOS])
        wanted = token_ids[min(len(output_token_ids), len(token_ids) - 1)]
        logits.fill_(-float("inf"))
        logits[wanted] = 0.0
        return logits

    return processor
