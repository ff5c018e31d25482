"""After a step: how requests end, and the output rows that report it."""

import msgspec
import pytest
from quire.core.output_rows import OutputRows
from quire.core.scheduling.owners import TOKENS_PER_S
from quire.core.scheduling.results import GRAMMAR_S, GRAMMAR_S_PER_TOKEN
from quire.core.scheduling.scheduler import Scheduler
from quire.ipc.messages import Array, EngineCoreRequest, FinishReason, child_request_id
from quire.ipc.params import SamplingParams, StructuredOutputsParams
from quire.ipc.step_messages import ModelRunnerOutput, RowRefusal, SlotPromptLogprobs
from quire.tests.core.scheduling.loop import Loop, distinct
from quire.tests.fakes import expected_output, make_config


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
    aborted = loop.scheduler.abort_requests(["0", "3", "1", "unknown", "0"], client_index=0)
    assert [request.request_id for request in aborted] == ["0"]  # 1 and 3 belong to another client
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


def test_resumed_output_is_computed_but_not_sent_again():
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
def test_an_error_after_the_end_of_a_request_is_ignored(num_scheduler_steps):
    """With and without lookahead, tokens before an error are delivered. If one of them ends the
    request, the error is dropped.
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


def test_drafts_that_are_refused_while_the_request_is_swapped_out_are_not_computed():
    """A step of drafts is under way when its request is swapped out, as overlapped steps do."""
    loop = Loop(
        preemption_mode="swap",
        block_size=8,
        speculative_config={"method": "ngram", "num_speculative_tokens": 7},
    )
    scheduler = loop.scheduler
    loop.add("r", distinct(0, 10), max_tokens=30)
    prefill = scheduler.schedule()
    scheduler.update_from_output(prefill, ModelRunnerOutput([1], [4], num_ahead=[0]), loop.rows)
    step = scheduler.schedule()
    (lookahead,) = step.output.num_lookahead_tokens
    assert lookahead >= 7
    scheduler.preempt(scheduler.running.pop())
    request = scheduler.requests["r"]
    assert request.num_swapped_tokens == 11 + lookahead
    result = ModelRunnerOutput([2], [5, 6], num_ahead=[1], num_drafted=[7], num_accepted=[1])
    scheduler.update_from_output(step, result, loop.rows)
    scheduler.check_integrity()
    assert request.num_swapped_tokens == 12 and len(request.token_ids) == 13
    again = scheduler.schedule().output
    assert (again.num_computed_tokens, again.num_scheduled_tokens) == ([12], [1])
    assert len(again.blocks_to_swap_in) == 1  # the other block is in the prefix cache


def spending(loop: Loop, **seconds: float) -> None:
    """A step in which grammars take this much CPU time."""
    step = loop.scheduler.schedule()
    result = loop.executor.execute_model(step.output)
    costs = {
        slot: seconds[request.request_id]
        for request, slot in zip(step.requests, step.output.slots)
        if request.request_id in seconds
    }
    result = msgspec.structs.replace(result, grammar_s=costs)
    loop.scheduler.update_from_output(step, result, loop.rows)


def test_a_request_whose_grammar_takes_too_much_time_ends_alone():
    """At first it may take some, then a little for each token."""
    loop = Loop(max_model_len=256)
    for name in ("slow", "usual", "first"):
        constraint = StructuredOutputsParams(regex="a*")
        loop.add(name, distinct(len(name), 5), max_tokens=100, structured_outputs=constraint)
    spending(loop, slow=0.01, usual=0.001, first=GRAMMAR_S)
    for _ in range(10):
        loop.rows.take(None)
        spending(loop, slow=0.01, usual=GRAMMAR_S_PER_TOKEN)
    assert set(loop.scheduler.requests) == {"usual", "first", "slow"}
    while "slow" in loop.scheduler.requests:
        assert loop.scheduler.requests["slow"].num_output_tokens < 100
        loop.rows.take(None)
        spending(loop, slow=0.01, usual=GRAMMAR_S_PER_TOKEN)
    (end,) = loop.rows.take(None)[0].finished
    assert end.reason == FinishReason.ERROR and end.parameter == "structured_outputs"
    assert "is too complex" in end.error and "0.17 s are allowed" in end.error
    assert set(loop.scheduler.requests) == {"usual", "first"}
    loop.scheduler.check_integrity()


def test_completions_of_a_request_share_the_time_of_its_grammar():
    """Else n=64 would have 64 times as much."""
    loop = Loop(max_model_len=256)
    constraint = StructuredOutputsParams(regex="a*")
    loop.add("many", distinct(0, 5), n=4, max_tokens=100, structured_outputs=constraint)
    names = [child_request_id("many", i) for i in range(4)]
    while len(loop.scheduler.running) < 4:
        loop.rows.take(None)
        spending(loop)
    spending(loop, **dict.fromkeys(names, GRAMMAR_S / 5))
    assert set(loop.scheduler.requests) == set(names)
    loop.rows.take(None)
    spending(loop, **dict.fromkeys(names, GRAMMAR_S / 5))
    assert not loop.scheduler.requests  # all of them end at once
    ends = loop.rows.take(None)[0].finished
    assert {(end.reason, end.parameter) for end in ends} == {
        (FinishReason.ERROR, "structured_outputs")
    }
    assert len(ends) == 4
    loop.scheduler.check_integrity()


def test_the_time_of_a_grammar_counts_as_service_of_its_owner():
    loop = Loop(max_model_len=256)
    constraint = StructuredOutputsParams(regex="a*")
    for owner in ("slow", "usual"):
        loop.add(owner, distinct(0, 5), owner=owner, max_tokens=9, structured_outputs=constraint)
    spending(loop, slow=0.1, usual=0.001)
    slow, usual = (loop.scheduler.requests[name].owner.served for name in ("slow", "usual"))
    assert slow - usual == pytest.approx(0.099 * TOKENS_PER_S)


@pytest.mark.parametrize("error", ["it broke", RowRefusal("bad_words", "mask every token")])
def test_an_error_names_its_parameter_or_has_a_line_in_the_log(error, caplog):
    loop = Loop()
    loop.add("r", distinct(0, 20))
    loop.executor.errors["r", 1] = error
    spending(loop)
    loop.rows.take(None)
    spending(loop)
    (end,) = loop.rows.take(None)[0].finished
    assert (end.error, end.parameter) == (str(error), getattr(error, "parameter", None))
    assert ("the request r failed: it broke" in caplog.text) == (end.parameter is None)


def test_a_step_before_a_preemption_computes_nothing_for_the_next_start():
    """Where the model has stages, a request may start again while that step runs. Otherwise blocks
    would count as filled that a later step fills.
    """
    loop = Loop(pipeline_parallel_size=3, max_num_batched_tokens=64)
    loop.add("r", distinct(0, 200))
    scheduler = loop.scheduler
    before = scheduler.schedule()
    result_before = loop.executor.execute_model(before.output)
    request = scheduler.running.pop()
    scheduler.preempt(request)
    after = scheduler.schedule()
    result_after = loop.executor.execute_model(after.output)
    scheduler.update_from_output(before, result_before, loop.rows)
    assert request.num_computed_tokens == 64 and request.num_executed_tokens == 0
    scheduler.update_from_output(after, result_after, loop.rows)
    assert request.num_executed_tokens == 64
    loop.run()
    params = SamplingParams(temperature=0.0, max_tokens=8)
    assert loop.tokens["r"] == expected_output(distinct(0, 200), params, [], loop.config)[0]
