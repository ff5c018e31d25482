"""The engine core: refusals, clients, utilities, failures, start-up (random workloads are in
test_random_workloads.py).
"""

import time

import pytest
from quire.core.engine_core import EngineCore, Host
from quire.ipc.errors import InvalidParameterError
from quire.ipc.messages import EngineCoreOutputs, FinishReason
from quire.tests.core.engine_loop import (
    Answer,
    assert_nothing_left,
    collect,
    greedy,
    make_core,
    make_request,
    run,
    step,
)
from quire.tests.fakes import FakeExecutor, expected_output, make_config

# ------------------------------------------------------------ requests and refusals


def test_a_request_is_answered():
    core = make_core()
    core.add_request(make_request("r", params=greedy(max_tokens=6)))
    answer = run(core)[0]["r"]
    assert (answer.tokens, answer.reason, answer.stop_reason) == expected_output(
        [1, 2, 3], greedy(max_tokens=6), [], core.config
    )
    assert answer.num_cached_tokens == 0
    assert_nothing_left(core)


def test_the_longest_prompt_gets_its_one_token():
    core = make_core()
    core.add_request(make_request(prompt=[1] * 255, params=greedy(max_tokens=50)))
    answer = run(core)[0]["r"]
    assert len(answer.tokens) == 1 and answer.reason is FinishReason.LENGTH


def test_a_request_id_in_use_is_refused_and_free_again_afterwards():
    core = make_core()
    core.add_request(make_request("r"), client_index=0)
    core.add_request(make_request("r"), client_index=1)
    answers = run(core)
    assert answers[1]["r"].error == "request_id: 'r' is already in use"
    assert answers[0]["r"].reason is FinishReason.LENGTH
    core.add_request(make_request("r"), client_index=1)
    assert run(core)[1]["r"].reason is FinishReason.LENGTH


def test_a_refusal_is_delivered_without_running_requests():
    core = make_core()
    assert not core.has_work() and core.step_fn() == (None, False)
    core.add_request(make_request(prompt=[]))
    assert core.has_work()
    outputs, model_executed = core.step_fn()
    assert outputs[0].finished[0].reason is FinishReason.ERROR and not model_executed
    assert outputs[0].finished[0].parameter == "prompt_token_ids"
    assert core.executor.steps == [] and not core.has_work()


def test_logprobs_travel_with_their_row():
    core = make_core()
    core.add_request(make_request("without"))
    core.add_request(make_request("with", params=greedy(logprobs=2)))
    outputs = step(core)[0]
    (logprobs,) = outputs.logprobs
    assert outputs.request_ids[logprobs.row] == "with" and logprobs.token_ids.shape == (1, 3)
    assert int.from_bytes(logprobs.token_ids.data[:4], "little") == outputs.token_ids[logprobs.row]


# ------------------------------------------------------------ clients and aborts


def test_each_client_sees_its_own_rows_only():
    core = make_core()
    for i in range(6):
        core.add_request(make_request(f"r{i}", prompt=[i + 1] * 10), client_index=i % 3)
    answers = run(core)
    assert {client: sorted(rows) for client, rows in answers.items()} == {
        0: ["r0", "r3"],
        1: ["r1", "r4"],
        2: ["r2", "r5"],
    }


def test_an_abort_is_answered_once_and_only_to_the_owner():
    core = make_core(max_num_seqs=1)
    core.add_request(make_request("runs", params=greedy(max_tokens=50)), client_index=0)
    core.add_request(make_request("waits"), client_index=0)
    answers = {}
    for _ in range(3):
        collect(step(core)[0], answers)
    core.abort_requests(["runs", "waits"], client_index=1)  # not the owner
    collect(step(core)[0], answers)
    core.abort_requests(["runs", "waits", "runs", "unknown"], client_index=0)
    assert core.has_work()
    outputs, model_executed = core.step_fn()
    collect(outputs[0], answers)
    assert list(outputs) == [0] and not model_executed
    assert len(answers["runs"].tokens) == 4 and answers["waits"].tokens == []
    assert {answer.reason for answer in answers.values()} == {FinishReason.ABORT}
    core.abort_requests(["runs"])
    assert not core.has_work()
    assert_nothing_left(core)


