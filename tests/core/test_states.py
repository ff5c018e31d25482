"""Models that keep states, through the engine core: no setting changes an output, and a prompt that
begins like an earlier one starts from a checkpoint.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.core.engine_core import EngineCore
from quire.ipc.messages import EngineCoreRequest, FinishReason
from quire.ipc.models.kv_layout import make_layout
from quire.ipc.params import SamplingParams
from quire.tests.core.engine_loop import Answer, assert_nothing_left, make_core, run
from quire.tests.core.scheduling.loop import Loop, distinct
from quire.tests.core.test_forks import assert_answers, family
from quire.tests.core.test_random_workloads import assert_as_expected, drive, random_jobs
from quire.tests.fakes import FakeExecutor, expected_output, make_config

SETTINGS = st.fixed_dictionaries(
    {
        "num_state_checkpoints": st.sampled_from([0, 1, 3, 12, 200]),
        "state_checkpoint_interval": st.sampled_from([16, 32, 48, 128, 512]),
        "max_num_batched_tokens": st.sampled_from([16, 64, 2048]),
        "windows": st.sampled_from([(0,), (0,), (0, 40), (40,)]),
        "spare_blocks": st.sampled_from([0, 7, 23, 983]),
        "max_num_seqs": st.sampled_from([1, 3, 8]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "enable_prefix_caching": st.sampled_from([True, True, False]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 5, 37]),
        "preemption_mode": st.sampled_from(["auto", "recompute", "swap"]),
        "swap_space": st.sampled_from([4.0, 0.02]),
        "num_scheduler_steps": st.sampled_from([0, 0, 1, 2, 7]),
        "burst_weights_bytes": st.sampled_from([0, 10**5, 2 * 10**7]),
        "async_scheduling": st.booleans(),
        "pipeline_parallel_size": st.sampled_from([1, 1, 1, 3]),
        "block_size": st.sampled_from([8, 16]),
    }
)
OF_THE_EXECUTOR = "windows", "burst_weights_bytes", "num_state_checkpoints"
DRAFTS = {"method": "ngram", "num_speculative_tokens": 5}


def make_tight_core(spare_blocks: int, **arguments) -> EngineCore:
    """Make an engine core with room for one sequence and `spare_blocks` blocks."""
    config = make_config(**{k: v for k, v in arguments.items() if k not in OF_THE_EXECUTOR})
    needed = make_layout(config, arguments["windows"]).most_blocks(256)
    return make_core(**arguments, num_gpu_blocks_override=1 + needed + spare_blocks)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    num_jobs=st.integers(1, 30),
    arguments=SETTINGS,
    drafts=st.sampled_from([None, None, DRAFTS]),
)
def test_no_setting_changes_an_output_or_leaks(seed, num_jobs, arguments, drafts):
    if drafts is not None:
        arguments = {**arguments, "speculative_config": drafts, "pipeline_parallel_size": 1}
    core, jobs = make_tight_core(**arguments), random_jobs(seed, num_jobs)
    assert_as_expected(core, jobs, drive(core, jobs))
    assert_nothing_left(core)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), arguments=SETTINGS, nan=st.integers(0, 20))
def test_failures_leave_no_state_to_others(seed, arguments, nan):
    """A request fails at a random token; the others, which may have begun alike, are right."""
    core, jobs = make_tight_core(**arguments), random_jobs(seed, 20, families=False)
    failing = {job.request.request_id for job in jobs[::4]}
    core.executor.nan_rows = {(request_id, nan) for request_id in failing}
    answers = drive(core, jobs)
    for job in jobs:
        answer, request = answers[job.request.request_id], job.request
        tokens, reason, _ = expected_output(
            request.prompt_token_ids, request.sampling_params, request.eos_token_ids, core.config
        )
        assert answer.tokens == tokens[: len(answer.tokens)]
        if request.request_id not in failing and answer.reason is not FinishReason.ABORT:
            assert (answer.tokens, answer.reason) == (tokens, reason)
    assert_nothing_left(core)


def state_loop(num_state_checkpoints: int = 40, **arguments) -> Loop:
    long = {"max_model_len": 4096, "num_gpu_blocks_override": 1025, "max_num_seqs": 4}
    return Loop(num_state_checkpoints=num_state_checkpoints, **{**long, **arguments})


def num_computed(loop: Loop) -> int:
    """Return how many tokens the executor has computed so far."""
    return sum(
        step.total_num_scheduled_tokens + sum(step.num_lookahead_tokens)
        for step in loop.executor.steps
    )


def answer(loop: Loop, name: str, prompt: list[int], max_tokens: int = 8, **fields) -> list[int]:
    """Run a request alone, and check its tokens."""
    loop.add(name, prompt, max_tokens=max_tokens, **fields)
    loop.run()
    request = EngineCoreRequest(
        name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens)
    )
    tokens, reason, stop = expected_output(prompt, request.sampling_params, [], loop.config)
    assert (loop.tokens[name], *loop.ends[name]) == (tokens, reason, stop)
    return tokens


@pytest.mark.sampled
@pytest.mark.parametrize("interval", [128, 512])
@pytest.mark.parametrize(
    ("num_prompt", "num_output"), [(700, 5), (700, 90), (1000, 200), (64, 300)]
)
@pytest.mark.parametrize("num_scheduler_steps", [1, 7])
def test_a_second_turn_computes_its_own_tokens_and_an_interval(
    interval, num_prompt, num_output, num_scheduler_steps
):
    loop = state_loop(state_checkpoint_interval=interval, num_scheduler_steps=num_scheduler_steps)
    prompt = distinct(0, num_prompt)
    for turn in range(3):
        before = num_computed(loop)
        num_new = 30 if turn else num_prompt
        prompt = [*prompt, *answer(loop, f"turn-{turn}", prompt, num_output), *distinct(turn, 30)]
        # each answer's last token is not computed
        assert num_computed(loop) - before <= num_new + 1 + interval + num_output - 1
    stats = loop.scheduler.stats()
    assert stats.num_states_restored == 2 and stats.num_states_evicted == 0


def test_a_next_turn_without_the_reasoning_starts_at_the_end_of_the_prompt():
    loop = state_loop()
    prompt = distinct(0, 300)
    answer(loop, "first", prompt, 100)
    answer(loop, "second", [*prompt, *distinct(5, 50)])
    assert loop.cached == {"first": 0, "second": 288}


def test_the_third_prompt_that_begins_alike_gains():
    """The first one has no checkpoint where the second one leaves it."""
    loop = state_loop()
    common = distinct(0, 200)
    for i in range(3):
        answer(loop, str(i), [*common, *distinct(i + 1, 300)])
    assert loop.cached == {"0": 0, "1": 0, "2": 192}


def test_a_hit_copies_the_state_before_its_place_is_written_again():
    """With one place, the checkpoint that a request starts from makes room for its own."""
    loop = state_loop(1)
    prompt = distinct(0, 100)
    answer(loop, "first", prompt, 2)
    answer(loop, "second", [*prompt, *distinct(3, 200)], 2)
    [place] = loop.scheduler.kv_cache_manager.checkpoints.places
    both = [step for step in loop.executor.steps if step.state_copies and step.state_saves]
    assert [(step.state_copies, step.state_saves) for step in both] == [
        ([(place, 0)], [(0, 287, place)])
    ]
    assert loop.cached["second"] == 96
    assert loop.scheduler.stats().num_states_evicted == 1


def test_short_prompts_take_no_place():
    loop = state_loop()
    answer(loop, "short", distinct(0, 60), 4)
    assert not any(step.state_saves for step in loop.executor.steps)
    assert loop.scheduler.state()["num_state_checkpoints"] == 0


def test_a_block_that_is_lost_makes_its_checkpoint_useless():
    loop = state_loop()
    prompt = distinct(0, 300)
    answer(loop, "first", prompt)
    manager = loop.scheduler.kv_cache_manager
    request_hashes = [*manager.block_pool._cached]
    manager.block_pool.uncache(manager.block_pool.get_cached_block(request_hashes[3]))
    answer(loop, "second", prompt)
    assert loop.cached["second"] == 0


def test_a_checkpoint_that_is_lost_leaves_an_earlier_one():
    loop = state_loop(state_checkpoint_interval=128)
    prompt = distinct(0, 300)
    answer(loop, "first", prompt)
    checkpoints = loop.scheduler.kv_cache_manager.checkpoints
    deepest = max(checkpoints._named.values(), key=lambda one: one.num_tokens)
    checkpoints._forget(deepest)
    answer(loop, "second", prompt)
    assert loop.cached["second"] == 128


def swapping(num_state_checkpoints: int, **arguments) -> Loop:
    """Run four requests with room for two."""
    loop = state_loop(
        num_state_checkpoints,
        max_model_len=256,
        num_gpu_blocks_override=33,
        preemption_mode="swap",
        enable_prefix_caching=False,
        **arguments,
    )
    for i in range(4):
        loop.add(str(i), distinct(i, 100), max_tokens=120)
    loop.run()
    for i in range(4):
        params = SamplingParams(temperature=0.0, max_tokens=120)
        assert loop.tokens[str(i)] == expected_output(distinct(i, 100), params, [], loop.config)[0]
    return loop


def test_a_swapped_request_has_its_state_in_a_place():
    loop = swapping(4)
    copies = [pair for step in loop.executor.steps for pair in step.state_copies]
    parked = sorted(destination for _, destination in copies if destination >= 4)
    assert parked and parked == sorted(source for source, _ in copies if source >= 4)
    assert loop.scheduler.stats().num_recomputed_tokens == 0


def test_without_a_place_a_request_is_computed_again():
    loop = swapping(0)
    stats = loop.scheduler.stats()
    assert stats.num_preemptions and not stats.num_blocks_swapped_out
    assert stats.num_recomputed_tokens > 0


def test_a_swapped_request_that_is_aborted_gives_its_place_back():
    loop = state_loop(1, max_model_len=256, num_gpu_blocks_override=17, preemption_mode="swap")
    for i in range(2):
        loop.add(str(i), distinct(i, 100), max_tokens=150)
    while not loop.state("swapped"):
        loop.step()
    checkpoints = loop.scheduler.kv_cache_manager.checkpoints
    assert checkpoints._parked == {"1": 4}
    loop.scheduler.abort_requests(["1"], 0)
    loop.scheduler.check_integrity()
    assert checkpoints._parked == {}
    loop.run()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("num_prompt", "start"), [(40, 0), (65, 64), (300, 288)])
def test_completions_start_from_the_last_checkpoint_of_their_prompt(num_prompt, start, caching):
    loop = state_loop(enable_prefix_caching=caching, max_num_seqs=8)
    expected = family(loop, num_prompt, 5)
    if start:
        assert loop.step() == {"0_r": num_prompt}
        rest = {f"{i}_r": num_prompt - start for i in range(1, 5)}
        assert loop.step() == {"0_r": 1, **rest}
    loop.run()
    assert_answers(loop, expected)
    assert not any(step.blocks_to_copy for step in loop.executor.steps)
    checkpoints = loop.scheduler.kv_cache_manager.checkpoints
    assert checkpoints.shared_families() == set()
    assert caching or checkpoints.num_named == 0


def test_completions_that_start_late_find_their_checkpoint():
    """The first ones have ended, and others have taken all places that are not kept."""
    loop = state_loop(2, max_num_seqs=2, enable_prefix_caching=False)
    expected = family(loop, 200, 6, max_tokens=3)
    for i in range(4):
        loop.add(f"other-{i}", distinct(i + 1, 300), max_tokens=30, n=2, temperature=1.0)
    loop.run()
    assert_answers(loop, expected)
    # the prompt once; each of the others starts after 192 tokens
    prompt = sum(
        num
        for step in loop.executor.steps
        for slot, num, computed in zip(
            step.slots, step.num_scheduled_tokens, step.num_computed_tokens, strict=True
        )
        if computed in (0, 192) and num in (8, 200)
    )
    assert prompt == 200 + 5 * 8


def test_a_request_that_fails_leaves_no_checkpoint():
    loop = state_loop()
    prompt = distinct(0, 300)
    loop.executor.errors["bad", 3] = "a scripted failure"
    loop.add("bad", prompt)
    loop.run()
    assert loop.state("num_state_checkpoints") == 0
    answer(loop, "good", prompt)
    assert loop.cached["good"] == 0


def test_a_reset_and_a_sleep_forget_them():
    core = make_core(num_state_checkpoints=20)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=90)
    request = EngineCoreRequest("r", distinct(0, 100), params)
    expected = expected_output(distinct(0, 100), params, [], core.config)[0]
    for forget in ("reset_prefix_cache", "sleep", "reset_prefix_cache"):
        core.add_request(request)
        answer = run(core)[0]["r"]
        assert answer.tokens == expected and answer.num_cached_tokens == 0
        assert core.observer.scheduler_state()["num_state_checkpoints"] == 2
        core.call_utility(forget, [])
        assert core.observer.scheduler_state()["num_state_checkpoints"] == 0
        core.call_utility("wake_up", [])


def test_drafts_are_computed_again_and_no_checkpoint_is_among_them():
    loop = state_loop(speculative_config=DRAFTS)
    answer(loop, "first", distinct(0, 100), 200)
    rows = [
        (step.num_computed_tokens[0], step.num_scheduled_tokens[0], step.num_lookahead_tokens[0])
        for step in loop.executor.steps
    ]
    assert any(num > 1 and ahead for first, num, ahead in rows if first >= 100)
    ends = [first + num for first, num, _ in rows]
    assert [first for first, _, _ in rows[1:]] == ends[:-1]  # what was accepted is computed again
    saved = [(step, save) for step in loop.executor.steps for save in step.state_saves]
    assert len(saved) > 5
    for step, (_, position, _) in saved:
        assert position < step.num_computed_tokens[0] + step.num_scheduled_tokens[0]


# --------------------------------------------------------------------- states outside the cache

MIB = 1 / 1024  # a block of the fake executor, in GiB


def ask(core: EngineCore, prompt: list[int], salt: str | None = None) -> Answer:
    """Run a request alone, and check its tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=2, seed=0)
    core.add_request(EngineCoreRequest("r", prompt, params, cache_salt=salt))
    found = run(core)[0]["r"]
    assert found.tokens == expected_output(prompt, params, [], core.config)[0]
    return found


