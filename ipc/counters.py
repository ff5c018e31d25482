"""The counters and gauges of an engine and of its clients: one row each, whose text /metrics and
docs/metrics.md show.

Must not know: who counts what when, or who reads it.

get_metrics() returns these names with every client. Counters count since the engine's start and for
all clients together, except those of ClientCounters, which count for one client. With
data_parallel_size they are the sums of all engines'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

# /metrics has it under this name; others are there under vLLM's names, or by a label.
UNDER_ITS_NAME = msgspec.Meta(extra={"is_under_its_name": True})


class EngineCounters(msgspec.Struct):
    """What the scheduler counts. Each field only grows."""

    num_prompt_tokens: Annotated[int, "Prompt tokens computed, recomputed ones included."] = 0
    num_generation_tokens: Annotated[int, "Output tokens of all completions."] = 0
    prefix_cache_queries: Annotated[int, "Prompt tokens looked up in the prefix cache."] = 0
    prefix_cache_hits: Annotated[int, "Prompt tokens found in the prefix cache."] = 0
    external_prefix_cache_queries: Annotated[
        int, "Prompt tokens looked up among offloaded blocks."
    ] = 0
    external_prefix_cache_hits: Annotated[int, "Prompt tokens found among offloaded blocks."] = 0
    num_preemptions: Annotated[
        int, "Times that a running request was preempted and put back into the queue."
    ] = 0
    num_drafts: Annotated[int, "Rows of steps that verified draft tokens."] = 0
    num_draft_tokens: Annotated[int, "Draft tokens that were verified."] = 0
    num_accepted_tokens: Annotated[int, "Draft tokens that were accepted as output."] = 0
    num_recomputed_tokens: Annotated[
        int, UNDER_ITS_NAME, "Tokens computed again after a preemption."
    ] = 0
    num_blocks_swapped_out: Annotated[
        int, UNDER_ITS_NAME, "KV-cache blocks moved to host memory for preempted requests."
    ] = 0
    num_blocks_swapped_in: Annotated[
        int, UNDER_ITS_NAME, "KV-cache blocks moved back from host memory."
    ] = 0
    num_blocks_copied: Annotated[
        int, UNDER_ITS_NAME, "KV-cache blocks copied for completions of one prompt that diverge."
    ] = 0
    num_blocks_offloaded: Annotated[
        int, UNDER_ITS_NAME, "Evicted KV-cache blocks stored outside the cache."
    ] = 0
    num_blocks_reloaded: Annotated[
        int, UNDER_ITS_NAME, "KV-cache blocks read back from outside the cache."
    ] = 0
    num_blocks_corrupt: Annotated[
        int,
        UNDER_ITS_NAME,
        "Stored KV-cache blocks and states found to be damaged, which were not used.",
    ] = 0
    num_states_saved: Annotated[
        int, UNDER_ITS_NAME, "Checkpoints taken of the states of recurrent layers."
    ] = 0
    num_states_restored: Annotated[
        int, UNDER_ITS_NAME, "Requests that started from such a checkpoint."
    ] = 0
    num_states_evicted: Annotated[
        int, UNDER_ITS_NAME, "Such checkpoints that made room for others."
    ] = 0
    num_states_offloaded: Annotated[
        int, UNDER_ITS_NAME, "Such checkpoints stored outside the cache."
    ] = 0
    num_states_reloaded: Annotated[
        int, UNDER_ITS_NAME, "Such checkpoints read back from outside the cache."
    ] = 0
    num_blocks_pulled: Annotated[
        int, UNDER_ITS_NAME, "Blocks, and pieces of states, received from other engines."
    ] = 0
    num_bytes_pulled: Annotated[
        int, UNDER_ITS_NAME, "Bytes of what was received from other engines."
    ] = 0
    num_pulls_failed: Annotated[
        int,
        UNDER_ITS_NAME,
        "Prompts for which no other engine sent all that it has: they refused, were too slow or "
        "gone, or sent damaged data. What was missing was computed.",
    ] = 0
    num_blocks_sent: Annotated[
        int, UNDER_ITS_NAME, "Blocks, and pieces of states, sent to other engines."
    ] = 0
    num_bytes_sent: Annotated[int, UNDER_ITS_NAME, "Bytes of what was sent to other engines."] = 0
    num_images_encoded: Annotated[
        int, UNDER_ITS_NAME, "Images, or tiles of images, that the encoder has computed."
    ] = 0
    num_image_rows_encoded: Annotated[
        int, UNDER_ITS_NAME, "Rows of these, each in the place of one prompt token."
    ] = 0
    mm_cache_queries: Annotated[
        int, "Images, or tiles of images, looked up among those that are encoded already."
    ] = 0
    mm_cache_hits: Annotated[int, "Images, or tiles of images, found there."] = 0
    num_requests_refused: Annotated[
        int, UNDER_ITS_NAME, "Requests whose parameters the engine rejected."
    ] = 0
    num_requests_orphaned: Annotated[
        int, UNDER_ITS_NAME, "Requests that ended because their client left or died."
    ] = 0
    num_grammar_refusals: Annotated[
        int,
        UNDER_ITS_NAME,
        "Structured outputs whose grammar did not compile within its limits.",
    ] = 0
    num_failed_utilities: Annotated[
        int, UNDER_ITS_NAME, "Calls of the engine, such as pause, that raised an exception."
    ] = 0
    num_finished_stop: Annotated[
        int,
        "Requests that ended with a stop token; those with a stop string are aborted by the "
        "frontend.",
    ] = 0
    num_finished_length: Annotated[int, "Requests that ended with max_tokens or the context."] = 0
    num_finished_abort: Annotated[
        int, 'Requests aborted by a client, a stop string, pause("abort") or a lost client.'
    ] = 0
    num_finished_error: Annotated[
        int,
        "Requests that failed inside the engine: logits that are not finite, an exception in a "
        "processor.",
    ] = 0
    num_finished_timeout: Annotated[int, "Requests that ended at their timeout_s."] = 0

    def count_drafts(self, num_drafted: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Counts the drafts of a step: of each, its tokens and those that were accepted."""
        self.num_drafts += len(num_drafted)
        self.num_draft_tokens += sum(num_drafted)
        self.num_accepted_tokens += sum(num_accepted)


