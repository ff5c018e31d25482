"""The marks between which a model writes its reasoning.

Must not know: templates, parsers, grammars.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningMarks:
    """Between them a model puts its reasoning, before anything else."""

    start: str
    end: str

    def is_open_at_end_of(self, prompt_text: str) -> bool:
        """Does the prompt end with the mark, as DeepSeek-R1's and QwQ's templates write it, so that
        the answer begins within its reasoning?

        Only the very end counts: a message may speak of the marks.
        """
        return prompt_text.rstrip().endswith(self.start)

    def is_closed_at_end_of(self, prompt_text: str) -> bool:
        """Does the prompt end with reasoning already done (or left out, as Qwen3's template writes
        it without enable_thinking)?
        """
        return prompt_text.rstrip().endswith(self.end)
