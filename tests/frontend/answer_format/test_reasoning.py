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


@pytest.mark.parametrize(
    ("begun", "is_open", "has_text"),
    [
        ("", False, False),
        ("<think>", True, False),
        (" <think>\n", True, False),
        ("<think>\nHm", True, True),
        ("<think>Hm</think>", False, False),
        ("Is <think> a mark?", False, False),
    ],
)
def test_an_answer_that_was_begun_may_end_in_its_reasoning(
    begun: str, is_open: bool, has_text: bool
) -> None:
    assert (MARKS.is_left_open_in(begun), MARKS.has_text_open_in(begun)) == (is_open, has_text)
