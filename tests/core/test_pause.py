"""Pause, sleep, new weights: who goes on, who is held, what a call returns and when; the outputs
are those of an engine left alone.
"""

import random
from concurrent.futures import Future

import pytest
from quire.core.pause import PauseControl
from quire.ipc.errors import EnginePausedError, InvalidParameterError, ModelLoadError
from quire.ipc.messages import (
    EngineCoreRequest,
    FinishReason,
    UtilityCall,
    UtilityResult,
    child_request_id,
)
from quire.ipc.params import SamplingParams
from quire.tests.core.engine_loop import assert_nothing_left, collect, make_core, run, step
from quire.tests.fakes import expected_output, weights_digest


def make_request(request_id="r", max_tokens=8, prompt=(1, 2, 3), n=1) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id,
        list(prompt),
        SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, n=n),
    )


def long_request(i: int, **fields) -> EngineCoreRequest:
    return make_request(f"r{i}", prompt=[(i * 31 + j * 7) % 97 for j in range(40)], **fields)


def expected(core, request, weights: int = 0) -> list[int]:
    return expected_output(
        request.prompt_token_ids, request.sampling_params, [], core.config, weights
    )[0]


def call(core, method: str, *args, client_index: int = 0, told: dict | None = None):
    """The result of a utility that is due at once, or with the next step, which may only deliver
    rows to client 0.
    """
    result = core.call_utility(method, list(args), client_index)
    deliver(core, told)
    return result.result(0) if isinstance(result, Future) else result


def deliver(core, told: dict | None) -> None:
    """What is owed already, where nothing more can come: rows of a step that was in flight."""
    if told is not None and core.owes_rows() and not core.pausing.can_step:
        for outputs in step(core).values():
            collect(outputs, told)


def started(num_requests: int = 3, num_steps: int = 3, **arguments):
    """A core in the middle of its work: (core, requests, what client 0 was told)."""
    core, told = make_core(**arguments), {}
    requests = [
        long_request(i, max_tokens=arguments.get("num_scheduler_steps", 1) * 8)
        for i in range(num_requests)
    ]
    for request in requests:
        core.add_request(request)
    for _ in range(num_steps):
        for outputs in step(core).values():
            collect(outputs, told)
    return core, requests, told


