"""The forms of a prompt; test_input_processor.py has the refusals that a user sees."""

from __future__ import annotations

import pytest
from quire import InvalidParameterError
from quire.frontend.requests.prompts import PromptParts, read_prompt


def test_forms() -> None:
    assert read_prompt("a") == PromptParts("a")
    assert read_prompt([1, 2]) == PromptParts(None, [1, 2])
    assert read_prompt({"prompt": "a", "cache_salt": "s"}) == PromptParts("a", None, "s")
    assert read_prompt({"prompt": "a", "text_pair": ""}) == PromptParts("a", None, None, "")


@pytest.mark.parametrize(
    ("prompt", "parameter"),
    [
        ({"prompt": "a", "text_pair": 5}, "text_pair"),
        ({"prompt": "a", "text_pair": "\ud800"}, "text_pair"),
        ({"text_pair": "a"}, "prompt"),
        ({"prompt_token_ids": [1], "text_pair": "a"}, "text_pair"),
        ({"prompt": "a", "pair": "b"}, "prompt"),
    ],
)
def test_refused_forms(prompt, parameter) -> None:
    with pytest.raises(InvalidParameterError) as raised:
        read_prompt(prompt)
    assert raised.value.parameter == parameter
