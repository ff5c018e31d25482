"""Engine and driver features: the evidence of each in a run, and the pause in mid-run."""

from __future__ import annotations

from typing import Any

from quire import LLMEngine
from quire.tests.feature_run import BEAM_PARAMS, BEAM_PROMPTS, JOBS, Run


def _requests(seen: Run) -> list[dict[str, Any]]:
    return [request for state in seen.states for request in state["requests"]]


def shows_chunks(seen: Run) -> None:
    assert any(0 < r["num_computed_tokens"] < r["num_prompt_tokens"] for r in _requests(seen)), (
        "no prompt was ever half computed"
    )


def shows_hits(seen: Run) -> None:
    assert seen.counters["prefix_cache_hits"] > 0
    assert any(answer.num_cached_tokens for answer in seen.answers.values())


def shows_recompute(seen: Run) -> None:
    assert seen.counters["num_preemptions"] > 0 and seen.counters["num_recomputed_tokens"] > 0, (
        seen.counters
    )


def shows_swap(seen: Run) -> None:
    assert 0 < seen.counters["num_blocks_swapped_in"] <= seen.counters["num_blocks_swapped_out"], (
        seen.counters
    )


def shows_offload(seen: Run) -> None:
    assert seen.counters["num_blocks_offloaded"] > 0 == seen.counters["num_blocks_corrupt"]


def shows_states(seen: Run) -> None:
    """What is found in the cache begins with a state that was kept."""
    hits, restored = seen.counters["prefix_cache_hits"], seen.counters["num_states_restored"]
    assert not hits or restored > 0


def shows_overlap(seen: Run) -> None:
    """Steps overlap. Otherwise a request's newest token is never computed between two steps."""
    assert any(r["num_computed_tokens"] >= r["num_tokens"] for r in _requests(seen)), (
        "no step was ever in flight"
    )


def shows_multi_step(seen: Run) -> None:
    assert seen.most_at_once == 4, f"at most {seen.most_at_once} tokens came at once"


def shows_drafts(seen: Run) -> None:
    assert seen.counters["num_draft_tokens"] >= seen.counters["num_drafts"] > 0


def shows_priority(seen: Run) -> None:
    jobs = {job.request_id: job for job in JOBS}
    overtaken = [
        (a, b)
        for a in seen.first_seen
        for b in seen.first_seen
        if jobs[a].arrives_at_step < jobs[b].arrives_at_step
        and seen.first_seen[b] < seen.first_seen[a]
    ]
    assert overtaken and all(jobs[b].priority < jobs[a].priority for a, b in overtaken), overtaken


def pause_and_resume(engine: LLMEngine) -> str:
    """Pause the engine, check that nothing moves and that a new request is held, then resume."""
    engine.call_utility("pause", "keep")
    # Returns when everything computed before the pause is delivered.
    reason = engine.call_utility("stall_reason")
    engine.add_request("late", JOBS[0].prompt_token_ids[:5], JOBS[0].params)
    state, metrics = engine.call_utility("scheduler_state"), engine.get_metrics()
    assert state["is_paused"] and len(state["held"]) == 1, state
    assert engine.call_utility("stall_reason") == reason and engine.get_metrics() == metrics
    [last] = engine.abort_request("late")
    assert last.outputs[0].token_ids == []
    engine.call_utility("resume")
    return reason if state["running"] else "everybody had just finished"


def shows_pause(seen: Run) -> None:
    assert seen.disturbances == ["the engine is paused: resume() first"]


def shows_trace(seen: Run) -> None:
    assert seen.trace is not None
    rows = [row for step in seen.trace.steps for row in step.rows]
    assert len({row.request_id for row in rows}) >= len(JOBS)
    for step in seen.trace.steps:
        assert step.ranks
        for rank in step.ranks:
            assert rank.kernels and all(kernel.seconds >= 0 for kernel in rank.kernels)
            assert sum(kernel.seconds for kernel in rank.kernels) <= rank.seconds


def shows_beams(seen: Run) -> None:
    for output in seen.beams:
        assert len(output.sequences) == BEAM_PARAMS.beam_width and output.error is None
        assert (
            len({tuple(sequence.tokens) for sequence in output.sequences}) == BEAM_PARAMS.beam_width
        )
    assert len(seen.beams) == len(BEAM_PROMPTS)