FORMS = {
    "plain": {},
    "overlapped": {"async_scheduling": True},
    "multi-step": {"num_scheduler_steps": 4},
    "overlapped multi-step": {"async_scheduling": True, "num_scheduler_steps": 4},
    # 3 requests of 48 tokens take 9 blocks and 7 are there; 97 tokens is what one may need
    "swapping": {"preemption_mode": "swap", "num_gpu_blocks_override": 8, "max_model_len": 97},
    "chunked": {"max_num_batched_tokens": 16},
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def assert_finished(core, requests, told) -> None:
    answers = run(core, {0: told})[0]
    for request in requests:
        assert (
            answers[request.request_id].tokens == expected(core, request)
            and answers[request.request_id].reason is FinishReason.LENGTH
        )
    assert_nothing_left(core)


# ------------------------------------------------------------ pause


@every_form
def test_keep_freezes_and_resume_goes_on(form):
    core, requests, told = started(**form)
    call(core, "pause", "keep", told=told)
    assert call(core, "is_paused") is True
    late = long_request(9, max_tokens=requests[0].sampling_params.max_tokens)
    core.add_request(late)
    assert not core.has_work() and core.step_fn() == (None, False)
    state = core.scheduler_state()
    assert sorted(state["running"] + state["waiting"] + state.get("swapped", [])) == [
        "r0",
        "r1",
        "r2",
    ]
    assert (state["held"], state["pause_mode"]) == (["r9"], "keep")
    num_steps, num_preemptions = len(core.executor.steps), core.get_metrics()["num_preemptions"]
    call(core, "resume")
    assert call(core, "is_paused") is False
    assert_finished(core, [*requests, late], told)
    assert len(core.executor.steps) > num_steps and (
        form or core.get_metrics()["num_preemptions"] == num_preemptions == 0
    )


def test_abort_ends_everybodys_requests_and_holds_the_next():
    core = make_core(max_num_seqs=2)
    for i in range(4):
        core.add_request(long_request(i), client_index=i % 2)
    answers: dict = {}
    for client, outputs in step(core).items():
        collect(outputs, answers.setdefault(client, {}))
    paused = core.call_utility("pause", ["abort"], 1)
    core.add_request(long_request(7), client_index=0)
    assert not paused.done()  # the rows come first
    for client, outputs in step(core).items():
        collect(outputs, answers.setdefault(client, {}))
    assert paused.result(0) is None
    ended = answers[0] | answers[1]
    assert sorted(ended) == ["r0", "r1", "r2", "r3"] and {
        answer.reason for answer in ended.values()
    } == {FinishReason.ABORT}
    assert not core.has_work() and core.scheduler_state()["held"] == ["r7"]
    call(core, "resume")
    assert run(core)[0]["r7"].tokens == expected(core, long_request(7))


def test_wait_lets_finish_what_is_there_and_answers_behind_the_last_row():
    core, requests, told = started(num_requests=5, max_num_seqs=2)  # three of them have not begun
    paused = core.call_utility("pause", ["wait"], 3)
    late = long_request(9)
    core.add_request(late)
    answers = {0: told}
    while not paused.done():
        outputs, model_executed = core.step_fn()
        collect(outputs[0], answers[0])
        assert not paused.done()
        core.post_step(model_executed)
    assert all(told[request.request_id].tokens == expected(core, request) for request in requests)
    assert "r9" not in told and not core.has_work()
    call(core, "resume")
    assert_finished(core, [late], told)


def test_wait_with_nothing_to_wait_for_is_over_at_once():
    assert call(make_core(), "pause", "wait") is None


def test_wait_is_over_when_the_last_request_leaves_with_its_client():
    core = make_core()
    core.add_request(make_request(max_tokens=100), client_index=4)
    step(core)
    paused = core.call_utility("pause", ["wait"], 0)
    assert not paused.done()
    core.drop_client(4)
    assert paused.result(0) is None and core.pausing.is_paused()


@every_form
def test_resume_ends_a_wait_with_an_error(form):
    core, requests, told = started(**form)
    paused = core.call_utility("pause", ["wait"], 0)
    call(core, "resume")
    with pytest.raises(EnginePausedError, match="before pause"):
        paused.result(0)
    assert_finished(core, requests, told)


@every_form
def test_a_wait_can_be_frozen_and_goes_on(form):
    core, requests, told = started(**form)
    waits = core.call_utility("pause", ["wait"], 0)
    call(core, "pause", "keep", client_index=1, told=told)
    assert not core.has_work() and not waits.done()
    again = core.call_utility("pause", ["wait"], 1)
    answers = run(core, {0: told})
    assert waits.done() and again.done() and all(answer.reason for answer in answers[0].values())


def test_refusals_and_aborts_are_answered_during_a_pause():
    core, requests, told = started()
    call(core, "pause", "keep")
    core.add_request(make_request("bad", prompt=()))
    core.add_request(make_request("held"))
    core.add_request(make_request("held"))  # in use, though it has not begun
    core.abort_requests(["r1", "held"])
    outputs = step(core)[0]
    reasons = {(outputs.request_ids[end.row], end.reason) for end in outputs.finished}
    error, abort = FinishReason.ERROR, FinishReason.ABORT
    assert reasons == {("bad", error), ("held", error), ("held", abort), ("r1", abort)}
    assert core.scheduler_state()["held"] == [] and not core.has_work()


def test_held_requests_keep_the_order_of_priority_and_arrival():
    core = make_core(scheduling_policy="priority", max_num_seqs=1)
    call(core, "pause", "keep")
    for i, priority in enumerate([1, 0, 1, -1]):
        core.add_request(
            EngineCoreRequest(
                f"r{i}",
                [1, 2],
                SamplingParams(temperature=0.0, seed=0, max_tokens=1),
                priority=priority,
            )
        )
    call(core, "resume")
    order = []
    while core.has_work():
        order += step(core)[0].request_ids
    assert order == ["r3", "r1", "r0", "r2"]


def test_a_pause_ends_with_the_last_client_that_asked_for_it():
    core = make_core()
    for client_index in (3, 4):
        call(core, "pause", "keep", client_index=client_index)
    core.add_request(make_request(), client_index=0)
    core.drop_client(3)
    core.drop_client(7)  # it had not asked
    assert not core.has_work()
    core.drop_client(4)
    assert run(core)[0]["r"].tokens == expected(core, make_request())


@pytest.mark.parametrize("mode", ["stop", "", None, 1, ["abort"]])
def test_unknown_modes_are_refused(mode):
    core = make_core()
    with pytest.raises(
        InvalidParameterError, match="mode: must be one of abort, wait, keep"
    ) as caught:
        call(core, "pause", mode)
    assert caught.value.parameter == "mode" and not core.pausing.is_paused()


def test_why_nothing_comes():
    core, requests, told = started()
    assert call(core, "stall_reason") is None
    call(core, "pause", "keep")
    assert call(core, "stall_reason") == "the engine is paused: resume() first"
    core.abort_requests(["r0"])
    reason = core.call_utility("stall_reason", [])
    assert not reason.done()  # a row is owed, so something does come
    step(core)
    assert reason.result(0) == "the engine is paused: resume() first"
    call(core, "sleep", 1)
    assert call(core, "stall_reason") == "the engine is asleep (kv_cache): wake_up() first"


# ------------------------------------------------------------ sleep


@every_form
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_everything_and_outputs_do_not_change(level, form):
    core, requests, told = started(**form)
    call(core, "sleep", level, told=told)
    assert (
        core.executor.kv_cache == []
        and core.executor.asleep == {1: {"kv_cache"}, 2: {"kv_cache", "weights"}}[level]
    )
    late = long_request(9, max_tokens=requests[0].sampling_params.max_tokens)
    core.add_request(late)
    state = core.scheduler_state()
    assert (
        state["running"] == []
        and state["num_cached_blocks"] == 0
        and state["kv_cache_usage"] == 0.0
    )
    assert call(core, "is_sleeping") and not call(core, "is_paused") and not core.has_work()
    call(core, "sleep", level)  # again: nothing happens
    call(core, "wake_up")
    assert not call(core, "is_sleeping")
    assert_finished(core, [*requests, late], told)


@every_form
def test_sleep_deeper_and_wake_in_two_parts(form):
    core, requests, told = started(**form)
    call(core, "sleep", 1, told=told)
    call(core, "sleep", 2)
    assert core.executor.asleep == {"kv_cache", "weights"}
    with pytest.raises(InvalidParameterError, match="tags: the weights are asleep"):
        call(core, "wake_up", ["kv_cache"])
    call(core, "wake_up", ["weights"])
    assert (
        call(core, "is_sleeping")
        and core.scheduler_state()["asleep"] == ["kv_cache"]
        and not core.has_work()
    )
    call(core, "wake_up", ["kv_cache"])
    call(core, "wake_up", ["kv_cache"])
    assert_finished(core, requests, told)


def test_a_wake_up_that_fails_can_be_tried_again(monkeypatch):
    core, requests, told = started()
    call(core, "sleep", 2)
    with monkeypatch.context() as patch:
        patch.setattr(
            core.executor,
            "wake_up",
            lambda tags: (_ for _ in ()).throw(ModelLoadError("no such file")),
        )
        with pytest.raises(ModelLoadError):
            call(core, "wake_up")
        assert core.scheduler_state()["asleep"] == ["kv_cache", "weights"] and not core.has_work()
    call(core, "wake_up")
    assert_finished(core, requests, told)


@every_form
def test_sleep_inside_a_pause_needs_both_to_end(form):
    core, requests, told = started(**form)
    call(core, "pause", "keep", told=told)
    call(core, "sleep")
    call(core, "resume")
    assert not core.has_work()
    with pytest.raises(EnginePausedError, match="asleep"):
        call(core, "pause", "wait")
    call(core, "wake_up")
    assert_finished(core, requests, told)


@pytest.mark.parametrize("level", [0, 3, True, "1", None])
def test_unknown_levels_are_refused(level):
    core = make_core()
    with pytest.raises(InvalidParameterError, match="level: must be 1"):
        call(core, "sleep", level)
    assert core.executor.asleep == set()


@pytest.mark.parametrize("tags", [[], ["kv"], "weights", [1], [["weights"]]])
def test_unknown_tags_are_refused(tags):
    core = make_core()
    call(core, "sleep", 1)
    with pytest.raises(InvalidParameterError, match="tags: must be a list of weights and kv_cache"):
        call(core, "wake_up", tags)


# ------------------------------------------------------------ cache, weights, workers


@every_form
def test_the_prefix_cache_can_be_reset_under_running_requests(form):
    core, requests, told = started(**form)
    assert call(core, "reset_prefix_cache") is False
    assert call(core, "reset_prefix_cache", True) is True
    assert (
        core.scheduler_state()["num_cached_blocks"] == 0
        and core.get_metrics()["num_preemptions"] > 0
    )
    assert_finished(core, requests, told)
    with pytest.raises(InvalidParameterError, match="reset_running: must be True or False"):
        call(core, "reset_prefix_cache", 1)


def test_new_weights_take_over_for_what_is_left():
    core, requests, told = started()
    before = {request.request_id: list(told[request.request_id].tokens) for request in requests}
    call(core, "load_weights", "/models/new")
    answers = run(core, {0: told})[0]
    for request in requests:
        tokens, had = answers[request.request_id].tokens, before[request.request_id]
        rest = make_request(prompt=request.prompt_token_ids + had, max_tokens=8 - len(had))
        assert tokens == had + expected(core, rest, weights_digest("/models/new"))
    fresh = long_request(1)
    core.add_request(fresh)
    answer = run(core)[0]["r1"]
    assert answer.tokens == expected(core, fresh, weights_digest("/models/new"))


def test_weights_that_cannot_be_loaded_change_nothing():
    core, requests, told = started()
    with pytest.raises(ModelLoadError, match="/models/missing"):
        call(core, "load_weights", "/models/missing")
    assert core.get_metrics()["num_preemptions"] == 0
    assert_finished(core, requests, told)
    for path in (None, "", 5):
        with pytest.raises(InvalidParameterError, match="path: must be the name of a directory"):
            call(core, "load_weights", path)


def test_weights_can_be_loaded_into_a_sleeping_engine():
    core = make_core()
    call(core, "sleep", 2)
    call(core, "load_weights", "/models/new")
    assert core.scheduler_state()["asleep"] == ["kv_cache"]
    call(core, "wake_up", ["kv_cache"])
    core.add_request(make_request())
    assert run(core)[0]["r"].tokens == expected(core, make_request(), weights_digest("/models/new"))


def test_workers_are_called_by_name():
    core = make_core()
    assert call(core, "collective_rpc", "check_health") == [None]
    assert call(core, "collective_rpc", "memory_usage", []) == [{"kv_cache_bytes": 257 * 16 * 8}]
    for method in ("shutdown", "__class__", "", 5, ["sleep"]):
        with pytest.raises(InvalidParameterError, match="method"):
            call(core, "collective_rpc", method)
    for method in ("sleep", "wake_up", "load_weights"):
        with pytest.raises(
            InvalidParameterError, match=f"method: {method} is not for the workers alone"
        ):
            call(core, "collective_rpc", method, [["kv_cache"]])
    with pytest.raises(InvalidParameterError, match="args: must be"):
        call(core, "collective_rpc", "check_health", "abc")


def test_whatever_uses_the_executor_drains_the_step_in_flight_first(monkeypatch):
    for method, *args in (
        ("pause", "keep"),
        ("sleep", 1),
        ("load_weights", "/new"),
        ("collective_rpc", "check_health"),
        ("reset_prefix_cache", True),
    ):
        core, order = make_core(), []
        monkeypatch.setattr(core, "_drain", lambda order=order: order.append("drain"))
        monkeypatch.setattr(
            core.executor, "collective_rpc", lambda name, *args, order=order: order.append(name)
        )
        call(core, method, *args)
        assert order[0] == "drain", method


# ------------------------------------------------------------ answers


def test_answers_come_once_now_or_later():
    core, requests, told = started()
    answers: list[UtilityResult] = []
    core.answer_utility(UtilityCall(1, "ping"), 0, answers.append)
    core.answer_utility(UtilityCall(2, "pause", ["wait"]), 0, answers.append)
    core.answer_utility(UtilityCall(3, "no such thing"), 0, answers.append)
    assert [answer.call_id for answer in answers] == [1, 3] and answers[
        1
    ].failure.parameter == "method"
    run(core, {0: told})
    assert [answer.call_id for answer in answers] == [1, 3, 2] and answers[2] == UtilityResult(2)
    core.answer_utility(UtilityCall(4, "resume"), 0, answers.append)
    assert core.get_metrics()["num_failed_utilities"] == 1


def test_a_failure_that_comes_later_is_answered_and_counted():
    core, _, _ = started()
    answers: list[UtilityResult] = []
    core.answer_utility(UtilityCall(1, "pause", ["wait"]), 0, answers.append)
    core.answer_utility(UtilityCall(2, "resume"), 0, answers.append)
    assert [answer.call_id for answer in answers] == [1, 2] and answers[
        0
    ].failure.error_type == "EnginePausedError"
    assert core.get_metrics()["num_failed_utilities"] == 1


def test_every_utility_of_the_pause_exists():
    assert all(callable(getattr(PauseControl, name)) for name in PauseControl.UTILITIES)


# ------------------------------------------------------------ at random


@every_form
@pytest.mark.parametrize("seed", range(4))
def test_no_pause_and_no_sleep_changes_an_output(form, seed):
    rng, core = random.Random(seed), make_core(**form)
    requests = [
        make_request(
            f"r{i}",
            rng.randint(1, 30),
            [rng.randrange(97) for _ in range(rng.randint(1, 60))],
            n=rng.choice([1, 1, 3]),
        )
        for i in range(20)
    ]
    told: dict = {}
    arriving, paused, asleep, num_steps = list(requests), False, False, 0
    while arriving or core.has_work() or paused or asleep:
        if arriving and rng.random() < 0.5:
            core.add_request(arriving.pop(0))
        for method, argument in (
            ("pause", "keep"),
            ("pause", "wait"),
            ("sleep", 1),
            ("sleep", 2),
            ("reset_prefix_cache", True),
        ):
            if rng.random() < 0.03 and not (method == "pause" and asleep):
                core.call_utility(method, [argument])
        if rng.random() < 0.3:
            core.call_utility("resume", [])
        if rng.random() < 0.3:
            core.call_utility("wake_up", [])
        paused, asleep = core.pausing.is_paused(), core.pausing.is_sleeping()
        for outputs in step(core).values():
            collect(outputs, told)
        num_steps += 1
        assert num_steps < 5000, core.scheduler_state()
    for request in requests:
        n = request.sampling_params.n  # greedy, so the completions of one request are alike
        for name in (
            [request.request_id]
            if n == 1
            else [child_request_id(request.request_id, i) for i in range(n)]
        ):
            assert told[name].tokens == expected(core, request)
    assert_nothing_left(core)


@pytest.mark.parametrize(
    "call_for",
    [
        ["pause", "keep"],
        ["sleep", 1],
        ["load_weights", "/new"],
        ["collective_rpc", "check_health"],
        ["execute_dummy_batch"],
    ],
)
def test_a_step_that_fails_while_a_utility_waits_for_it_is_the_engines_end(call_for):
    """Overlapped: the step is in flight when the call comes.

    Taken for the call's own failure, its requests would wait for ever.
    """
    core, _, _ = started(async_scheduling=True)
    core.executor.raise_at_step = 0
    step(core)  # hands the failing step over
    answers: list[UtilityResult] = []
    with pytest.raises(RuntimeError, match="scripted failure"):
        core.answer_utility(UtilityCall(1, call_for[0], call_for[1:]), 0, answers.append)
    assert answers == []


@pytest.mark.parametrize("form", [{}, {"async_scheduling": True}], ids=["plain", "overlapped"])
def test_whoever_asks_why_nothing_comes_is_not_kept_waiting_by_what_does_come(form):
    core, _, told = started(**form)
    assert core.call_utility("stall_reason", []).result(0) is None
    call(core, "pause", "keep", told=told)
    call(core, "resume")
    assert core.call_utility("stall_reason", []).result(0) is None
