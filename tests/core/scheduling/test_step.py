"""Accounting of a step: its rows, and which tokens it computes for the first time or again."""

from quire.tests.core.scheduling.loop import Loop, distinct


def test_a_sent_message_does_not_change_while_the_request_grows():
    loop = Loop()
    loop.add("r", [1, 2, 3])
    loop.run()
    assert loop.executor.steps[0].new_requests[0].token_ids == [1, 2, 3]


def test_hits_beyond_the_prompt_are_not_reported_as_prompt_tokens():
    loop = Loop()
    loop.add("whole", distinct(0, 20), max_tokens=40)
    loop.run()
    loop.tokens["rest"] = loop.tokens["whole"][:30]
    loop.add("rest", distinct(0, 20), max_tokens=40, resume_tokens=loop.tokens["whole"][:30])
    assert loop.step() == {"rest": 50 - 48} and loop.cached["rest"] == 20


def test_recomputed_tokens_are_counted_once_per_time_they_are_computed():
    loop = Loop(
        num_gpu_blocks_override=7,
        max_model_len=96,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        enable_prefix_caching=False,
    )
    loop.add("old", distinct(0, 44), max_tokens=40)
    loop.add("new", distinct(1, 47), max_tokens=20)
    loop.run()
    computed = sum(step.total_num_scheduled_tokens for step in loop.executor.steps)
    stats = loop.scheduler.stats()
    needed = 44 + 39 + 47 + 19  # the last token of each is never computed
    assert stats.num_preemptions > 0
    assert stats.num_recomputed_tokens == computed - needed
