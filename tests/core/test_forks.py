"""n > 1: one message and one prefill. Children share the prompt's blocks, copy the last one before
they write, and then run independently.
"""

import sys

import pytest
from quire.core.request import split
from quire.ipc.messages import EngineCoreRequest, FinishReason, child_request_id
from quire.ipc.params import SamplingParams, child_seed
from quire.tests.core.scheduling.loop import Loop, distinct
from quire.tests.fakes import expected_output

BLOCK, EOS = 16, 10**6


def family(loop: Loop, num_prompt: int, n: int, **fields) -> dict[str, tuple]:
    """Add one request "r" with n > 1. Return the expected answer of each child."""
    loop.add("r", distinct(0, num_prompt), n=n, temperature=1.0, seed=7, **fields)
    message = EngineCoreRequest(
        "r",
        distinct(0, num_prompt),
        SamplingParams(n=n, temperature=1.0, seed=7, max_tokens=fields.get("max_tokens", 8)),
    )
    return {
        m.request_id: expected_output(m.prompt_token_ids, m.sampling_params, [], loop.config)
        for m in split(message)
    }


def assert_answers(loop: Loop, expected: dict[str, tuple]) -> None:
    assert {
        request_id: (loop.tokens[request_id], *loop.ends[request_id]) for request_id in expected
    } == expected


def test_children_have_their_own_ids_and_seeds():
    children = split(
        EngineCoreRequest(
            "r",
            [1, 2],
            SamplingParams(n=3, seed=2**63 - 2, max_tokens=4),
            priority=5,
            cache_salt="s",
        )
    )
    assert (
        [child.request_id for child in children]
        == ["0_r", "1_r", "2_r"]
        == [child_request_id("r", i) for i in range(3)]
    )
    assert (
        [child.sampling_params.seed for child in children]
        == [2**63 - 2, 2**63 - 1, 0]
        == [child_seed(2**63 - 2, i) for i in range(3)]
    )
    assert all(
        (child.sampling_params.n, child.priority, child.cache_salt) == (1, 5, "s")
        for child in children
    )
    message = EngineCoreRequest("r", [1, 2], SamplingParams(seed=1, max_tokens=4))
    assert split(message) == [message] and split(message)[0] is message


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 32, 40])
def test_one_prefill_and_the_last_block_is_copied(num_prompt, caching):
    loop = Loop(enable_prefix_caching=caching)
    expected = family(loop, num_prompt, 5)
    assert loop.step() == {"0_r": num_prompt}
    assert loop.step() == {"0_r": 1, **{f"{i}_r": 1 for i in range(1, 5)}}
    tables = [loop.scheduler.kv_cache_manager.get_block_ids(f"{i}_r") for i in range(5)]
    num_shared, is_partial = (num_prompt - 1) // BLOCK, (num_prompt - 1) % BLOCK > 0
    assert all(table[:num_shared] == tables[0][:num_shared] for table in tables)
    assert len({table[num_shared] for table in tables}) == 5
    copies = loop.executor.steps[-1].blocks_to_copy
    assert sorted(copies) == (
        [(tables[0][num_shared], table[num_shared]) for table in tables[1:]] if is_partial else []
    )
    loop.run()
    assert_answers(loop, expected)
    # the last token once more for each, since its logits are sampled again
    assert loop.scheduler.stats().num_prompt_tokens == num_prompt + 4
    # blocks shared by siblings are not counted as cache hits
    assert loop.scheduler.stats().prefix_cache_hits == 0
    assert loop.scheduler.stats().num_blocks_copied == (4 if is_partial else 0)
    assert loop.scheduler.kv_cache_manager.num_free_blocks == 256


def test_children_wait_for_a_chunked_prompt_and_other_requests_overtake():
    loop = Loop(max_num_batched_tokens=32, enable_prefix_caching=False)
    expected = family(loop, 80, 3)
    loop.add("late", distinct(1, 5))
    assert loop.step() == {"0_r": 32}
    assert loop.step() == {"0_r": 32}
    # the children wait, so the prompt is computed once
    assert loop.step() == {"0_r": 16, "late": 5}
    assert loop.step() == {"0_r": 1, "1_r": 1, "2_r": 1, "late": 1}
    loop.run()
    assert_answers(loop, expected)


