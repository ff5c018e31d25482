"""The scheduler: what each step computes, who waits, who is preempted, how requests end; with the
fake executor's mirror checking.
"""

import msgspec
import pytest
from quire.core.output_rows import OutputRows
from quire.core.scheduling.scheduler import Scheduler
from quire.ipc.messages import (
    Array,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    SlotPromptLogprobs,
)
from quire.ipc.params import SamplingParams
from quire.tests.fakes import FakeExecutor, expected_output, make_config


class Loop:
    """A scheduler and a fake executor, stepped by hand.

    Collects each request's tokens and end, and checks after every step.
    """

    def __init__(self, **arguments):
        self.config = make_config(**{"preemption_mode": "recompute", **arguments})
        self.executor = FakeExecutor(self.config)
        num_blocks = self.executor.determine_num_blocks()
        self.executor.initialize_kv_cache(num_blocks)
        self.scheduler = Scheduler(self.config, num_blocks, *self.executor.initialize_swap_space())
        self.rows = OutputRows()
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, tuple[FinishReason, int | None]] = {}
        self.cached: dict[str, int] = {}

    def add(
        self, request_id: str, prompt: list[int], max_tokens=8, priority=0, client_index=0, **fields
    ) -> None:
        names = set(EngineCoreRequest.__struct_fields__)
        params = {
            "temperature": 0.0,
            "seed": 0,
            "max_tokens": max_tokens,
            **{k: v for k, v in fields.items() if k not in names},
        }
        extra = {k: v for k, v in fields.items() if k in names}
        message = EngineCoreRequest(
            request_id, prompt, SamplingParams(**params), priority=priority, **extra
        )
        self.scheduler.add_request(message, client_index)

    def step(self) -> dict[str, int]:
        """One step; returns the tokens scheduled, by request in order."""
        num_preemptions = self.scheduler.counters.num_preemptions
        step = self.scheduler.schedule()
        if step is None:
            return {}
        preempted = self.scheduler.counters.num_preemptions > num_preemptions
        assert not (preempted and step.output.new_requests), "preempted and admitted in one step"
        self.scheduler.update_from_output(step, self.executor.execute_model(step.output), self.rows)
        self.scheduler.check_integrity()
        for outputs in (self.rows.take(None) or {}).values():
            self._collect(outputs)
        return dict(
            zip(
                [request.request_id for request in step.requests],
                step.output.num_scheduled_tokens,
                strict=True,
            )
        )

    def _collect(self, outputs) -> None:
        cursor = 0
        for request_id, first_index, num_tokens in zip(
            outputs.request_ids, outputs.first_indices, outputs.num_tokens, strict=True
        ):
            tokens = self.tokens.setdefault(request_id, [])
            assert first_index == len(tokens), f"{request_id}: a gap or a duplicate"
            tokens += outputs.token_ids[cursor : cursor + num_tokens]
            cursor += num_tokens
        assert cursor == len(outputs.token_ids)
        for finished in outputs.finished:
            self.ends[outputs.request_ids[finished.row]] = (finished.reason, finished.stop_reason)
        for row, num_cached_tokens in outputs.num_cached_tokens:
            assert outputs.request_ids[row] not in self.cached, "reported twice"
            self.cached[outputs.request_ids[row]] = num_cached_tokens

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                return
            assert self.step(), "requests are waiting and nothing was scheduled"
        raise AssertionError(f"not finished after {max_steps} steps: {self.scheduler.state()}")

    def state(self, name: str) -> list[str]:
        return self.scheduler.state()[name]


def distinct(i: int, num_tokens: int) -> list[int]:
    return [(i * 31 + j * 7 + j * j) % 97 for j in range(num_tokens)]


# ------------------------------------------------------------ the budget