def make_small_core(**arguments) -> EngineCore:
    """Make an engine core whose cache has one conversation and whose states three checkpoints."""
    defaults = {
        "num_gpu_blocks_override": 18,
        "num_state_checkpoints": 3,
        "kv_offloading_size": 200 * MIB,
    }
    return make_core(**{**defaults, **arguments})


def test_blocks_and_state_of_a_conversation_that_was_evicted_come_back():
    core = make_small_core()
    for number in range(4):
        assert ask(core, distinct(number, 200)).num_cached_tokens == 0
    metrics = core.observer.get_metrics()
    assert metrics["num_states_offloaded"] == 1 and metrics["num_states_reloaded"] == 0
    assert ask(core, distinct(0, 200)).num_cached_tokens == 12 * 16
    after = core.observer.get_metrics()
    assert (after["num_blocks_reloaded"], after["num_states_reloaded"]) == (12, 1)
    assert after["external_prefix_cache_hits"] == 12 * 16
    assert_nothing_left(core)


def test_a_state_in_its_place_needs_the_blocks_alone_and_the_other_way_round():
    core = make_small_core(num_state_checkpoints=50)
    for number in range(4):
        ask(core, distinct(number, 200))
    assert ask(core, distinct(0, 200)).num_cached_tokens == 12 * 16
    metrics = core.observer.get_metrics()
    assert metrics["num_blocks_reloaded"] == 12 and metrics["num_states_reloaded"] == 0
    core = make_small_core(num_gpu_blocks_override=257, num_state_checkpoints=1)
    for number in range(4):
        ask(core, distinct(number, 200))
    assert ask(core, distinct(0, 200)).num_cached_tokens == 12 * 16
    metrics = core.observer.get_metrics()
    assert metrics["num_blocks_reloaded"] == 0 and metrics["num_states_reloaded"] == 1


