"""AsyncLLM over an engine in a separate process with slow steps: aborts, drain, silence,
observation.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from quire import AsyncLLM, InvalidParameterError, RequestOutputKind, SamplingParams
from quire.frontend.clients.mp_client import MPClient
from quire.tests.fake_engine import COMMAND, stop
from quire.tests.frontend.tiny_tokenizers import text_config

STEP_S = 0.02
ABORT_STEP_S = 0.15
ENDLESS = SamplingParams(
    temperature=0, max_tokens=None, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)


def with_llm(test, step_s: float = STEP_S, **settings) -> None:
    async def run() -> None:
        settings.setdefault("max_model_len", 4096)
        config = text_config(hf_overrides={"delay_s": step_s}, **settings)
        llm = AsyncLLM(config, await MPClient.start(config, command=COMMAND))
        try:
            await asyncio.wait_for(test(llm), 60)
        finally:
            await llm.shutdown_async()

    asyncio.run(run())


async def read(
    llm: AsyncLLM, request_id: str, params: SamplingParams = ENDLESS, prompt=(5, 6, 7)
) -> list:
    return [output async for output in llm.generate(list(prompt), params, request_id)]


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["aclose", "cancel", "abort"])
@pytest.mark.parametrize(
    "settings", [{}, {"async_scheduling": True}, {"num_scheduler_steps": 4}], ids=str
)
def test_an_abandoned_request_is_aborted_within_two_steps(how, settings):
    """One step runs at that moment, and at most one more is scheduled with the request. Both
    processes read the same clock. The engine is stopped until the abort is on its way, since this
    process may have to wait for a processor.
    """

    async def test(llm: AsyncLLM) -> None:
        stream = llm.generate([5, 6, 7], ENDLESS, "left")
        await anext(stream)
        reader = asyncio.create_task(collect(stream))
        await asyncio.sleep(3 * ABORT_STEP_S)
        stop(llm.client.engine_pid)
        if how == "abort":
            await llm.abort("left")
        else:
            reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        left_at = time.monotonic()
        os.kill(llm.client.engine_pid, signal.SIGCONT)
        while (await llm.observe())["requests"]:
            pass
        await asyncio.sleep(5 * ABORT_STEP_S)  # everything in flight has run
        steps = (await llm.observe())["steps"]
        assert len(steps) >= 2 and sum(start_time > left_at for _, start_time, *_ in steps) <= 1

    async def collect(stream) -> None:
        if how == "aclose":
            try:
                await asyncio.sleep(100)
            finally:
                await stream.aclose()
        async for _ in stream:
            pass

    with_llm(test, ABORT_STEP_S, **settings)


def test_drain_waits_for_every_stream():
    async def test(llm: AsyncLLM) -> None:
        assert await llm.wait_until_idle(0) and await llm.wait_until_idle()
        short = SamplingParams(max_tokens=3, ignore_eos=True)
        tasks = [asyncio.create_task(read(llm, f"short-{i}", short)) for i in range(5)]
        await asyncio.sleep(0)
        assert await llm.wait_until_idle(0) is False
        assert await llm.wait_until_idle(20) and all(await asyncio.gather(*tasks))
        endless = asyncio.create_task(read(llm, "endless"))
        assert await llm.wait_until_idle()  # it has not started
        await asyncio.sleep(0)
        assert await llm.wait_until_idle(2 * STEP_S) is False
        await llm.abort("endless")
        assert (
            await llm.wait_until_idle(20)
            and (await endless)[-1].outputs[0].finish_reason == "abort"
        )
        unread = llm.generate([5], SamplingParams(max_tokens=2, ignore_eos=True), "unread")
        await anext(unread)
        assert await llm.wait_until_idle(5 * STEP_S) is False and not llm.has_unfinished_requests()
        await unread.aclose()
        assert await llm.wait_until_idle(0)

    with_llm(test)


def test_a_refused_request_leaves_it_idle():
    async def test(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidParameterError):
            await read(llm, "a", prompt=())
        llm.client.shutdown()
        with pytest.raises(RuntimeError):
            await read(llm, "b")
        assert await llm.wait_until_idle(0)

    with_llm(test)


def test_responsiveness():
    async def test(llm: AsyncLLM) -> None:
        assert await llm.is_responsive(10)
        stream = llm.generate([5, 6, 7], ENDLESS, "a")
        await anext(stream)
        pid = llm.client.engine_pid
        stop(pid)  # an engine that hangs
        while await llm.is_responsive(0.1):  # outputs are still on their way
            await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGCONT)
        assert await llm.is_responsive(10)
        await llm.pause("keep")
        await asyncio.sleep(2.1)  # longer than the time limit since the last output
        assert await llm.is_responsive(2.0)
        await llm.resume()
        await stream.aclose()
        await llm.shutdown_async()
        assert await llm.is_responsive(10) is False

    with_llm(test)


def test_the_life_of_a_request():
    """Chunks, preemptions and times of tokens, all on the engine's clock and in order."""

    async def test(llm: AsyncLLM) -> None:
        llm.set_record_token_times(True)
        params = SamplingParams(n=2, seed=1, max_tokens=120, ignore_eos=True)
        [first, second] = await asyncio.gather(
            read(llm, "a", params, [5] * 60), read(llm, "b", params, [6] * 60)
        )
        for metrics in (first[-1].metrics, second[-1].metrics):
            assert len(metrics.token_ts) == metrics.num_generation_tokens == 240
            assert (
                metrics.token_ts == sorted(metrics.token_ts)
                and metrics.token_ts[0] == metrics.first_token_ts
            )
            starts = [start for _, start, _, _ in metrics.prefill_chunks]
            assert starts == sorted(starts) and metrics.prefill_chunks[0][1] >= metrics.scheduled_ts
            # The second completion computes the last token of the prompt. A preempted request also
            # recomputes its newest token.
            least = 60 + 1 + metrics.num_recomputed_tokens
            assert (
                least
                <= sum(num_tokens for *_, num_tokens in metrics.prefill_chunks)
                <= least + metrics.num_preemptions
            )
        assert first[-1].metrics.num_preemptions + second[-1].metrics.num_preemptions > 0
        observed = await llm.observe()
        known = {record[0] for record in observed["steps"]}
        assert {chunk[0] for chunk in first[-1].metrics.prefill_chunks} <= known
        assert (
            observed["counters"]["num_inputs_refused"] == 0
            and observed["counters"]["num_preemptions"] > 0
        )

    with_llm(
        test,
        0.0,
        max_model_len=256,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=20,
        enable_prefix_caching=False,
        preemption_mode="recompute",
    )


def test_names_of_vllm_pause_and_profile():
    async def test(llm: AsyncLLM) -> None:
        assert llm.engine_core is llm.client
        assert llm.output_processor is llm.session.output_processor
        running = asyncio.ensure_future(read(llm, "a"))
        while not (await llm.scheduler_state())["running"]:
            await asyncio.sleep(0.01)
        await llm.pause_generation(mode="keep")
        assert await llm.is_paused() and not running.done()
        await llm.resume_generation()
        assert not await llm.is_paused()
        await llm.pause_generation()  # aborts
        assert (await running)[-1].outputs[0].finish_reason == "abort"
        await llm.resume_generation()
        few = SamplingParams(max_tokens=30, ignore_eos=True)
        stream = llm.generate([5, 6, 7], few, "b")
        await anext(stream)  # it runs
        await llm.pause_generation(wait_for_inflight_requests=True)
        assert [output async for output in stream][-1].outputs[0].finish_reason == "length"
        await llm.resume_generation()
        with pytest.raises(InvalidParameterError, match="mode"):
            await llm.pause_generation(mode="later")
        with pytest.raises(InvalidParameterError, match="start_profile first"):
            await llm.stop_profile()
        await llm.do_log_stats()

    with_llm(test)
