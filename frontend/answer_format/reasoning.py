"""The marks around a model's reasoning.

Must not know: templates, parsers, how a grammar is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .grammar_text import GrammarText


@dataclass(frozen=True)
class ReasoningMarks:
    """The marks between which a model writes its reasoning, before anything else."""

    start: str
    end: str
    # This text comes between two messages, for models that write their answers as messages.
    next_message: str = ""
    # The content may stand between these marks after the reasoning.
    content_start: str = ""
    content_end: str = ""
    # This mark may end the whole answer.
    answer_end: str = ""
    # Whether an answer without reasoning may begin with `end`.
    may_omit_start: bool = False
    # These texts all occur in the templates of models with these marks; without any, `end` does.
    texts: tuple[str, ...] = ()
    # These are the values of the template's reasoning_effort, ascending, for models that know no
    # others.
    efforts: tuple[str, ...] = ()

    def is_shown_in(self, template: str) -> bool:
        """Tells whether the models of a chat template write these marks."""
        return all(text in template for text in self.texts or (self.end,))

    def is_open_at_end_of(self, prompt_text: str) -> bool:
        """Tells whether the prompt ends with the start mark (DeepSeek-R1, QwQ), so that the answer
        begins within the reasoning.

        Only the very end counts: a message may mention the marks.
        """
        return prompt_text.rstrip().endswith(self.start)

    def is_closed_at_end_of(self, prompt_text: str) -> bool:
        """Tells whether the prompt ends with completed or omitted reasoning (Qwen3 without
        enable_thinking), or with the mark before the content.
        """
        text = prompt_text.rstrip()
        return text.endswith(self.end) or self.is_content_open_at_end_of(text)

    def is_content_open_at_end_of(self, prompt_text: str) -> bool:
        """Tells whether the prompt ends with the mark before the content (Kimi K3)."""
        return bool(self.content_start) and prompt_text.rstrip().endswith(self.content_start)

    def is_left_open_in(self, text: str) -> bool:
        """Tells whether an unfinished answer ends within its reasoning."""
        return text.lstrip().startswith(self.start) and self.end not in text

    def has_text_open_in(self, text: str) -> bool:
        """Tells whether it ends within reasoning that has text already."""
        return self.is_left_open_in(text) and text.strip() != self.start

    def write_content(self, grammar: GrammarText, content: str) -> str:
        """Writes a grammar for an answer without reasoning, from a grammar for its content."""
        return content

    def write_before_calls(self, grammar: GrammarText, prompt_text: str) -> str:
        """Writes a grammar for what stands between the reasoning and calls without content."""
        return ""
