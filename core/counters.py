"""What the engine counts from its start to its end; SchedulerStats carries these numbers, get_metrics names each of them.
May know: finish reasons.
Must not know: who counts what when, or who reads it. The table of all counters and their meaning is in frontend/stats.py."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter

from ..ipc.messages import FinishReason


@dataclass(slots=True)
class Counters:
    """Each field is also one of SchedulerStats, by the same name. They only grow."""

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    num_blocks_copied: int = 0
    num_finished_stop: int = 0
    num_finished_length: int = 0
    num_finished_abort: int = 0
    num_finished_error: int = 0
    num_requests_refused: int = 0
    num_requests_orphaned: int = 0
    num_grammar_refusals: int = 0
    num_failed_utilities: int = 0

    def count_end(self, reason: FinishReason) -> None:
        """A request that was taken has ended; one that was refused is in num_requests_refused alone."""
        name = f"num_finished_{reason}"
        setattr(self, name, getattr(self, name) + 1)

    def as_dict(self) -> dict[str, int]:
        return dict(zip(_NAMES, _values(self)))


_NAMES = tuple(field.name for field in fields(Counters))
_values = attrgetter(*_NAMES)