def test_a_child_that_is_aborted_leaves_the_others():
    loop = Loop()
    expected = family(loop, 40, 4)
    loop.step()
    loop.step()
    assert [r.request_id for r in loop.scheduler.abort_requests(["2_r"], 0)] == ["2_r"]
    loop.scheduler.check_integrity()
    loop.run()
    del expected["2_r"]
    assert_answers(loop, expected)


def test_if_the_leader_is_aborted_the_next_child_takes_over_the_prompt():
    loop = Loop(max_num_batched_tokens=32, enable_prefix_caching=False)
    expected = family(loop, 80, 3)
    loop.step()
    loop.scheduler.abort_requests(["0_r"], 0)
    assert loop.step() == {"1_r": 32}
    loop.run()
    del expected["0_r"]
    assert_answers(loop, expected)


def test_the_parents_id_aborts_all_and_is_free_again():
    loop = Loop()
    family(loop, 40, 3)
    loop.step()
    assert loop.scheduler.is_in_use("r") and loop.scheduler.is_in_use("1_r")
    assert loop.scheduler.abort_requests(["r"], client_index=1) == []  # another client's
    assert [r.request_id for r in loop.scheduler.abort_requests(["r"], 0)] == ["0_r", "1_r", "2_r"]
    assert not loop.scheduler.is_in_use("r") and not loop.scheduler.has_unfinished_requests()
    loop.scheduler.check_integrity()


def test_more_children_than_slots_and_blocks():
    loop = Loop(max_num_seqs=3, num_gpu_blocks_override=17, max_num_batched_tokens=64)
    expected = family(loop, 60, 9, max_tokens=30)
    loop.run()
    assert_answers(loop, expected)
    assert set(loop.ends.values()) == {(FinishReason.LENGTH, None)}


def test_a_child_that_fails_leaves_the_others():
    loop = Loop()
    expected = family(loop, 20, 3)
    loop.executor.errors["1_r", 2] = "a scripted failure"
    loop.run()
    assert loop.ends.pop("1_r") == (FinishReason.ERROR, None)
    del expected["1_r"]
    assert_answers(loop, expected)


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_run_after_the_first_ends_on_its_first_token(caching):
    loop = Loop(max_model_len=1024, max_num_batched_tokens=1024, enable_prefix_caching=caching)
    expected = family(loop, 800, 8, eos_token_ids=[EOS])
    loop.executor.tokens["0_r", 0] = EOS
    loop.add("late", distinct(3, 5))
    assert loop.step() == {"0_r": 800, "late": 5}
    assert loop.ends["0_r"] == (FinishReason.STOP, None)
    assert loop.step() == {"late": 1, **{f"{i}_r": 1 for i in range(1, 8)}}
    loop.run()
    assert loop.tokens["0_r"] == [EOS]
    del expected["0_r"]
    assert_answers(loop, expected)
    # the prompt once, and its last token again for each of the others
    assert loop.scheduler.stats().num_prompt_tokens == 5 + 800 + 7
    assert loop.scheduler.kv_cache_manager.num_free_blocks == 256


@pytest.mark.parametrize("num_prompt", [1, 16, 17, 33, 40])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
def test_finished_siblings_leave_the_prompt_to_the_rest(num_prompt, max_num_seqs):
    loop = Loop(max_num_seqs=max_num_seqs, enable_prefix_caching=False)
    expected = family(loop, num_prompt, 9, max_tokens=1)
    loop.run()
    assert_answers(loop, expected)
    assert loop.scheduler.stats().num_prompt_tokens == num_prompt + 8
    # no block keeps a hash that only these siblings used
    assert loop.scheduler.kv_cache_manager.block_pool.num_cached_blocks == 0


def test_a_first_sibling_aborted_after_its_prompt_leaves_it_to_the_rest():
    loop = Loop(max_num_seqs=1, enable_prefix_caching=False)
    expected = family(loop, 40, 3)
    loop.step()
    loop.scheduler.abort_requests(["0_r"], 0)
    assert loop.step() == {"1_r": 1}
    loop.run()
    del expected["0_r"]
    assert_answers(loop, expected)


