"""Whether a prompt opens or closes the reasoning."""

import pytest
from quire.frontend.answer_format.reasoning import ReasoningMarks

MARKS = ReasoningMarks("<think>", "</think>")


@pytest.mark.parametrize(
    ("prompt", "is_open", "is_closed"),
    [
        ("user\nassistant\n<think>\n", True, False),
        ("assistant\n<think>\n\n</think>\n\n", False, True),
        ("say <think> please\nassistant\n", False, False),
        ("", False, False),
    ],
)
def test_only_the_end_of_the_prompt_counts(prompt: str, is_open: bool, is_closed: bool) -> None:
    assert (MARKS.is_open_at_end_of(prompt), MARKS.is_closed_at_end_of(prompt)) == (
        is_open,
        is_closed,
    )
