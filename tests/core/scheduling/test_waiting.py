"""Admission: slots, the prefix cache, prompts that do not fit."""

from quire.tests.core.scheduling.loop import Loop, distinct


def test_a_prompt_sent_twice_reports_its_hit():
    loop = Loop()
    for name in ("first", "second"):
        loop.add(name, distinct(0, 17))
        loop.run()
    assert loop.cached == {"first": 0, "second": 16}
    assert loop.tokens["first"] == loop.tokens["second"]
    stats = loop.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.num_prompt_tokens) == (
        34,
        16,
        18,
    )


def test_a_fully_cached_prompt_recomputes_its_last_block():
    loop = Loop()
    loop.add("first", distinct(0, 32), max_tokens=1)
    loop.run()
    loop.add("second", distinct(0, 32), max_tokens=1)
    assert loop.step() == {"second": 16}
    assert loop.cached["second"] == 16


def test_a_second_prompt_shares_blocks_while_the_first_runs():
    loop = Loop(num_gpu_blocks_override=17)
    common = distinct(0, 48)
    loop.add("0", common + [3] * 7)
    loop.step()
    loop.add("1", common + [4] * 7)
    assert loop.step() == {"0": 1, "1": 7}
    new = loop.executor.steps[-1]
    assert new.num_computed_tokens == [55, 48] and new.new_block_ids == [[], [1, 2, 3, 5]]


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt_and_caches_its_blocks():
    loop, prompt = Loop(), distinct(0, 40)
    loop.add("filler", prompt, max_tokens=1)
    loop.run()
    loop.add("scored", prompt, max_tokens=1, prompt_logprobs=0)
    assert loop.step() == {"scored": 40}
    # only those of the filler
    assert loop.cached["scored"] == 0 and loop.scheduler.counters.prefix_cache_queries == 40
    assert loop.scheduler.reset_prefix_cache()
    loop.add("scored too", prompt, max_tokens=1, prompt_logprobs=0)
    loop.run()
    loop.add("reader", prompt, max_tokens=1)
    assert loop.step() == {"reader": 8}


def test_the_runner_receives_the_end_of_sequence_tokens():
    loop = Loop()
    loop.add("r", distinct(0, 20), eos_token_ids=[13, 14])
    loop.step()
    assert loop.executor.steps[0].new_requests[0].eos_token_ids == [13, 14]


def test_caching_off_computes_everything():
    loop = Loop(enable_prefix_caching=False)
    for name in ("first", "second"):
        loop.add(name, distinct(0, 40))
        loop.run()
    stats = loop.scheduler.stats()
    assert loop.cached == {"first": 0, "second": 0}
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.num_prompt_tokens) == (
        0,
        0,
        80,
    )


def test_without_chunked_prefill_a_prompt_that_does_not_fit_waits():
    loop = Loop(
        enable_chunked_prefill=False, max_num_batched_tokens=256, long_prefill_token_threshold=10
    )
    for i, num_tokens in enumerate((100, 100, 100, 5)):
        loop.add(str(i), distinct(i, num_tokens))
    # no request overtakes the third, though the fourth would fit
    assert loop.step() == {"0": 100, "1": 100}
    assert loop.step() == {"0": 1, "1": 1, "2": 100, "3": 5}


def test_no_more_than_max_num_seqs_run_and_slots_are_reused():
    loop = Loop(max_num_seqs=2)
    for i in range(5):
        loop.add(str(i), distinct(i, 4), max_tokens=2 + i)
    loop.step()
    assert (loop.state("running"), loop.state("waiting")) == (["0", "1"], ["2", "3", "4"])
    loop.run()
    assert max(len(step.slots) for step in loop.executor.steps) == 2
    assert {slot for step in loop.executor.steps for slot in step.slots} == {0, 1}
    assert {i: len(loop.tokens[str(i)]) for i in range(5)} == {i: 2 + i for i in range(5)}


def test_the_lowest_free_slot_is_taken():
    loop = Loop()
    for i in range(5):
        loop.add(str(i), distinct(i, 4), max_tokens=9)
    loop.step()
    loop.scheduler.abort_requests(["3", "1", "2"], 0)
    loop.add("new", distinct(9, 4))
    loop.step()
    (new,) = loop.executor.steps[-1].new_requests
    assert new.slot == 1 and loop.executor.steps[-1].freed_slots == [3, 1, 2]
