"""The metrics that are read from what an engine counts: their names and values.

Must not know: engines, Prometheus.
"""

from __future__ import annotations

from collections.abc import Callable

Counts = dict[str, int]  # of get_metrics, and "num_queued" in the server


def _named(name: str) -> Callable[[Counts], float]:
    return lambda counts: counts.get(name, 0)


def _waiting(counts: Counts) -> int:
    return counts.get("num_waiting", 0) + counts.get("num_swapped", 0) + counts["num_queued"]


def _usage(counts: Counts) -> float:
    num_blocks = counts.get("num_blocks", 0)
    return 1 - counts["num_free_blocks"] / (num_blocks - 1) if num_blocks > 1 else 0.0


def _prompt_tokens(counts: Counts) -> int:
    names = "num_prompt_tokens", "prefix_cache_hits", "external_prefix_cache_hits"
    return sum(counts.get(name, 0) for name in names)


# vLLM's name -> (value for an engine, description)
Table = dict[str, tuple[Callable[[Counts], float], str]]
LOAD: Table = {
    "num_requests_running": (
        _named("num_running"),
        "Requests that take part in the engine's steps now.",
    ),
    "num_requests_waiting": (
        _waiting,
        "Waiting requests, in the server's queue and in the engine's.",
    ),
    "kv_cache_usage_perc": (
        _usage,
        "Share of the KV cache's blocks that requests use now, from 0 to 1.",
    ),
}
PROMPTS: Table = {
    "prompt_tokens": (_prompt_tokens, "Prompt tokens computed, or found in a cache."),
    "prompt_tokens_recomputed": (
        _named("num_recomputed_tokens"),
        "Tokens computed again after a preemption.",
    ),
    "prompt_tokens_cached": (
        _named("prefix_cache_hits"),
        "Prompt tokens found in the prefix cache.",
    ),
}
COUNTERS: Table = {
    "generation_tokens": (_named("num_generation_tokens"), "Output tokens of all completions."),
    "prefix_cache_queries": (
        _named("prefix_cache_queries"),
        "Prompt tokens looked up in the prefix cache.",
    ),
    "prefix_cache_hits": (
        _named("prefix_cache_hits"),
        "Prompt tokens found in the prefix cache.",
    ),
    "external_prefix_cache_queries": (
        _named("external_prefix_cache_queries"),
        "Prompt tokens looked up among offloaded blocks.",
    ),
    "external_prefix_cache_hits": (
        _named("external_prefix_cache_hits"),
        "Prompt tokens found among offloaded blocks.",
    ),
    "num_preemptions": (
        _named("num_preemptions"),
        "Times that a running request was preempted and put back into the queue.",
    ),
    "spec_decode_num_drafts": (_named("num_drafts"), "Rows of steps that verified draft tokens."),
    "spec_decode_num_draft_tokens": (
        _named("num_draft_tokens"),
        "Draft tokens that were verified.",
    ),
    "spec_decode_num_accepted_tokens": (
        _named("num_accepted_tokens"),
        "Draft tokens that were accepted as output.",
    ),
}
# Engine counters that vLLM does not have, under their own names: name -> description.
OWN_COUNTERS = {
    "num_recomputed_tokens": "Tokens computed again after a preemption.",
    "num_blocks_swapped_out": "KV-cache blocks moved to host memory for preempted requests.",
    "num_blocks_swapped_in": "KV-cache blocks moved back from host memory.",
    "num_blocks_copied": "KV-cache blocks copied for completions of one prompt that diverge.",
    "num_blocks_offloaded": "Evicted KV-cache blocks stored outside the cache.",
    "num_blocks_reloaded": "KV-cache blocks read back from outside the cache.",
    "num_blocks_corrupt": "Stored KV-cache blocks found to be damaged, which were not used.",
    "num_requests_refused": "Requests whose parameters the engine rejected.",
    "num_requests_orphaned": "Requests that ended because their client left or died.",
    "num_grammar_refusals": "Structured outputs whose grammar did not compile within its limits.",
    "num_failed_utilities": "Calls of the engine, such as pause, that raised an exception.",
    "num_bad_frames": "Invalid messages from clients, which the engine dropped.",
    "num_lost_outputs": "Outputs that could not be encoded; their requests ended with an error.",
    "num_overflowed_clients": "Clients of a daemon disconnected because they read no outputs.",
    "num_inputs_refused": "Requests that this server rejected before sending them to the engine.",
    "num_bad_engine_frames": "Invalid messages from the engine, which this server dropped.",
    "num_rejected_peers": "Connections to the engine's sockets by a process without their key.",
    "num_dropped_rows": "Outputs of an engine that had been replaced, which were dropped.",
    "num_requests_resumed": "Requests that continued on another engine after a death.",
    "num_requests_quarantined": "Requests ended because engines died each time they computed them.",
}
# The engine's memory: key of its status -> (value of the label `kind`, what that is).
MEMORY = {
    "resident_bytes": "resident",
    "weights_bytes": "weights",
    "kv_cache_bytes": "kv_cache",
}
MEMORY_ABOUT = (
    "Bytes of the engine's processes: resident memory; weights; the whole KV cache, of which a CPU "
    "holds in memory what has been written. On several ranks, their sum."
)