def test_chunks_of_the_reference():
    loop = Loop(max_model_len=1024, max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    for i in range(3):
        loop.add(str(i), distinct(i, 800))
    assert loop.step() == {"0": 400, "1": 400, "2": 224}
    assert loop.step() == {"0": 400, "1": 400, "2": 224}
    assert loop.step() == {"0": 1, "1": 1, "2": 352}
    assert loop.step() == {"0": 1, "1": 1, "2": 1}


def test_chunks_of_the_budget_alone():
    loop = Loop(max_model_len=1024, max_num_batched_tokens=1024)
    for i in range(3):
        loop.add(str(i), distinct(i, 800))
    assert [loop.step() for _ in range(3)] == [
        {"0": 800, "1": 224},
        {"0": 1, "1": 576, "2": 447},
        {"0": 1, "1": 1, "2": 353},
    ]


def test_running_requests_come_before_waiting_ones():
    loop = Loop(max_num_batched_tokens=16)
    loop.add("a", distinct(0, 40))
    assert loop.step() == {"a": 16}
    loop.add("b", distinct(1, 3))
    assert [loop.step() for _ in range(3)] == [{"a": 16}, {"a": 8, "b": 3}, {"a": 1, "b": 1}]


def test_without_chunked_prefill_a_prompt_that_does_not_fit_waits():
    loop = Loop(
        enable_chunked_prefill=False, max_num_batched_tokens=256, long_prefill_token_threshold=10
    )
    for i, num_tokens in enumerate((100, 100, 100, 5)):
        loop.add(str(i), distinct(i, num_tokens))
    # nobody overtakes the third, though the fourth would fit
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


def test_a_sent_message_does_not_change_while_the_request_grows():
    loop = Loop()
    loop.add("r", [1, 2, 3])
    loop.run()
    assert loop.executor.steps[0].new_requests[0].token_ids == [1, 2, 3]


def test_an_idle_scheduler_schedules_nothing():
    loop = Loop()
    assert loop.step() == {} and loop.executor.steps == []


# ------------------------------------------------------------ the prefix cache


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


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt_and_offers_its_blocks():
    loop, prompt = Loop(), distinct(0, 40)
    loop.add("filler", prompt, max_tokens=1)
    loop.run()
    loop.add("scored", prompt, max_tokens=1, prompt_logprobs=0)
    assert loop.step() == {"scored": 40}
    # the filler's alone
    assert loop.cached["scored"] == 0 and loop.scheduler.kv_cache_manager.prefix_cache_queries == 40
    assert loop.scheduler.reset_prefix_cache()
    loop.add("scored too", prompt, max_tokens=1, prompt_logprobs=0)
    loop.run()
    loop.add("reader", prompt, max_tokens=1)
    assert loop.step() == {"reader": 8}


def test_prompt_logprobs_reach_the_row_with_and_without_a_token():
    loop = Loop(max_num_batched_tokens=16)
    loop.add("r", distinct(0, 20), prompt_logprobs=1, eos_token_ids=[13])
    array = Array("f4", (1, 1), b"0000")
    for first_index, num_tokens in ((1, []), (17, [1])):
        step = loop.scheduler.schedule()
        result = loop.executor.execute_model(step.output)
        scored = SlotPromptLogprobs(step.output.slots[0], first_index, array, array, array)
        loop.scheduler.update_from_output(
            step, msgspec.structs.replace(result, prompt_logprobs=[scored]), loop.rows
        )
        outputs = loop.rows.take(None)[0]
        assert [row.first_index for row in outputs.prompt_logprobs] == [first_index]
        assert (
            set(outputs.request_ids) == {"r"} and [n for n in outputs.num_tokens if n] == num_tokens
        )
        assert len(outputs.num_cached_tokens) == len(num_tokens)


@pytest.mark.parametrize("num_scheduler_steps", [1, 4])
def test_what_fails_behind_the_end_of_a_request_does_not_spoil_it(num_scheduler_steps):
    """With lookahead as without: tokens before an error are delivered, and one that ends the
    request makes the error void.
    """
    loop = Loop(num_scheduler_steps=num_scheduler_steps)
    for name in ("ends", "fails"):
        loop.add(name, distinct(0, 20), eos_token_ids=[13])
        loop.executor.tokens |= {
            (name, i): token_id for i, token_id in enumerate([5, 6, 13 if name == "ends" else 7])
        }
        loop.executor.errors[name, 3] = "no more"
    loop.run()
    assert loop.tokens == {"ends": [5, 6, 13], "fails": [5, 6, 7]}
    assert loop.ends == {"ends": (FinishReason.STOP, None), "fails": (FinishReason.ERROR, None)}


def test_the_runner_learns_the_end_of_sequence_tokens():
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


# ------------------------------------------------------------ preemption and order


def test_the_latest_is_preempted_and_goes_to_the_front_of_the_queue():
    loop = Loop(
        num_gpu_blocks_override=5, max_model_len=64, max_num_seqs=2, enable_prefix_caching=False
    )
    loop.add("old", distinct(0, 31), max_tokens=20)
    loop.add("new", distinct(1, 31), max_tokens=20)
    loop.add("last", distinct(2, 5), max_tokens=20)
    loop.step()
    loop.step()  # both fill their second block, none is left
    assert loop.step() == {"old": 1}
    assert (loop.state("running"), loop.state("waiting")) == (["old"], ["new", "last"])
    assert loop.executor.steps[-1].freed_slots == [1]
    assert loop.scheduler.stats().num_preemptions == 1
    loop.run()
    assert [len(loop.tokens[name]) for name in ("old", "new", "last")] == [20, 20, 20]
    # later "last", having computed 16 tokens, gives way to "new" in the same way
    stats = loop.scheduler.stats()
    assert (stats.num_preemptions, stats.num_recomputed_tokens) == (2, 32 + 16)


def test_all_can_be_preempted_at_any_moment_and_go_on_as_if_they_had_not_been():
    loop = Loop(max_num_batched_tokens=64)
    for i in range(5):
        loop.add(str(i), distinct(i, 40), max_tokens=6)
    for num_steps in range(40):
        if num_steps % 3 == 0:
            loop.scheduler.preempt_all()
            assert loop.state("running") == [] and loop.scheduler.kv_cache_manager.usage == 0.0
            loop.scheduler.check_integrity()
            assert loop.scheduler.reset_prefix_cache()
        loop.step()
    loop.run()
    for i in range(5):
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=6)
        assert loop.tokens[str(i)] == expected_output(distinct(i, 40), params, [], loop.config)[0]
    assert loop.scheduler.counters.num_preemptions > 5


