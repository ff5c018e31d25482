"""The marks around a model's reasoning.

Must not know: templates, parsers, grammars.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningMarks:
    """The marks between which a model writes its reasoning, before anything else."""

    start: str
    end: str

    def is_open_at_end_of(self, prompt_text: str) -> bool:
        """Whether the prompt ends with the start mark (DeepSeek-R1, QwQ), so that the answer begins
        within the reasoning.

        Only the very end counts: a message may mention the marks.
        """
        return prompt_text.rstrip().endswith(self.start)

    def is_closed_at_end_of(self, prompt_text: str) -> bool:
        """Whether the prompt ends with completed or omitted reasoning (Qwen3 without
        enable_thinking).
        """
        return prompt_text.rstrip().endswith(self.end)
