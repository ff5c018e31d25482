"""Timings of a request: when it was queued, started and got its tokens, and how often it was
preempted. The client receives them however the request ends.
"""

from concurrent.futures import Future

import pytest
from quire.core import arrivals, engine_core, observation, output_rows
from quire.core import request as request_module
from quire.core.scheduling import state
from quire.core.scheduling import step as step_module
from quire.ipc.messages import EngineCoreRequest, FinishReason, RequestTiming
from quire.ipc.params import SamplingParams, StructuredOutputsParams
from quire.tests.core.engine_loop import make_core, step


class Clock:
    """time.monotonic for the whole core. It advances by a second when the test says so."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (
        output_rows,
        request_module,
        state,
        step_module,
        engine_core,
        arrivals,
        observation,
    ):
        monkeypatch.setattr(module, "time", clock)
    return clock


def make_request(request_id="r", max_tokens=3, prompt=(1, 2, 3), **fields) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id,
        list(prompt),
        SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens),
        **fields,
    )


def tick(core, clock) -> dict[str, RequestTiming]:
    """Run one step, a second after the last. Return its timings by request."""
    clock.now += 1.0
    outputs = step(core).get(0)
    return (
        {outputs.request_ids[timing.row]: timing for timing in outputs.timings} if outputs else {}
    )


def test_the_first_token_and_the_last_row_carry_the_times(clock):
    core = make_core()
    core.add_request(make_request())
    chunks = [(0, 101.0, 101.0, 3)]
    assert tick(core, clock) == {
        "r": RequestTiming(0, 100.0, 101.0, 101.0, 101.0, prefill_chunks=chunks)
    }
    assert tick(core, clock) == {}
    assert tick(core, clock) == {
        "r": RequestTiming(0, 100.0, 101.0, 101.0, 103.0, prefill_chunks=chunks)
    }


def test_a_single_token_is_reported_once(clock):
    core = make_core()
    core.add_request(make_request(max_tokens=1))
    clock.now += 5.0
    outputs = step(core)[0]
    assert (
        outputs.timings
        == [RequestTiming(0, 100.0, 105.0, 105.0, 105.0, prefill_chunks=[(0, 105.0, 105.0, 3)])]
        and outputs.timestamp == 105.0
    )


def test_a_request_that_never_ran_has_no_later_times(clock):
    core = make_core(max_num_seqs=1)
    core.add_request(make_request("runs"))
    core.add_request(make_request("waits"))
    tick(core, clock)
    clock.now += 1.0
    core.abort_requests(["waits"])
    assert tick(core, clock)["waits"] == RequestTiming(0, 100.0)


def test_an_aborted_and_a_failed_request_have_an_end_time(clock):
    core = make_core()
    core.executor.errors["bad", 1] = "scripted"
    core.add_request(make_request("bad"))
    core.add_request(make_request("gone", max_tokens=50))
    tick(core, clock)
    chunks = [(0, 101.0, 101.0, 3)]
    assert tick(core, clock)["bad"] == RequestTiming(
        0, 100.0, 101.0, 101.0, 102.0, prefill_chunks=chunks
    )
    clock.now += 7.0
    core.abort_requests(["gone"])
    clock.now += 1.0
    assert tick(core, clock)["gone"] == RequestTiming(
        0, 100.0, 101.0, 101.0, 109.0, prefill_chunks=chunks
    )


def test_preemptions_are_reported_when_the_request_is_back(clock):
    core = make_core()
    core.add_request(make_request(max_tokens=6, prompt=range(1, 41)))
    tick(core, clock)
    tick(core, clock)
    core.scheduler.preempt_all()
    core.scheduler.preempt_all()  # no request runs
    first = tick(core, clock)["r"]
    # 40 prompt tokens and one output token were computed. The first two blocks are found in the
    # cache again.
    assert (first.num_preemptions, first.num_recomputed_tokens, first.preemption_times) == (
        1,
        9,
        [102.0],
    )
    assert first.first_token_time == 101.0 and first.last_token_time == 103.0
    core.scheduler.preempt_all()
    tick(core, clock)
    assert tick(core, clock) == {}
    last = tick(core, clock)["r"]
    assert (last.num_preemptions, last.preemption_times) == (2, [102.0, 103.0])
    assert core.observer.get_metrics()["num_recomputed_tokens"] == last.num_recomputed_tokens


def test_preemption_times_are_bounded(clock):
    core = make_core()
    core.add_request(make_request(max_tokens=100))
    for _ in range(100):
        timings = tick(core, clock)
        core.scheduler.preempt_all()
    assert (
        timings["r"].num_preemptions == 99
        and len(timings["r"].preemption_times) == request_module.MAX_PREEMPTION_TIMES
    )


def test_resumed_tokens_are_not_first_tokens(clock):
    core = make_core()
    core.add_request(make_request(max_tokens=4, resume_tokens=[5, 6]))
    assert tick(core, clock)["r"].first_token_time == 101.0


@pytest.mark.parametrize(
    "reason", [FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR]
)
def test_finished_requests_are_counted_by_reason(reason):
    core = make_core()
    core.executor.tokens["r", 0] = 7
    if reason is FinishReason.ERROR:
        core.executor.nan_rows.add(("r", 0))
    core.add_request(
        make_request(max_tokens=1, eos_token_ids=[7] if reason is FinishReason.STOP else [])
    )
    if reason is FinishReason.ABORT:
        core.abort_requests(["r"])
    step(core)
    ends = {
        name: value
        for name, value in core.observer.get_metrics().items()
        if name.startswith("num_finished_") and value
    }
    assert ends == {f"num_finished_{reason}": 1}


def test_refused_and_orphaned_requests_are_counted():
    core = make_core()
    core.add_request(make_request("empty", prompt=()))
    core.add_request(make_request("a"), client_index=5)
    core.add_request(make_request("b"), client_index=5)
    step(core)
    core.drop_client(5)
    metrics = core.observer.get_metrics()
    assert (
        metrics["num_requests_refused"],
        metrics["num_requests_orphaned"],
        metrics["num_finished_abort"],
    ) == (1, 2, 2)


def test_the_grammar_check_counts_as_queue_time(clock):
    core = make_core()
    check = core.executor.grammar_checks["slow"] = Future()
    params = SamplingParams(
        temperature=0.0,
        seed=0,
        max_tokens=3,
        structured_outputs=StructuredOutputsParams(regex="slow"),
    )
    core.add_request(EngineCoreRequest("r", [1, 2, 3], params, eos_token_ids=[96]))
    clock.now += 4.0
    check.set_result(None)
    assert tick(core, clock)["r"] == RequestTiming(
        0, 100.0, 105.0, 105.0, 105.0, prefill_chunks=[(0, 105.0, 105.0, 3)]
    )


# ---------------------------------------------------------------- prefill chunks


def last_timing(core, clock, request_id: str = "r") -> RequestTiming:
    timing = None
    while core.has_work():
        timing = tick(core, clock).get(request_id, timing)
    return timing


@pytest.mark.parametrize(
    "arguments", [{}, {"async_scheduling": True}, {"num_scheduler_steps": 3}], ids=str
)
def test_each_chunk_of_a_prompt_is_reported(clock, arguments):
    core = make_core(max_num_batched_tokens=16, **arguments)
    core.add_request(make_request(prompt=range(40)))
    chunks = last_timing(core, clock).prefill_chunks
    assert [(step, num_tokens) for step, _, _, num_tokens in chunks] == [(0, 16), (1, 16), (2, 8)]
    moments = [moment for _, start, end, _ in chunks for moment in (start, end)]
    assert moments == sorted(moments) and moments[0] >= 101.0


def test_cached_tokens_are_not_a_chunk(clock):
    core = make_core()
    core.add_request(make_request("first", prompt=range(40)))
    last_timing(core, clock, "first")
    core.add_request(make_request(prompt=range(40)))
    assert [num_tokens for *_, num_tokens in last_timing(core, clock).prefill_chunks] == [8]


def test_recomputation_is_a_chunk(clock):
    core = make_core(enable_prefix_caching=False)
    core.add_request(make_request(max_tokens=6, prompt=range(40)))
    tick(core, clock)
    tick(core, clock)
    core.scheduler.preempt_all()
    assert [num_tokens for *_, num_tokens in last_timing(core, clock).prefill_chunks] == [40, 42]


def test_recomputation_of_output_alone_is_a_chunk(clock):
    core = make_core()
    core.add_request(make_request(max_tokens=40, prompt=range(32)))
    for _ in range(20):
        tick(core, clock)
    core.scheduler.preempt_all()  # 52 tokens, of which 48 are cache hits
    assert [num_tokens for *_, num_tokens in last_timing(core, clock).prefill_chunks] == [32, 4]


def test_tokens_restored_from_host_memory_are_not_a_chunk(clock):
    core = make_core(
        num_gpu_blocks_override=17, preemption_mode="swap", enable_prefix_caching=False
    )
    core.add_request(make_request("first", max_tokens=100, prompt=[5] * 100))
    core.add_request(make_request(max_tokens=100, prompt=range(20)))
    timing = last_timing(core, clock)
    assert timing.num_preemptions > 0 and [
        num_tokens for *_, num_tokens in timing.prefill_chunks
    ] == [20]


def test_siblings_report_their_own_chunks(clock):
    core = make_core()
    core.add_request(
        EngineCoreRequest(
            "r", list(range(40)), SamplingParams(n=2, temperature=1.0, seed=0, max_tokens=3)
        )
    )
    chunks = {}
    while core.has_work():
        chunks |= {
            request_id: timing.prefill_chunks for request_id, timing in tick(core, clock).items()
        }
    assert {
        request_id: [num_tokens for *_, num_tokens in received]
        for request_id, received in chunks.items()
    } == {"0_r": [40], "1_r": [1]}


def test_chunks_are_bounded(clock, monkeypatch):
    monkeypatch.setattr(request_module, "MAX_PREFILL_CHUNKS", 5)
    core = make_core(max_num_batched_tokens=2)
    core.add_request(make_request(prompt=range(40)))
    assert len(last_timing(core, clock).prefill_chunks) == 5
