"""Adapters in the core: reading, memory, reloading, removal, and outputs under random workloads."""

import random
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.core.engine_core import Host
from quire.ipc.errors import InvalidParameterError
from quire.ipc.lora import LoRARequest
from quire.ipc.messages import FinishReason
from quire.tests.core.engine_loop import (
    assert_nothing_left,
    collect,
    greedy,
    make_core,
    make_request,
    run,
    step,
)
from quire.tests.core.test_random_workloads import (
    SETTINGS,
    drive,
    make_tight_core,
    random_jobs,
    split,
)
from quire.tests.fake_loras import adapter_digest
from quire.tests.fakes import expected_output

PROMPT = list(range(1, 41))


def lora(name: str, lora_int_id: int | None = None, path: str | None = None, **fields):
    return LoRARequest(name, lora_int_id or ord(name[0]), path or f"/adapters/{name}", **fields)


def lora_core(**arguments) -> Any:
    return make_core(**{"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, **arguments})


def add(core, request_id: str, adapter=None, prompt=None, **fields):
    request = make_request(request_id, prompt or PROMPT, greedy(**fields), lora_request=adapter)
    core.add_request(request)
    return request


def expected(core, adapter: LoRARequest | None, prompt=None, **fields):
    digest = 0 if adapter is None else adapter_digest(adapter.lora_path)
    return expected_output(prompt or PROMPT, greedy(**fields), [], core.config, digest)[0]


def finish(core, answers=None):
    """Run until there is no work; what is being read is waited for."""
    answers = {} if answers is None else answers
    while not core.is_idle():
        if not core.has_work():
            core.wait()
        run(core, answers)
    return answers.get(0, {})


def call(core, method: str, *args):
    result = core.call_utility(method, list(args))
    if isinstance(result, Future):
        finish(core)
        return result.result(0)
    return result


def test_a_request_brings_its_adapter() -> None:
    core, adapter = lora_core(), lora("a")
    add(core, "with", adapter)
    add(core, "without")
    answers = finish(core)
    assert answers["with"].tokens == expected(core, adapter)
    assert answers["without"].tokens == expected(core, None) != expected(core, adapter)
    assert call(core, "list_loras") == [adapter.lora_int_id]
    assert_nothing_left(core)


def test_adapters_take_turns_in_memory_that_holds_one() -> None:
    core = lora_core()
    adapters = [lora(name) for name in "abcab"]
    for i, adapter in enumerate(adapters):
        add(core, f"{i}", adapter, max_tokens=3 + i)
    answers = finish(core)
    for i, adapter in enumerate(adapters):
        assert answers[f"{i}"].tokens == expected(core, adapter, max_tokens=3 + i)
    assert len(call(core, "list_loras")) == 1
    assert_nothing_left(core)


@pytest.mark.slow
def test_a_thousand_adapters_share_the_memory_of_four() -> None:
    core = lora_core(
        max_loras=2,
        max_cpu_loras=4,
        max_num_seqs=8,
        check_every_step=False,  # which would be quadratic
    )
    adapters = [lora(f"n{i}", i + 1) for i in range(1000)]
    order = random.Random(1).sample(range(1000), 1000)
    for i in order:
        add(core, f"{i}", adapters[i], max_tokens=2)
    answers = finish(core)
    for i in order:
        assert answers[f"{i}"].tokens == expected(core, adapters[i], max_tokens=2)
    assert call(core, "list_loras") == sorted(i + 1 for i in order[-4:])
    assert_nothing_left(core)


def test_other_requests_run_while_an_adapter_is_read() -> None:
    core, adapter = lora_core(), lora("a")
    core.executor.holds_reads = True
    add(core, "plain", max_tokens=6)
    add(core, "with", adapter)
    answers: dict = {}
    assert run(core, answers)[0]["plain"].tokens == expected(core, None, max_tokens=6)
    assert "with" not in answers[0] and not core.has_work() and not core.is_idle()
    core.check_integrity()
    core.executor.finish_reads()
    assert core.has_work()
    assert finish(core, answers)["with"].tokens == expected(core, adapter)


def test_the_host_is_woken_when_an_adapter_is_read() -> None:
    woken: list[bool] = []
    core = lora_core(host=Host(wake=lambda: woken.append(True)))
    core.executor.holds_reads = True
    add(core, "with", lora("a"))
    run(core)
    assert not woken
    core.executor.finish_reads()
    assert woken


def test_an_adapter_that_cannot_be_read_fails_its_requests_alone() -> None:
    core, bad, good = lora_core(), lora("b", path="/missing/b"), lora("g")
    add(core, "bad", bad)
    add(core, "bad too", bad)
    add(core, "good", good)
    add(core, "plain")
    answers = finish(core)
    for name in ("bad", "bad too"):
        assert answers[name].reason is FinishReason.ERROR
        assert answers[name].error == "lora_request: /missing/b is not there"
    assert answers["good"].tokens == expected(core, good)
    assert answers["plain"].tokens == expected(core, None)
    with pytest.raises(InvalidParameterError, match="/missing/b is not there"):
        call(core, "add_lora", bad)
    assert_nothing_left(core)


def test_a_request_that_ends_while_its_adapter_is_read() -> None:
    core = lora_core()
    core.executor.holds_reads = True
    add(core, "with", lora("a"))
    run(core)
    core.abort_requests(["with"])
    core.executor.finish_reads()
    assert finish(core)["with"].reason is FinishReason.ABORT
    assert call(core, "list_loras") == []
    assert_nothing_left(core)


def test_an_engine_without_lora_refuses_by_name() -> None:
    core = make_core()
    add(core, "with", lora("a"))
    answer = finish(core)["with"]
    assert answer.error == "lora_request: needs an engine that was started with enable_lora"
    with pytest.raises(InvalidParameterError, match="started with enable_lora"):
        core.call_utility("add_lora", [lora("a")])
    assert core.call_utility("list_loras", []) == []
    assert core.observer.observe()["adapters"] == core.observer.status()["loras"] == {}


def test_an_id_is_that_of_one_adapter() -> None:
    core = lora_core(max_cpu_loras=2)
    assert call(core, "add_lora", lora("a", 7))
    add(core, "other", lora("b", 7))
    assert finish(core)["other"].error.startswith(
        "lora_request: lora_int_id 7 is that of 'a' from /adapters/a, got 'b' from /adapters/b"
    )
    assert call(core, "remove_lora", 7) is True
    add(core, "again", lora("b", 7))
    assert finish(core)["again"].tokens == expected(core, lora("b", 7))


def test_utilities_check_their_arguments() -> None:
    core = lora_core()
    plain = msgspec.to_builtins(lora("a"))  # as it comes off the wire
    assert call(core, "add_lora", plain) is True
    assert call(core, "add_lora", plain) is True
    for value in (None, "a", ["a"], ["a", 0, "/a"], ["", 1, "/a"]):
        with pytest.raises(InvalidParameterError, match="lora_request: must be a LoRARequest"):
            core.call_utility("add_lora", [value])
    for method in ("remove_lora", "pin_lora"):
        with pytest.raises(InvalidParameterError, match="lora_int_id: must be an integer"):
            core.call_utility(method, ["a"])
    assert call(core, "remove_lora", 5) is False
    with pytest.raises(InvalidParameterError, match="lora_int_id: 5 is not in memory"):
        core.call_utility("pin_lora", [5])


# ---------------------------------------------------------------- generations


def test_a_reload_hits_nothing_of_before(tmp_path) -> None:
    path = tmp_path / "adapter"
    path.write_text("first")
    core, adapter = lora_core(), lora("a", path=str(path))
    first = expected(core, adapter)
    for name in ("cold", "warm"):
        add(core, name, adapter)
        assert (answer := finish(core)[name]).tokens == first
    assert answer.num_cached_tokens == 32
    path.write_text("second")
    assert call(core, "add_lora", lora("a", path=str(path), load_inplace=True))
    add(core, "reloaded", adapter)
    answer = finish(core)["reloaded"]
    assert answer.tokens == expected(core, adapter) != first
    assert answer.num_cached_tokens == 0
    assert call(core, "remove_lora", adapter.lora_int_id)
    add(core, "loaded again", adapter)
    assert finish(core)["loaded again"].num_cached_tokens == 0
    for salt in ("", "s"):
        request = make_request(salt or "unsalted", PROMPT, greedy(), cache_salt=salt)
        core.add_request(request)
    answers = finish(core)
    assert {answers[name].num_cached_tokens for name in ("s", "unsalted")} == {0}


def test_running_requests_keep_the_adapter_they_began_with(tmp_path) -> None:
    path = tmp_path / "adapter"
    path.write_text("first")
    core, adapter = lora_core(), lora("a", path=str(path))
    first = expected(core, adapter, max_tokens=20)
    add(core, "old", adapter, max_tokens=20)
    answers: dict = {}
    for _ in range(5):
        step_into(core, answers)
    path.write_text("second")
    done = core.call_utility("add_lora", [lora("a", path=str(path), load_inplace=True)])
    step_into(core, answers)
    add(core, "new", adapter, max_tokens=3)
    finish(core, answers)
    assert done.result(0) is True
    assert answers[0]["old"].tokens == first
    assert answers[0]["new"].tokens == expected(core, adapter, max_tokens=3)
    assert core.executor.list_loras() == {core.loras._known[ord("a")].number}
    assert_nothing_left(core)


def step_into(core, answers) -> None:
    for client_index, outputs in step(core).items():
        collect(outputs, answers.setdefault(client_index, {}))


def test_a_removed_adapter_is_freed_when_its_last_request_ends() -> None:
    core, adapter = lora_core(), lora("a")
    add(core, "r", adapter, max_tokens=10)
    answers: dict = {}
    for _ in range(3):
        step_into(core, answers)
    assert core.call_utility("remove_lora", [adapter.lora_int_id]) is True
    assert core.call_utility("list_loras", []) == [] and core.executor.list_loras()
    assert finish(core, answers)["r"].tokens == expected(core, adapter, max_tokens=10)
    assert core.executor.list_loras() == set()
    assert_nothing_left(core)


def test_files_that_changed_while_a_preempted_request_waits(tmp_path) -> None:
    path = tmp_path / "adapter"
    path.write_text("first")
    core, adapter = lora_core(), lora("a", path=str(path))
    add(core, "r", adapter, max_tokens=10)
    add(core, "other", lora("o"), max_tokens=3)
    answers: dict = {}
    for _ in range(3):
        step_into(core, answers)
    core.scheduler.preempt_all()
    path.write_text("second")
    core.loras._evict(core.loras._known[adapter.lora_int_id])
    finish(core, answers)
    assert "have changed since 'a' was loaded; load it again" in answers[0]["r"].error
    assert answers[0]["other"].tokens == expected(core, lora("o"), max_tokens=3)
    assert_nothing_left(core)


# ---------------------------------------------------------------- memory


def test_a_load_does_not_wait_for_room() -> None:
    core, running, other = lora_core(), lora("a"), lora("b")
    add(core, "r", running, max_tokens=12)
    answers: dict = {}
    for _ in range(3):
        step_into(core, answers)
    done = core.call_utility("add_lora", [other])
    step_into(core, answers)
    assert done.result(0) is True  # its files are good
    assert core.call_utility("list_loras", []) == [running.lora_int_id]
    add(core, "b", other, max_tokens=2)
    finish(core, answers)
    assert answers[0]["r"].tokens == expected(core, running, max_tokens=12)
    assert answers[0]["b"].tokens == expected(core, other, max_tokens=2)


def test_the_least_recently_used_makes_room_and_a_pinned_one_stays() -> None:
    core = lora_core(max_cpu_loras=2)
    a, b, c = (lora(name) for name in "abc")
    for adapter in (a, b):
        assert call(core, "add_lora", adapter)
    add(core, "r", a)
    finish(core)
    call(core, "add_lora", c)
    assert call(core, "list_loras") == sorted([a.lora_int_id, c.lora_int_id])
    assert call(core, "pin_lora", a.lora_int_id) is True
    for name in "bd":
        add(core, name, lora(name))
        finish(core)
        assert a.lora_int_id in call(core, "list_loras")
    call(core, "pin_lora", lora("d").lora_int_id)
    add(core, "none", lora("e"))
    assert "all max_cpu_loras=2 in memory are pinned" in finish(core)["none"].error
    call(core, "remove_lora", a.lora_int_id)
    add(core, "some", lora("e"))
    assert finish(core)["some"].tokens == expected(core, lora("e"))


def test_a_thousand_loads_and_removals_leave_nothing() -> None:
    core = lora_core(max_loras=2, max_cpu_loras=3)
    for i in range(1000):
        adapter = lora(f"n{i % 7}", i % 7 + 1, load_inplace=i % 5 == 0)
        assert call(core, "add_lora", adapter)
        if i % 3 == 0:
            add(core, f"{i}", adapter, max_tokens=1)
            finish(core)
        if i % 2:
            call(core, "remove_lora", adapter.lora_int_id)
    for lora_int_id in call(core, "list_loras"):
        call(core, "remove_lora", lora_int_id)
    assert core.executor.list_loras() == set() and core.executor.read_adapters == {}
    assert not (core.loras._known or core.loras._files or core.loras._calls)
    assert not (core.loras._resident or core.loras._to_load or core.loras._reading)
    assert core.scheduler.reset_prefix_cache()
    assert_nothing_left(core)


def test_adapters_outlive_sleep_and_pause() -> None:
    core, adapter = lora_core(), lora("a")
    call(core, "add_lora", adapter)
    core.call_utility("sleep", [2])
    add(core, "r", adapter)
    assert call(core, "add_lora", lora("b")) is True
    core.call_utility("wake_up", [])
    assert finish(core)["r"].tokens == expected(core, adapter)
    core.call_utility("pause", ["keep"])
    assert call(core, "add_lora", adapter) is True
    core.call_utility("resume", [])
    assert_nothing_left(core)


def test_status_names_what_runs_and_what_waits() -> None:
    core = lora_core(max_cpu_loras=2)
    add(core, "a", lora("a"), max_tokens=9)
    add(core, "b", lora("b"))
    answers: dict = {}
    for _ in range(3):
        step_into(core, answers)
    seen = core.observer.observe()
    assert core.observer.status()["loras"] == {
        "max_loras": 1,
        "max_cpu_loras": 2,
        "num_in_memory": 2,
        "running": ["a"],
        "waiting": ["b"],
    }
    assert [r["lora_name"] for r in core.observer.scheduler_state()["requests"]] == ["a", "b"]
    assert [r["lora_name"] for r in seen["requests"]] == ["a", "b"]
    assert seen["adapters"] == core.observer.status()["loras"]
    finish(core, answers)
    assert (
        core.observer.status()["loras"]["running"]
        == core.observer.status()["loras"]["waiting"]
        == []
    )


# ---------------------------------------------------------------- random workloads


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    num_jobs=st.integers(1, 30),
    arguments=SETTINGS,
    sizes=st.sampled_from([(1, 1), (1, 3), (2, 2), (2, 4), (4, 4)]),
    num_adapters=st.integers(1, 6),
)
def test_no_setting_changes_an_output_or_leaks(seed, num_jobs, arguments, sizes, num_adapters):
    max_loras, max_cpu_loras = sizes
    core = make_tight_core(
        **arguments, enable_lora=True, max_loras=max_loras, max_cpu_loras=max_cpu_loras
    )
    rng, jobs, used = random.Random(seed), [], {}
    for job in random_jobs(seed, num_jobs):
        i = rng.randrange(num_adapters + 1)
        adapter = lora(f"n{i}", i) if i else None
        request = msgspec.structs.replace(job.request, lora_request=adapter)
        used.update({child.request_id: adapter for child in split(request)})
        jobs.append(replace(job, request=request))
    answers = drive(core, jobs)
    for job in jobs:
        for request in split(job.request):
            answer, adapter = answers[request.request_id], used[request.request_id]
            tokens, reason, stop_reason = expected_output(
                request.prompt_token_ids,
                request.sampling_params,
                request.eos_token_ids,
                core.config,
                0 if adapter is None else adapter_digest(adapter.lora_path),
            )
            if answer.reason is FinishReason.ABORT:
                assert answer.tokens == tokens[: len(answer.tokens)]
            else:
                assert (answer.tokens, answer.reason) == (tokens, reason), request
    assert_nothing_left(core)