def test_a_client_that_leaves_takes_its_requests_and_rows_along():
    core = make_core()
    core.add_request(make_request("stays"), client_index=0)
    core.add_request(make_request("goes", params=greedy(max_tokens=50)), client_index=1)
    received = {}
    collect(step(core)[0], received)
    core.add_request(make_request("refused", prompt=[]), client_index=1)
    core.drop_client(1)
    core.drop_client(1)
    assert core.observer.scheduler_state()["running"] == ["stays"]
    assert list(run(core, {0: received})) == [0] and len(received["stays"].tokens) == 5
    assert_nothing_left(core)


# ------------------------------------------------------------ several steps' rows together


def paced_core(**arguments) -> tuple[EngineCore, dict]:
    """Two long requests. Their client has received the first tokens, and the second ones are
    deferred. Also what the client received.
    """
    core, received = make_core(**arguments), {}
    core.pace_outputs(20)
    for name in ("a", "b"):
        core.add_request(make_request(name, params=greedy(max_tokens=50)))
    while not core.rows.holds_any:
        for outputs in step(core).values():
            collect(outputs, received)
    assert [len(answer.tokens) for answer in received.values()] == [1, 1]
    return core, received


@pytest.mark.parametrize("overlapped", [False, True])
def test_deferred_rows_have_the_same_tokens(overlapped):
    core, received = paced_core(async_scheduling=overlapped)
    assert core.has_pending_outputs() and core.has_work()
    run(core, {0: received})
    for answer in received.values():
        assert (answer.tokens, answer.reason, None) == expected_output(
            [1, 2, 3], greedy(max_tokens=50), [], core.config
        )
    assert_nothing_left(core)


@pytest.mark.parametrize("overlapped", [False, True])
def test_deferred_rows_do_not_wait_for_a_long_step(overlapped):
    order: list[str] = []
    received: dict[str, Answer] = {}

    def deliver(outputs) -> None:
        order.append("received")
        collect(outputs[0], received)

    core, first = paced_core(host=Host(deliver=deliver), async_scheduling=overlapped)
    received |= first
    name = "submit_model" if overlapped else "execute_model"
    execute = getattr(core.executor, name)
    setattr(core.executor, name, lambda output: (order.append("step"), execute(output))[1])
    core.records.expected_s = lambda num_tokens: 0.04 if num_tokens < 40 else 0.06
    core.add_request(make_request("short"))
    collect(step(core).get(0, EngineCoreOutputs(0, [], [], [], [])), received)
    assert order == ["step"] and core.rows.holds_any
    core.add_request(make_request("long", prompt=[7] * 40))
    step(core)
    assert order == ["step", "received", "step"] and len(received["a"].tokens) > 1


def test_deferred_rows_do_not_wait_for_the_end_of_a_pause():
    core, received = paced_core()
    done = core.call_utility("pause", ["keep"])
    assert not done.done()
    collect(step(core)[0], received)
    assert (
        done.done()
        and not core.has_pending_outputs()
        and [len(answer.tokens) for answer in received.values()] == [2, 2]
    )
    core.call_utility("resume", [])
    run(core, {0: received})
    assert {len(answer.tokens) for answer in received.values()} == {50}


# ------------------------------------------------------------ failures


def test_a_row_that_fails_fails_alone():
    core = make_core()
    for name in ("a", "b", "c"):
        core.add_request(make_request(name, prompt=[ord(name) % 97] * 20), client_index=ord(name))
    core.executor.errors["b", 1] = "scripted"
    answers = run(core)
    failed = answers[ord("b")]["b"]
    assert (
        failed.reason is FinishReason.ERROR
        and failed.error == "scripted"
        and len(failed.tokens) == 1
    )
    assert [len(answers[ord(name)][name].tokens) for name in ("a", "c")] == [5, 5]
    assert_nothing_left(core)


def test_a_failure_of_the_model_is_raised():
    core = make_core()
    core.add_request(make_request())
    step(core)
    core.executor.raise_at_step = 1
    with pytest.raises(RuntimeError, match="scripted failure at step 1"):
        core.step_fn()