class SchedulerStats(EngineCounters, array_like=True, omit_defaults=True, gc=False):
    """The counters and these gauges after a step."""

    num_running: Annotated[int, "Requests that take part in the engine's steps now."] = 0
    num_waiting: Annotated[
        int, "Requests in the engine's queue now, including preempted and paused ones."
    ] = 0
    num_swapped: Annotated[int, "Preempted requests whose KV entries are in host memory now."] = 0
    num_free_blocks: Annotated[int, "KV-cache blocks that no request uses now."] = 0
    num_blocks: Annotated[int, "All KV-cache blocks, the null block included."] = 0


# Made in every step, so by position: by name it takes ten times as long. pyright cannot count
# *values.
make_stats: Callable[..., SchedulerStats] = SchedulerStats


class TransportStats(msgspec.Struct, frozen=True):
    """Counters of an engine's process, or of a client in the same process."""

    num_bad_frames: Annotated[
        int, UNDER_ITS_NAME, "Invalid messages from clients, which the engine dropped."
    ] = 0
    num_lost_outputs: Annotated[
        int,
        UNDER_ITS_NAME,
        "Outputs that could not be encoded; their requests ended with an error.",
    ] = 0
    num_overflowed_clients: Annotated[
        int, UNDER_ITS_NAME, "Clients of a daemon disconnected because they read no outputs."
    ] = 0


class ClientCounters(msgspec.Struct, frozen=True):
    """Counters of one client of the engine."""

    num_inputs_refused: Annotated[
        int,
        UNDER_ITS_NAME,
        "Requests that this server rejected before sending them to the engine.",
    ] = 0
    num_bad_engine_frames: Annotated[
        int, UNDER_ITS_NAME, "Invalid messages from the engine, which this server dropped."
    ] = 0
    num_rejected_peers: Annotated[
        int, UNDER_ITS_NAME, "Connections to the engine's sockets by a process without their key."
    ] = 0
    num_dropped_rows: Annotated[
        int, UNDER_ITS_NAME, "Outputs of an engine that had been replaced, which were dropped."
    ] = 0
    num_requests_resumed: Annotated[
        int, UNDER_ITS_NAME, "Requests that continued on another engine after a death."
    ] = 0
    num_requests_quarantined: Annotated[
        int, UNDER_ITS_NAME, "Requests ended because engines died each time they computed them."
    ] = 0
    num_engine_restarts: Annotated[
        int,
        "Engines that took the place of one that died; the engine's own counters then start at 0 "
        "again.",
    ] = 0


_NOTES: dict[str, tuple[Any, ...]] = {
    field.name: field.type.__metadata__
    for struct in (SchedulerStats, TransportStats, ClientCounters)
    for field in msgspec.structs.fields(struct)
}
# every counter and gauge of get_metrics by name, and those that /metrics has under this name
TEXTS = {name: str(notes[-1]) for name, notes in _NOTES.items()}
TEXTS_UNDER_THEIR_NAMES = {
    name: TEXTS[name] for name, notes in _NOTES.items() if UNDER_ITS_NAME in notes
}
