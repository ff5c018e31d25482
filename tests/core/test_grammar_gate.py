"""Requests whose grammar is being checked: their order, aborts and errors during the check, and
wake-ups.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import Future

import msgspec
import pytest
from quire.core.arrivals import GatedRequest, GrammarGate, after_both
from quire.core.engine_core import EngineCore
from quire.frontend.clients.inproc_client import InprocClient
from quire.frontend.clients.mp_client import MPClient
from quire.ipc.errors import InvalidParameterError
from quire.ipc.messages import EngineCoreRequest, FinishReason
from quire.ipc.params import SamplingParams, StructuredOutputsParams
from quire.tests.fake_engine import COMMAND, open_blocking
from quire.tests.fakes import FakeExecutor, make_config


def request(name: str, regex: str | None = None, **arguments) -> EngineCoreRequest:
    grammar = None if regex is None else StructuredOutputsParams(regex=regex)
    params = SamplingParams(
        temperature=0.0, seed=0, structured_outputs=grammar, **{"max_tokens": 2, **arguments}
    )
    return EngineCoreRequest(name, [1, 2, 3], params, eos_token_ids=[96])


def make_core(*unfinished: str, **arguments) -> EngineCore:
    """`unfinished` are regexes whose checks have not finished."""
    config = make_config(**arguments)
    executor = FakeExecutor(config)
    executor.grammar_checks = {regex: Future() for regex in unfinished}
    return EngineCore(config, executor, check_every_step=True)


def checks(core: EngineCore) -> dict[str, Future]:
    return core.executor.grammar_checks


def run(core: EngineCore) -> dict[str, tuple[int, FinishReason, str | None, str | None]]:
    """Step while there is work. Return request id -> (tokens, finish reason, error, parameter), in
    the order in which they finish.
    """
    tokens, ends = {}, {}
    while core.has_work():
        outputs, _ = core.step_fn()
        core.post_step(True)
        assert core.check_integrity()
        for rows in (outputs or {}).values():
            for request_id, count in zip(rows.request_ids, rows.num_tokens):
                tokens[request_id] = tokens.get(request_id, 0) + count
            for finished in rows.finished:
                name = rows.request_ids[finished.row]
                ends[name] = (tokens[name], finished.reason, finished.error, finished.parameter)
    return ends


def test_a_known_grammar_does_not_wait():
    core = make_core()
    core.add_request(request("a", "x"))
    assert not core.gate and core.scheduler.requests.keys() == {"a"}
    assert run(core)["a"][:2] == (2, FinishReason.LENGTH)


def test_others_run_while_a_grammar_is_checked():
    core = make_core("slow")
    core.add_request(request("a", "slow"))
    core.add_request(request("b"))
    assert set(run(core)) == {"b"}
    assert core.observer.scheduler_state()["waiting_for_grammar"] == ["a"]
    assert not core.has_work() and not core.is_idle()
    checks(core)["slow"].set_result(None)
    assert core.has_work()
    assert set(run(core)) == {"a"} and core.is_idle()


def test_the_order_is_that_of_arrival_not_of_the_checks():
    core = make_core("slow", max_num_seqs=1)
    core.add_request(request("a", "slow"))
    core.add_request(request("b"))
    core.add_request(request("c"))
    checks(core)["slow"].set_result(None)
    assert list(run(core)) == ["a", "b", "c"]


def test_a_refused_grammar_is_an_error_row_with_its_parameter():
    core = make_core("bad")
    core.add_request(request("a", "bad"))
    checks(core)["bad"].set_exception(InvalidParameterError("structured_outputs", "is bad"))
    assert run(core)["a"] == (
        0,
        FinishReason.ERROR,
        "structured_outputs: is bad",
        "structured_outputs",
    )
    metrics = core.observer.get_metrics()
    assert metrics["num_grammar_refusals"] == metrics["num_requests_refused"] == 1


def test_a_check_that_raises_is_an_error_row():
    core = make_core("bad", "cancelled")
    core.add_request(request("a", "bad"))
    core.add_request(request("b", "cancelled"))
    checks(core)["bad"].set_exception(RuntimeError("no process"))
    checks(core)["cancelled"].cancel()
    ends = run(core)
    assert ends["a"][1:] == (
        FinishReason.ERROR,
        "its grammar could not be checked: no process",
        None,  # not the request's fault: over HTTP it is a 500
    )
    assert ends["b"][1] is FinishReason.ERROR and ends["b"][3] is None
    assert core.observer.get_metrics()["num_grammar_refusals"] == 0


def test_a_deadline_passes_while_the_grammar_is_checked():
    core = make_core("slow")
    deadline = time.monotonic() + 0.05
    core.add_request(msgspec.structs.replace(request("a", "slow"), deadline=deadline))
    core.add_request(msgspec.structs.replace(request("n", "slow", n=2), deadline=deadline))
    core.add_request(request("b", "slow"))
    assert core.next_deadline == deadline and not core.has_work()
    core.gate.wait()
    assert time.monotonic() >= deadline and core.has_work()
    ends = run(core)
    assert ends.keys() == {"a", "0_n", "1_n"} and core.next_deadline is None
    assert {end[:2] for end in ends.values()} == {(0, FinishReason.TIMEOUT)}
    checks(core)["slow"].set_result(None)
    assert set(run(core)) == {"b"} and core.is_idle()


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asyncio"])
def test_a_client_is_told_of_a_deadline_during_the_check(is_async):
    config = make_config()
    executor = FakeExecutor(config)
    executor.grammar_checks["slow"] = Future()
    client = InprocClient(config, executor=executor)
    late = msgspec.structs.replace(request("a", "slow"), deadline=time.monotonic() + 0.05)

    async def ask():
        client.add_request(late)
        while not (outputs := await client.get_output_async()).finished:
            pass
        return outputs

    try:
        if is_async:
            outputs = asyncio.run(asyncio.wait_for(ask(), 60))
        else:
            client.add_request(late)
            while not (outputs := client.get_output()).finished:
                pass
        assert outputs.finished[0].reason is FinishReason.TIMEOUT
    finally:
        client.shutdown()


def test_an_abort_answers_at_once_and_the_check_is_ignored():
    core = make_core("slow")
    core.add_request(request("a", "slow"))
    core.abort_requests(["a", "unknown"], 1)  # another client's
    assert "a" in core.gate
    core.abort_requests(["a", "unknown"])
    assert run(core)["a"][:2] == (0, FinishReason.ABORT)
    checks(core)["slow"].set_result(None)
    assert run(core) == {} and core.is_idle()


def test_the_id_is_in_use_while_the_check_runs_and_free_after_an_abort():
    core = make_core("slow")
    core.add_request(request("a", "slow"))
    core.add_request(request("a"))
    assert "already in use" in run(core)["a"][2]
    core.abort_requests(["a"])
    run(core)
    # both requests share the check; its result must not be taken for that of the new one
    core.add_request(request("a", "slow"))
    checks(core)["slow"].set_result(None)
    assert run(core)["a"][:2] == (2, FinishReason.LENGTH) and core.is_idle()


def test_a_client_that_leaves_takes_its_waiting_requests_along():
    core = make_core("slow")
    core.add_request(request("a", "slow"), 0)
    core.add_request(request("b", "slow"), 1)
    core.drop_client(0)
    assert [gated.request.request_id for gated in core.gate] == [
        "b"
    ] and core.observer.get_metrics()["num_requests_orphaned"] == 1
    checks(core)["slow"].set_result(None)
    assert set(run(core)) == {"b"}


def test_a_request_without_an_end_of_sequence_token_is_refused():
    core = make_core()
    structure = StructuredOutputsParams(regex="x")
    for ignore_eos, eos, parameter in (
        (True, [], "ignore_eos"),
        (False, [], "structured_outputs"),
        # beyond the vocabulary: this is not the request's fault
        (False, [97], "structured_outputs"),
    ):
        params = SamplingParams(seed=0, structured_outputs=structure, ignore_eos=ignore_eos)
        core.add_request(EngineCoreRequest("a", [1], params, eos_token_ids=eos))
        assert run(core)["a"][2].startswith(f"{parameter}: ")


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_counts_requests_that_wait_for_a_grammar(mode):
    core = make_core("before", "during")
    core.add_request(request("a", "before"))
    paused = core.call_utility("pause", [mode])
    core.add_request(request("b", "during"))
    if mode == "abort":
        assert run(core)["a"][1] is FinishReason.ABORT
    else:
        assert run(core) == {} and paused.done() == (mode == "keep")
        checks(core)["before"].set_result(None)
        assert set(run(core)) == ({"a"} if mode == "wait" else set())
    checks(core)["during"].set_result(None)
    assert run(core) == {} and paused.done()
    core.call_utility("resume", [])
    assert set(run(core)) == {"abort": {"b"}, "wait": {"b"}, "keep": {"a", "b"}}[mode]
    assert core.is_idle()


def test_a_blocking_client_waits_for_the_check_without_stepping():
    config = make_config()
    executor = FakeExecutor(config)
    executor.grammar_checks["slow"] = check = Future()
    client = InprocClient(config, executor=executor)
    try:
        client.add_request(request("a", "slow"))
        timer = threading.Timer(0.1, check.set_result, [None])
        timer.start()
        assert client.get_output().request_ids == ["a"]
        timer.join()
    finally:
        client.shutdown()


def test_a_sleeping_core_is_woken_by_the_end_of_a_check():
    woken = threading.Event()
    gate = GrammarGate(woken.set)
    check: Future = Future()
    gate.add(GatedRequest(request("a"), 0, 0, check))
    assert not woken.is_set() and not gate.has_checked() and gate.take() == []
    threading.Thread(target=check.set_result, args=[None]).start()
    gate.wait()
    assert woken.wait(60) and gate.has_checked()
    assert [gated.request.request_id for gated in gate.take()] == ["a"] and not gate


@pytest.mark.parametrize("end", ["abort", "drop_client", "deadline"])
@pytest.mark.parametrize("has_check", [False, True])
def test_blocks_are_not_brought_for_a_request_that_leaves(end, has_check):
    gate, pull, check = GrammarGate(lambda: None), Future(), Future()
    ready = after_both(check if has_check else None, pull)
    deadline = time.monotonic() - 1 if end == "deadline" else 0.0
    late = msgspec.structs.replace(request("a"), deadline=deadline)
    gate.add(GatedRequest(late, 0, 0, ready, pull))
    if end == "deadline":
        [late] = gate.take()
        assert late.error is None
    elif end == "abort":
        assert [gated.request.request_id for gated in gate.abort(["a"], 0)] == ["a"]
    else:
        assert gate.drop_client(0) == 1
    assert pull.cancelled() and not check.cancelled() and not gate
    if has_check:
        check.set_result(None)
    assert ready.result(timeout=60) is None


def test_integrity_check_detects_a_lost_request():
    gate, check = GrammarGate(lambda: None), Future()
    gate.add(GatedRequest(request("a"), 0, 0, check))
    gate.check_integrity([])
    with pytest.raises(AssertionError, match="scheduled: .'a'"):
        gate.check_integrity(["a"])


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("leaves", [False, True], ids=["idle engine", "engine that drains"])
def test_an_idle_process_wakes_up_for_a_check(leaves):
    config = make_config(startup_timeout_s=120.0, hf_overrides={"grammar_delay_s": 1.5})
    client = open_blocking(MPClient.start(config, command=COMMAND))
    try:
        client.add_request(request("a", "slow"))
        assert client.call_utility("scheduler_state")["waiting_for_grammar"] == ["a"]
        if leaves:  # requests taken before are finished first
            os.kill(client.engine_pid, signal.SIGTERM)
        tokens = 0
        while tokens < 2:
            tokens += sum(client.get_output().num_tokens)
    finally:
        client.shutdown()