def test_post_step_checks_only_if_enabled(monkeypatch):
    core = make_core()
    checks = []
    monkeypatch.setattr(core.scheduler, "check_integrity", lambda: checks.append(1))
    core.post_step(True)
    core.post_step(False)
    assert len(checks) == 1
    core = make_core(check_every_step=False)
    monkeypatch.setattr(core.scheduler, "check_integrity", lambda: checks.append(1))
    core.post_step(True)
    assert len(checks) == 1


# ------------------------------------------------------------ start-up, statistics, utilities


def test_start_up_reports_progress_and_the_configuration():
    config, reports = make_config(num_gpu_blocks_override=20), []
    core = EngineCore(config, FakeExecutor(config), lambda *report: reports.append(report), epoch=4)
    assert reports == [("load weights", 1.0), ("kv cache", 0.0), ("kv cache", 1.0)]
    assert (
        core.ready.config,
        core.ready.num_blocks,
        core.ready.kv_cache_bytes,
        core.ready.epoch,
    ) == (config, 20, 20 * 16 * 8, 4)
    core.add_request(make_request())
    assert step(core)[0].epoch == 4


def test_a_failed_start_releases_the_model():
    config = make_config(num_gpu_blocks_override=2)
    executor = FakeExecutor(config)
    with pytest.raises(
        InvalidParameterError,
        match="max_model_len: must be at most 16, the tokens that fit a KV cache of 2 blocks",
    ):
        EngineCore(config, executor)
    assert executor.is_shut_down


def test_one_sequence_fits_exactly():
    core = make_core(num_gpu_blocks_override=17)
    for i in range(2):
        core.add_request(make_request(f"r{i}", prompt=[i] * 100, params=greedy(max_tokens=200)))
    assert [len(answer.tokens) for answer in run(core)[0].values()] == [156, 156]
    assert core.observer.get_metrics()["num_preemptions"] > 0


def test_statistics_come_with_rows_unless_disabled():
    core = make_core()
    core.add_request(make_request())
    assert step(core)[0].stats.num_running == 1
    core = make_core(disable_log_stats=True)
    core.add_request(make_request())
    assert step(core)[0].stats is None


def test_utilities():
    core = make_core()
    assert core.call_utility("ping", []) == "pong"
    core.add_request(make_request(prompt=[1] * 40))
    received = {}
    collect(step(core)[0], received)
    assert core.call_utility("reset_prefix_cache", []) is False
    assert core.call_utility("scheduler_state", [])["running"] == ["r"]
    assert core.call_utility("get_metrics", [])["num_prompt_tokens"] == 40
    assert core.call_utility("check_integrity", []) is True
    run(core, {0: received})
    assert core.call_utility("scheduler_state", [])["num_cached_blocks"] == 2
    assert core.call_utility("reset_prefix_cache", []) is True
    assert core.call_utility("scheduler_state", [])["num_cached_blocks"] == 0
    core.call_utility("execute_dummy_batch", [])
    assert core.executor.num_dummy_batches == 1


def test_shutdown_reaches_the_executor():
    core = make_core()
    core.shutdown()
    core.shutdown()
    assert core.executor.is_shut_down


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_request_ends_at_its_deadline(async_scheduling):
    core = make_core(async_scheduling=async_scheduling, max_num_seqs=2)
    soon = time.monotonic() + 0.5
    for name in ("running", "waiting"):
        core.add_request(make_request(f"other {name}", params=greedy(max_tokens=30)))
        core.add_request(make_request(name, params=greedy(max_tokens=250), deadline=soon))
    core.add_request(make_request("too late", deadline=time.monotonic() - 1))
    answers = {}
    while core.has_work():
        for outputs in step(core).values():
            collect(outputs, answers)
        time.sleep(0.005)
    late = {name: answers.pop(name) for name in ("running", "waiting", "too late")}
    assert {answer.reason for answer in late.values()} == {FinishReason.TIMEOUT}
    assert 0 < len(late["running"].tokens) < 250 and not late["too late"].tokens
    assert {(answer.reason, len(answer.tokens)) for answer in answers.values()} == {
        (FinishReason.LENGTH, 30)
    }
    assert (
        core.observer.get_metrics()["num_finished_timeout"] == 3
        and core.scheduler.next_deadline is None
    )
    assert_nothing_left(core)