def test_a_preempted_request_finds_its_own_blocks_in_the_cache():
    loop = Loop(num_gpu_blocks_override=7, max_model_len=96, max_num_seqs=2)
    loop.add("old", distinct(0, 47), max_tokens=4)
    loop.add("new", distinct(1, 47), max_tokens=4)
    loop.run()
    stats = loop.scheduler.stats()
    assert stats.num_preemptions == 1
    assert stats.num_recomputed_tokens == 16  # 48 were computed; "old" took one of its three blocks
    # its own blocks are not counted as hits
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (94, 0)
    assert loop.cached == {"old": 0, "new": 0}


def test_priority_admits_and_preempts_by_priority_then_arrival():
    loop = Loop(
        scheduling_policy="priority",
        num_gpu_blocks_override=5,
        max_model_len=64,
        max_num_seqs=2,
        enable_prefix_caching=False,
    )
    loop.add("late but urgent", distinct(0, 31), priority=-1, max_tokens=4)
    loop.add("early", distinct(1, 31), priority=5, max_tokens=4)
    loop.add("middle", distinct(2, 31), priority=2, max_tokens=4)
    assert list(loop.step()) == ["late but urgent", "middle"]
    loop.step()
    assert loop.step() == {"late but urgent": 1}
    assert loop.state("waiting") == ["middle", "early"]
    loop.run()
    assert list(loop.ends) == ["late but urgent", "middle", "early"]


