"""The forms in which prompts are given, and the arguments of a call for several prompts.

Must not know: the model, the tokenizer, what is asked about a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...ipc.checks import require, require_kind, require_text, shown
from ...ipc.errors import InvalidParameterError

# A prompt is text, token ids, or a dict with these keys. text_pair is the second text of a pair,
# for requests that pool.
Prompt = str | list[int] | dict[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "text_pair")


class PromptParts(NamedTuple):
    """`token_ids` as given and unchecked; None: the text is to be tokenized."""

    text: str | None
    token_ids: Any = None
    cache_salt: str | None = None
    text_pair: str | None = None


def read_prompt(prompt: Prompt) -> PromptParts:
    """Raises InvalidParameterError. If both text and ids are given, the ids are used and the text
    is informative only.
    """
    if isinstance(prompt, str):
        require_text("prompt", prompt)
        return PromptParts(prompt)
    if isinstance(prompt, list):
        return PromptParts(None, prompt)
    return _read_dict(prompt)


def _read_dict(prompt: Any) -> PromptParts:
    if not isinstance(prompt, dict):
        raise InvalidParameterError(
            "prompt",
            f"must be a string, a list of token ids or a dict, got {type(prompt).__name__}",
        )
    for key in prompt:
        if key not in PROMPT_KEYS:
            raise InvalidParameterError(
                "prompt",
                f"has the unknown key {shown(key)}; the keys are {', '.join(PROMPT_KEYS)}",
            )
    text, token_ids, salt, pair = map(prompt.get, PROMPT_KEYS)
    for name, value in (("prompt", text), ("text_pair", pair)):
        if value is not None:
            if not isinstance(value, str):
                raise InvalidParameterError(name, f"must be a string, got {type(value).__name__}")
            require_text(name, value)
    if salt is not None:
        require_kind(
            isinstance(salt, str) and salt, "cache_salt", "a string that is not empty", salt
        )
        require_text("cache_salt", salt)
    if token_ids is None and text is None:
        raise InvalidParameterError("prompt", "must have `prompt` or `prompt_token_ids`")
    require(
        pair is None or token_ids is None,
        "text_pair",
        "must not be given with prompt_token_ids: both texts are tokenized together",
    )
    return PromptParts(text, token_ids, salt, pair)


def prompt_list(prompts: Any) -> list[Prompt]:
    """Converts the argument to a list. A single prompt is a string, a dict, or a list of integers;
    anything else must be a sequence of prompts.
    """
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidParameterError(
            "prompts", f"must be a prompt or a sequence of prompts, got {type(prompts).__name__}"
        )
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def one_each(name: str, value: Any, num_prompts: int) -> list[Any]:
    """An argument that is one for all prompts, or a sequence with one for each."""
    if not isinstance(value, Sequence):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise InvalidParameterError(
            name,
            f"must be one for all or one per prompt, got {len(value)} for {num_prompts} prompts",
        )
    return list(value)


def error_in_request(
    error: InvalidParameterError, index: int, num_prompts: int | None
) -> InvalidParameterError:
    """The error of a prompt with its index, unless it is the only prompt. None: their number is
    unknown.
    """
    if num_prompts == 1:
        return error
    of = "" if num_prompts is None else f" of {num_prompts}"
    where = f"(in request {index}{of}, counted from 0)"
    return InvalidParameterError(error.parameter, f"{error.problem} {where}")