def test_without_its_state_a_block_is_no_hit_and_without_its_block_no_state():
    for lost in ("kept", "kept_states"):
        core = make_small_core()
        for number in range(4):
            ask(core, distinct(number, 200))
        getattr(core.executor.offload, lost).clear()
        assert ask(core, distinct(0, 200)).num_cached_tokens == 0
        assert_nothing_left(core)


def test_states_of_tenants_are_apart_and_a_damaged_one_counts_as_absent():
    core = make_small_core()
    for number in range(4):
        ask(core, distinct(number, 200), "mine")
    assert ask(core, distinct(0, 200), "yours").num_cached_tokens == 0
    assert ask(core, distinct(0, 200), "mine").num_cached_tokens == 12 * 16
    core.executor.offload.loss = 1.0
    assert ask(core, distinct(1, 200), "mine").num_cached_tokens == 0
    assert core.observer.get_metrics()["num_blocks_corrupt"] == 1
    assert_nothing_left(core)


def test_a_sleep_keeps_states_and_a_reset_and_a_failure_forget_them():
    core = make_small_core()
    ask(core, distinct(0, 200))
    core.call_utility("sleep", [1])
    core.call_utility("wake_up", [])
    assert ask(core, distinct(0, 200)).num_cached_tokens == 12 * 16
    assert core.observer.get_metrics()["num_states_reloaded"] == 1
    assert core.call_utility("reset_prefix_cache", [])
    assert not core.executor.offload.kept_states
    assert ask(core, distinct(0, 200)).num_cached_tokens == 0
    core = make_small_core()
    core.executor.errors["bad", 1] = "it failed"
    params = SamplingParams(temperature=0.0, max_tokens=2, seed=0)
    core.add_request(EngineCoreRequest("bad", distinct(0, 200), params))
    run(core)
    for number in range(1, 4):
        ask(core, distinct(number, 200))
    assert ask(core, distinct(0, 200)).num_cached_tokens == 0


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    num_jobs=st.integers(1, 30),
    arguments=SETTINGS,
    size=st.sampled_from([6 * MIB, 40 * MIB, 1000 * MIB]),
    loss=st.sampled_from([0.0, 0.0, 0.1]),
)
def test_no_output_changes_where_states_come_back(seed, num_jobs, arguments, size, loss):
    arguments = arguments | {
        "enable_prefix_caching": True,
        "kv_offloading_size": size,
    }
    core, jobs = make_tight_core(**arguments), random_jobs(seed, num_jobs)
    core.executor.offload.loss = loss
    for _ in range(2):
        assert_as_expected(core, jobs, drive(core, jobs))
        assert_nothing_left(core)
    assert core.observer.get_metrics()["num_blocks_corrupt"] == core.executor.offload.num_corrupt


def test_fewer_requests_run_where_memory_has_fewer_states():
    config = make_config(max_num_seqs=4)
    executor = FakeExecutor(config)
    executor.max_num_seqs, executor.num_state_checkpoints = 2, 3
    core = EngineCore(config, executor, check_every_step=True)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=5)
    for i in range(5):
        core.add_request(EngineCoreRequest(str(i), distinct(i, 100), params))
    answers = run(core)[0]
    for i in range(5):
        expected = expected_output(distinct(i, 100), params, [], config)[0]
        assert answers[str(i)].tokens == expected
    assert max(len(step.slots) for step in executor.steps) == 2
    # the places of checkpoints come after those of all slots
    assert {place for step in executor.steps for _, _, place in step.state_saves} == {4, 5, 6}
    core.check_integrity()