def test_a_better_waiting_request_takes_no_slot_but_wins_the_memory():
    loop = Loop(
        scheduling_policy="priority",
        num_gpu_blocks_override=5,
        max_model_len=64,
        max_num_seqs=2,
        enable_prefix_caching=False,
    )
    loop.add("a", distinct(0, 31), priority=3, max_tokens=30)
    loop.add("b", distinct(1, 15), priority=3, max_tokens=30)
    loop.step()
    loop.add("urgent", distinct(2, 16), priority=0, max_tokens=30)
    loop.step()
    assert loop.state("running") == ["a", "b"]  # both slots are taken, and are left alone
    loop.scheduler.abort_requests(["b"], 0)
    loop.step()
    assert loop.state("running") == ["urgent", "a"]
    while "a" in loop.state("running"):
        loop.step()
    assert loop.state("running") == ["urgent"]  # it came later, and yet "a" had to give way
    loop.run()


def test_fcfs_ignores_priority():
    loop = Loop(max_num_seqs=1)
    loop.add("first", [1], priority=9)
    loop.add("second", [2], priority=-9)
    loop.run()
    assert list(loop.ends) == ["first", "second"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("budget", [16, 2048])
def test_a_crowd_that_does_not_fit_still_finishes(policy, budget):
    loop = Loop(
        scheduling_policy=policy,
        num_gpu_blocks_override=9,
        max_model_len=128,
        max_num_batched_tokens=budget,
    )
    for i in range(12):
        loop.add(str(i), distinct(i, 40 + 5 * i), max_tokens=30, priority=-i % 3)
    loop.run()
    assert [len(tokens) for tokens in loop.tokens.values()] == [30] * 12 and len(loop.ends) == 12
    assert loop.scheduler.stats().num_preemptions > 0


# ------------------------------------------------------------ how requests end


def test_stops_and_lengths():
    loop = Loop(max_model_len=64)
    for name in ("eos", "stop", "both", "short", "full", "held"):
        loop.executor.tokens[name, 3] = 90
        held = {"min_tokens": 6} if name == "held" else {}
        eos, stop = (
            ([90] if name in ("eos", "both", "held") else []),
            ([90] if name in ("stop", "both") else []),
        )
        prompt = distinct(len(name), 60 if name == "full" else 5)
        loop.add(name, prompt, max_tokens=7, eos_token_ids=eos, stop_token_ids=stop, **held)
    loop.run()
    assert loop.ends == {
        "eos": (FinishReason.STOP, None),
        "stop": (FinishReason.STOP, 90),
        "both": (FinishReason.STOP, None),
        "short": (FinishReason.LENGTH, None),
        "full": (FinishReason.LENGTH, None),
        "held": (FinishReason.LENGTH, None),
    }
    assert {name: len(tokens) for name, tokens in loop.tokens.items()} == {
        "eos": 4,
        "stop": 4,
        "both": 4,
        "short": 7,
        "full": 4,
        "held": 7,
    }
    assert loop.tokens["eos"][-1] == 90  # the token that ends it is part of the output


def test_an_abort_ends_a_request_wherever_it_is():
    loop = Loop(
        max_num_seqs=2, num_gpu_blocks_override=9, max_model_len=128, max_num_batched_tokens=32
    )
    for i in range(4):
        loop.add(str(i), distinct(i, 50), client_index=i % 2)
    loop.step()
    aborted = loop.scheduler.abort_requests(["0", "3", "1", "nobody", "0"], client_index=0)
    assert [request.request_id for request in aborted] == ["0"]  # 1 and 3 are another client's
    loop.scheduler.check_integrity()
    # it was waiting
    assert [r.request_id for r in loop.scheduler.abort_requests(["3"], client_index=1)] == ["3"]
    loop.run()
    assert set(loop.ends) == {"1", "2"}
    assert (
        loop.scheduler.stats().num_free_blocks == 8
        and loop.scheduler.state()["num_free_slots"] == 2
    )


def test_a_failed_row_ends_that_request_alone():
    loop = Loop()
    alone = {}
    for i in range(3):
        loop.add(str(i), distinct(i, 20))
        alone[str(i)] = expected_output(
            distinct(i, 20), SamplingParams(temperature=0.0, seed=0, max_tokens=8), [], loop.config
        )[0]
    loop.executor.nan_rows.add(("1", 2))
    loop.run()
    assert loop.ends["1"] == (FinishReason.ERROR, None) and loop.tokens["1"] == alone["1"][:2]
    assert loop.tokens["0"] == alone["0"] and loop.tokens["2"] == alone["2"]
    loop.add("again", distinct(1, 20))
    loop.run()
    # the failed request left nothing in the cache
    assert loop.cached["again"] == 0 and loop.tokens["again"] == alone["1"]


def test_resumed_output_is_computed_but_not_told_again():
    loop = Loop()
    loop.add("whole", distinct(0, 20), max_tokens=10, temperature=1.0, seed=4)
    loop.run()
    resumed = Loop()
    resumed.tokens["rest"] = loop.tokens["whole"][:6]  # Loop checks that the first index is 6
    resumed.add(
        "rest",
        distinct(0, 20),
        max_tokens=10,
        temperature=1.0,
        seed=4,
        resume_tokens=loop.tokens["whole"][:6],
    )
    assert resumed.step() == {"rest": 26}
    resumed.run()
    assert (
        resumed.tokens["rest"] == loop.tokens["whole"]
        and resumed.ends["rest"] == loop.ends["whole"]
    )
    assert resumed.cached == {"rest": 0}


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


def test_several_tokens_in_one_row_end_at_the_first_stop():
    config = make_config()
    scheduler, rows = Scheduler(config, 257), OutputRows()
    scheduler.add_request(
        EngineCoreRequest("r", [1, 2], SamplingParams(seed=0, max_tokens=9), eos_token_ids=[7])
    )
    step = scheduler.schedule()
    scheduler.update_from_output(step, ModelRunnerOutput([3], [5, 7, 6]), rows)
    (outputs,) = rows.take(None).values()
    assert outputs.token_ids == [5, 7] and outputs.finished[0].reason is FinishReason.STOP
    assert scheduler.stats().num_generation_tokens == 2 and not scheduler.has_unfinished_requests()


def test_equal_arrivals_give_equal_schedules():
    def schedules() -> list:
        loop = Loop(
            num_gpu_blocks_override=17, max_num_batched_tokens=64, scheduling_policy="priority"
        )
        for i in range(20):
            loop.add(str(i), distinct(i % 5, 30 + i), max_tokens=25, priority=i % 3)
        loop.run()
        return loop.executor.steps

    assert schedules() == schedules()


def test_counters():
    loop = Loop()
    loop.add("a", distinct(0, 20), max_tokens=5)
    loop.add("b", distinct(1, 10), max_tokens=3)
    loop.step()
    stats = loop.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks, stats.num_free_blocks) == (
        2,
        0,
        257,
        253,
    )
    loop.run()
    stats = loop.scheduler.stats()
    assert (
        stats.num_prompt_tokens,
        stats.num_generation_tokens,
        stats.num_preemptions,
        stats.num_recomputed_tokens,
    ) == (30, 8, 0, 0)


# ------------------------------------------------------------ the integrity check sees damage


def _lose_a_slot(scheduler):
    scheduler._free_slots.pop()


def _forget_a_request(scheduler):
    scheduler.requests.pop("0")


def _unsort(scheduler):
    scheduler.running.reverse()


def _compute_too_much(scheduler):
    scheduler.running[0].num_computed_tokens += 5


def _list_twice(scheduler):
    scheduler.waiting.append(scheduler.running[0])


@pytest.mark.parametrize(
    "damage", [_lose_a_slot, _forget_a_request, _unsort, _compute_too_much, _list_twice]
)
def test_integrity_check_sees_damage(damage):
    loop = Loop()
    loop.add("0", distinct(0, 20))
    loop.add("1", distinct(1, 20))
    loop.step()
    damage(loop.scheduler)
    with pytest.raises(AssertionError, match="the scheduler does not hold that"):
        loop.scheduler.check_integrity()
