"""The engine's counters. SchedulerStats carries them, and get_metrics names them.

Must not know: who counts what when, or who reads it. frontend/telemetry/stats.py has the table of
all counters and their meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from ..ipc.messages import FinishReason, SchedulerStats


@dataclass(slots=True)
class Counters:
    """Each field is also a field of SchedulerStats with the same name. Counters only grow."""

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
    num_finished_timeout: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_blocks_offloaded: int = 0
    num_blocks_reloaded: int = 0
    num_blocks_corrupt: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0

    def count_end(self, reason: FinishReason) -> None:
        """Counts the end of an accepted request; refused ones count in num_requests_refused
        only.
        """
        name = f"num_finished_{reason}"
        setattr(self, name, getattr(self, name) + 1)

    def count_drafts(self, num_drafted: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Of each draft of a step."""
        self.num_drafts += len(num_drafted)
        self.num_draft_tokens += sum(num_drafted)
        self.num_accepted_tokens += sum(num_accepted)

    def stats(
        self,
        num_running: int,
        num_waiting: int,
        num_free_blocks: int,
        num_blocks: int,
        prefix_cache_queries: int,
        prefix_cache_hits: int,
        num_swapped: int,
    ) -> SchedulerStats:
        """With these gauges.

        Made in every step, so by position: by name it takes ten times as long.
        """
        return _make_stats(
            num_running,
            num_waiting,
            num_free_blocks,
            num_blocks,
            *_first_counters(self),
            prefix_cache_queries,
            prefix_cache_hits,
            num_swapped,
            *_other_counters(self),
        )


# SchedulerStats begins with four gauges, four counters, two counters of the cache and one more
# gauge; the rest are counters.
_make_stats: Callable[..., SchedulerStats] = SchedulerStats  # pyright cannot count *values
_first_counters: Callable[[object], Iterable[int]] = attrgetter(
    *SchedulerStats.__struct_fields__[4:8]
)
_other_counters: Callable[[object], Iterable[int]] = attrgetter(
    *SchedulerStats.__struct_fields__[11:]
)
