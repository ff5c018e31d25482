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
    "num_requests_running": (_named("num_running"), "Requests that the engine computes."),
    "num_requests_waiting": (
        _waiting,
        "Waiting requests, in the server's queue and in the engine's.",
    ),
    "kv_cache_usage_perc": (_usage, "Share of the KV cache in use, 0 to 1."),
}
PROMPTS: Table = {
    "prompt_tokens": (_prompt_tokens, "Prompt tokens, cached ones included."),
    "prompt_tokens_cached": (
        _named("prefix_cache_hits"),
        "Prompt tokens found in the prefix cache.",
    ),
}
COUNTERS: Table = {
    "generation_tokens": (_named("num_generation_tokens"), "Tokens generated."),
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
    "num_preemptions": (_named("num_preemptions"), "Preemptions of running requests."),
    "spec_decode_num_drafts": (_named("num_drafts"), "Rows of steps that verified draft tokens."),
    "spec_decode_num_draft_tokens": (
        _named("num_draft_tokens"),
        "Draft tokens that were verified.",
    ),
    "spec_decode_num_accepted_tokens": (_named("num_accepted_tokens"), "Draft tokens accepted."),
}
# Engine counters that vLLM does not have, under their own names.
OWN_COUNTERS = (
    "num_recomputed_tokens",
    "num_blocks_swapped_out",
    "num_blocks_swapped_in",
    "num_blocks_copied",
    "num_blocks_offloaded",
    "num_blocks_reloaded",
    "num_blocks_corrupt",
    "num_requests_refused",
    "num_requests_orphaned",
    "num_grammar_refusals",
    "num_failed_utilities",
    "num_bad_frames",
    "num_lost_outputs",
    "num_overflowed_clients",
    "num_inputs_refused",
    "num_bad_engine_frames",
    "num_rejected_peers",
    "num_dropped_rows",
    "num_requests_resumed",
    "num_requests_quarantined",
)
