"""Sleep, new weights and worker calls: outputs equal those of an undisturbed engine."""

import pytest
from quire.core.engine_core import EngineCore
from quire.ipc.errors import EnginePausedError, InvalidParameterError, ModelLoadError
from quire.tests.core.engine_loop import make_core, run
from quire.tests.core.pausing import (
    assert_finished,
    call,
    every_form,
    expected,
    long_request,
    make_request,
    started,
)
from quire.tests.fakes import weights_digest


@every_form
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_everything_and_outputs_do_not_change(level, form):
    core, requests, received = started(**form)
    call(core, "sleep", level, received=received)
    assert (
        core.executor.kv_cache == []
        and core.executor.asleep == {1: {"kv_cache"}, 2: {"kv_cache", "weights"}}[level]
    )
    late = long_request(9, max_tokens=requests[0].sampling_params.max_tokens)
    core.add_request(late)
    state = core.observer.scheduler_state()
    assert (
        state["running"] == []
        and state["num_cached_blocks"] == 0
        and state["kv_cache_usage"] == 0.0
    )
    assert call(core, "is_sleeping") and not call(core, "is_paused") and not core.has_work()
    call(core, "sleep", level)  # a second time: nothing happens
    call(core, "wake_up")
    assert not call(core, "is_sleeping")
    assert_finished(core, [*requests, late], received)


@every_form
def test_deep_sleep_and_wake_up_in_two_parts(form):
    core, requests, received = started(**form)
    call(core, "sleep", 1, received=received)
    call(core, "sleep", 2)
    assert core.executor.asleep == {"kv_cache", "weights"}
    with pytest.raises(InvalidParameterError, match="tags: the weights are asleep"):
        call(core, "wake_up", ["kv_cache"])
    call(core, "wake_up", ["weights"])
    assert (
        call(core, "is_sleeping")
        and core.observer.scheduler_state()["asleep"] == ["kv_cache"]
        and not core.has_work()
    )
    call(core, "wake_up", ["kv_cache"])
    call(core, "wake_up", ["kv_cache"])
    assert_finished(core, requests, received)


def test_a_failed_wake_up_can_be_retried(monkeypatch):
    core, requests, received = started()
    call(core, "sleep", 2)
    with monkeypatch.context() as patch:
        patch.setattr(
            core.executor,
            "wake_up",
            lambda tags: (_ for _ in ()).throw(ModelLoadError("no such file")),
        )
        with pytest.raises(ModelLoadError):
            call(core, "wake_up")
        assert (
            core.observer.scheduler_state()["asleep"] == ["kv_cache", "weights"]
            and not core.has_work()
        )
    call(core, "wake_up")
    assert_finished(core, requests, received)


@every_form
def test_sleep_inside_a_pause_needs_both_to_end(form):
    core, requests, received = started(**form)
    call(core, "pause", "keep", received=received)
    call(core, "sleep")
    call(core, "resume")
    assert not core.has_work()
    with pytest.raises(EnginePausedError, match="asleep"):
        call(core, "pause", "wait")
    call(core, "wake_up")
    assert_finished(core, requests, received)


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


@every_form
def test_the_prefix_cache_can_be_reset_while_requests_run(form):
    core, requests, received = started(**form)
    assert call(core, "reset_prefix_cache") is False
    assert call(core, "reset_prefix_cache", True) is True
    assert (
        core.observer.scheduler_state()["num_cached_blocks"] == 0
        and core.observer.get_metrics()["num_preemptions"] > 0
    )
    assert_finished(core, requests, received)
    with pytest.raises(InvalidParameterError, match="reset_running: must be True or False"):
        call(core, "reset_prefix_cache", 1)


def test_new_weights_apply_to_the_remaining_tokens():
    core, requests, received = started()
    before = {request.request_id: list(received[request.request_id].tokens) for request in requests}
    call(core, "load_weights", "/models/new")
    answers = run(core, {0: received})[0]
    for request in requests:
        tokens, had = answers[request.request_id].tokens, before[request.request_id]
        rest = make_request(prompt=request.prompt_token_ids + had, max_tokens=8 - len(had))
        assert tokens == had + expected(core, rest, weights_digest("/models/new"))
    fresh = long_request(1)
    core.add_request(fresh)
    answer = run(core)[0]["r1"]
    assert answer.tokens == expected(core, fresh, weights_digest("/models/new"))


def test_weights_that_cannot_be_loaded_change_nothing():
    core, requests, received = started()
    with pytest.raises(ModelLoadError, match="/models/missing"):
        call(core, "load_weights", "/models/missing")
    assert core.observer.get_metrics()["num_preemptions"] == 0
    assert_finished(core, requests, received)
    for path in (None, "", 5):
        with pytest.raises(InvalidParameterError, match="path: must be the name of a directory"):
            call(core, "load_weights", path)


def test_weights_can_be_loaded_into_a_sleeping_engine():
    core = make_core()
    call(core, "sleep", 2)
    call(core, "load_weights", "/models/new")
    assert core.observer.scheduler_state()["asleep"] == ["kv_cache"]
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


def test_every_use_of_the_executor_drains_the_step_in_flight_first(monkeypatch):
    for method, *args in (
        ("pause", "keep"),
        ("sleep", 1),
        ("load_weights", "/new"),
        ("collective_rpc", "check_health"),
        ("reset_prefix_cache", True),
    ):
        order: list[str] = []
        monkeypatch.setattr(EngineCore, "drain", lambda _, order=order: order.append("drain"))
        core = make_core()
        monkeypatch.setattr(
            core.executor, "collective_rpc", lambda name, *args, order=order: order.append(name)
        )
        call(core, method, *args)
        assert order[0] == "drain", method