def test_a_failed_sibling_leaks_nothing():
    loop = Loop(max_num_seqs=1, enable_prefix_caching=False)
    expected = family(loop, 40, 3)
    loop.executor.errors["0_r", 0] = "a scripted failure"
    assert loop.step() == {"0_r": 40}
    assert loop.step() == {"1_r": 40}
    loop.run()
    del expected["0_r"]
    assert_answers(loop, expected)


def test_a_prompt_whose_blocks_were_evicted_is_computed_again():
    """Nothing is reserved for siblings that wait: blocks of other requests have precedence."""
    loop = Loop(max_num_seqs=1, enable_prefix_caching=False)
    expected = family(loop, 40, 2, eos_token_ids=[EOS])
    loop.executor.tokens["0_r", 0] = EOS
    assert loop.step() == {"0_r": 40}
    pool = loop.scheduler.kv_cache_manager.block_pool
    pool.free_blocks(reversed(pool.get_new_blocks(pool.num_free_blocks)))
    assert loop.step() == {"1_r": 40}
    loop.run()
    del expected["0_r"]
    assert_answers(loop, expected)


def instructions(n: int, **arguments) -> int:
    """Count the bytecodes that the scheduler runs for one request with n completions."""
    loop = Loop(num_gpu_blocks_override=4 * n + 50, enable_prefix_caching=False, **arguments)
    family(loop, 40, n, max_tokens=2)
    scheduler, count = loop.scheduler, 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "opcode"
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace

    def traced(function, *arguments):
        sys.settrace(trace)
        try:
            return function(*arguments)
        finally:
            sys.settrace(None)

    while scheduler.has_unfinished_requests():
        step = traced(scheduler.schedule)
        result = loop.executor.execute_model(step.output)
        traced(scheduler.update_from_output, step, result, loop.rows)
    return count


@pytest.mark.parametrize("max_num_seqs", [256, 2])
def test_the_work_for_n_completions_grows_linearly(max_num_seqs):
    arguments = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 256}
    assert instructions(160, **arguments) < 4.4 * instructions(40, **arguments)


@pytest.mark.parametrize("num_prompt", [33, 40, 48, 100])
@pytest.mark.parametrize("caching", [True, False])
def test_children_share_what_they_see_of_every_group(num_prompt, caching):
    """A child that starts late takes the prompt, though the window of the others has left it."""
    loop = Loop(windows=(0, 17, 17), enable_prefix_caching=caching, max_num_seqs=2)
    expected = family(loop, num_prompt, 5, max_tokens=40)
    loop.run()
    assert_answers(loop, expected)
    assert loop.scheduler.stats().num_prompt_tokens == num_prompt + 4
    is_partial = (num_prompt - 1) % BLOCK > 0
    assert loop.scheduler.stats().num_blocks_copied in ((9, 12) if is_partial else (0,))


def test_a_child_computes_a_prompt_that_a_window_has_left():
    """Where memory is scarce, nothing is kept for a child that has not started."""
    loop = Loop(
        windows=(0, 17),
        enable_prefix_caching=False,
        max_num_seqs=1,
        max_model_len=128,
        max_num_batched_tokens=16,
        num_scheduler_steps=1,
        num_gpu_blocks_override=1 + 8 + 3,
    )
    expected = family(loop, 40, 2, max_tokens=88)
    loop.run()
    assert_answers(loop, expected)
    assert loop.scheduler.stats().num_prompt_tokens == 80


def test_a_block_that_a_child_takes_over_is_not_found_with_what_it_held():
    """The first child has filled the block and ends; the second one writes its own tokens there."""
    loop = Loop(max_num_seqs=1)
    expected = family(loop, 3, 2, max_tokens=30)
    loop.run()
    assert_answers(loop, expected)
    for number, child in enumerate(expected):
        prompt = distinct(0, 3) + loop.tokens[child]
        loop.add(f"again-{number}", prompt)  # the executor checks what cached blocks hold
        loop.run()
        assert loop.cached[f"again-{number}"] == (0, 32)[number]
