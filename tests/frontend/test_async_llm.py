"""AsyncLLM over a scripted client: streams, cancellation, slow readers, death."""

from __future__ import annotations

import asyncio
import gc

import pytest
from quire import (
    AsyncLLM,
    EngineArgs,
    EngineDeadError,
    InvalidParameterError,
    RequestOutputKind,
    SamplingParams,
)
from quire.frontend.clients import connect
from quire.frontend.clients.inproc_client import InprocClient
from quire.tests.fakes import FakeExecutor, expected_output
from quire.tests.frontend.scripted_client import ScriptedClient
from quire.tests.frontend.tiny_tokenizers import text_config, tiny_tokenizer
from quire.tests.round_trip import RoundTripClient

TEXT = tiny_tokenizer().encode("the end of it all")
ENDLESS = SamplingParams(max_tokens=None, output_kind=RequestOutputKind.DELTA)
DELTA = SamplingParams(max_tokens=100, output_kind=RequestOutputKind.DELTA)


def with_llm(test, answer=lambda request: TEXT, **options):
    """Run an async function on an AsyncLLM, with a time limit, and check that no task is leaked."""

    async def run() -> None:
        config = text_config(max_model_len=10_000)
        llm = AsyncLLM(config, ScriptedClient(config, answer, **options))
        try:
            await asyncio.wait_for(test(llm), 60)
        finally:
            llm.shutdown()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


async def collect(
    llm: AsyncLLM, request_id: str, params: SamplingParams = DELTA, prompt="prompt", **options
) -> list:
    return [output async for output in llm.generate(prompt, params, request_id, **options)]


def test_many_requests_at_once() -> None:
    async def test(llm: AsyncLLM) -> None:
        results = await asyncio.gather(*(collect(llm, str(n), priority=n) for n in range(20)))
        for outputs in results:
            assert "".join(output.outputs[0].text for output in outputs) == "the end of it all"
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert len(outputs) == len(TEXT)
        assert [r.priority for r in llm.client.requests] == list(range(20))
        assert not llm.has_unfinished_requests() and llm.stats is not None
        [final] = await collect(
            llm, "final", SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
        )
        assert final.outputs[0].text == "the end of it all"
        cumulative = await collect(llm, "all", SamplingParams())
        assert cumulative[-1].outputs[0].text == "the end of it all" and cumulative[0].outputs[
            0
        ].text == tiny_tokenizer().decode(TEXT[:1])

    with_llm(test)


def test_stop_strings_end_the_stream_and_abort_the_engine() -> None:
    async def test(llm: AsyncLLM) -> None:
        outputs = await collect(
            llm, "a", SamplingParams(stop="end", output_kind=RequestOutputKind.DELTA)
        )
        assert "".join(output.outputs[0].text for output in outputs) == "the "
        assert outputs[-1].outputs[0].stop_reason == "end"
        assert llm.client.aborted == [llm.client.requests[0].request_id]

    with_llm(test)


def test_validation_errors_come_before_anything_is_sent() -> None:
    async def test(llm: AsyncLLM) -> None:
        for prompt, params in (("", DELTA), ("x", SamplingParams(n=2, temperature=0)), (5, DELTA)):
            with pytest.raises(InvalidParameterError):
                await collect(llm, "a", params, prompt)
        stream = llm.generate("x", ENDLESS, "a")
        await anext(stream)
        with pytest.raises(InvalidParameterError, match="request_id"):
            await collect(llm, "a")
        assert not (await anext(stream)).finished  # the running request with that id continues
        await stream.aclose()
        assert len(llm.client.requests) == 1

    with_llm(test, lambda request: [5] * 5000)


@pytest.mark.parametrize("how", ["cancel", "aclose", "break"])
def test_leaving_a_stream_aborts_the_request(how) -> None:
    async def test(llm: AsyncLLM) -> None:
        other = asyncio.create_task(collect(llm, "other"))
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in llm.generate("x", ENDLESS, "a"):
                begun.set()
                if how == "break":
                    return

        if how == "aclose":
            stream = llm.generate("x", ENDLESS, "a")
            await anext(stream)
            await stream.aclose()
        else:
            task = asyncio.create_task(read())
            await begun.wait()
            if how == "cancel":
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            gc.collect()
            while not llm.client.aborted:
                await asyncio.sleep(0.001)
        own = next(r.request_id for r in llm.client.requests if r.request_id.startswith("a-"))
        assert llm.client.aborted == [own] and llm._streams.keys() <= {"other"}
        assert (await other)[-1].finished

    with_llm(test, lambda request: TEXT if request.request_id.startswith("other") else [5] * 5000)


def test_abort_ends_the_stream_with_a_final_output() -> None:
    async def test(llm: AsyncLLM) -> None:
        streams = {request_id: llm.generate("x", ENDLESS, request_id) for request_id in "ab"}
        for stream in streams.values():
            await anext(stream)
        await llm.abort("a")
        await llm.abort(["b", "unknown"])
        for stream in streams.values():
            last = [output async for output in stream][-1]
            assert last.finished and last.outputs[0].finish_reason == "abort"
        assert llm.client.aborted == [r.request_id for r in llm.client.requests]

    with_llm(test, lambda request: [5] * 5000)


def test_the_metrics_of_a_request_are_available_before_its_first_output() -> None:
    async def test(llm: AsyncLLM) -> None:
        metrics = []
        outputs = [
            output
            async for output in llm.generate(
                "x", SamplingParams(max_tokens=3), "a", on_submitted=metrics.append
            )
        ]
        assert [output.metrics is metrics[0] for output in outputs] == [True] * len(outputs)
        left = asyncio.ensure_future(
            anext(llm.generate("x", ENDLESS, "silent", on_submitted=metrics.append))
        )
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert metrics[1].finished_time and metrics[1].num_generation_tokens == 0

    with_llm(test, lambda request: [] if request.request_id.startswith("silent") else TEXT)


def test_an_aborted_id_can_be_used_again_at_once() -> None:
    async def test(llm: AsyncLLM) -> None:
        first = llm.generate("x", ENDLESS, "a")
        await anext(first)
        await llm.abort("a")
        second = llm.generate("x", ENDLESS, "a")
        await anext(second)
        assert [output.finished async for output in first][-1]
        assert not (await anext(second)).finished
        await second.aclose()

    with_llm(test, lambda request: [5] * 5000)


def test_a_slow_reader_gets_merged_deltas_and_delays_no_other() -> None:
    async def test(llm: AsyncLLM) -> None:
        slow = llm.generate("x", DELTA, "slow")
        outputs = [await anext(slow)]
        await collect(llm, "quick")
        await asyncio.sleep(0.05)
        outputs += [output async for output in slow]
        assert len(outputs) == 2
        assert "".join(output.outputs[0].text for output in outputs) == "the end of it all"
        assert [t for output in outputs for t in output.outputs[0].token_ids] == TEXT

    with_llm(test)


def test_readers_run_between_steps() -> None:
    """No task is starved, even with a client that always has outputs ready."""

    async def test(llm: AsyncLLM) -> None:
        assert (
            len(
                await collect(
                    llm, "a", SamplingParams(max_tokens=50, output_kind=RequestOutputKind.DELTA)
                )
            )
            == 50
        )

    with_llm(test, lambda request: [5] * 5000)


def test_engine_death_reaches_every_reader_and_every_later_call() -> None:
    async def test(llm: AsyncLLM) -> None:
        results = await asyncio.gather(
            *(collect(llm, str(n), ENDLESS) for n in range(5)), return_exceptions=True
        )
        assert all(
            isinstance(result, EngineDeadError) and "scripted engine" in str(result)
            for result in results
        )
        assert len({id(result) for result in results}) == 5
        assert llm.errored and isinstance(llm.dead_error, EngineDeadError)
        for call in (collect(llm, "later"), llm.get_metrics()):
            with pytest.raises(EngineDeadError, match="scripted engine"):
                await call
        with pytest.raises(EngineDeadError):
            llm.check_health()
        assert not llm.has_unfinished_requests()
        await llm.abort("0")

    with_llm(test, lambda request: [5] * 5000, dies_after=5)


def test_outputs_before_the_death_are_read_first() -> None:
    async def test(llm: AsyncLLM) -> None:
        stream, read = llm.generate("x", ENDLESS, "a"), []
        read.append(await anext(stream))
        await asyncio.sleep(0.05)
        with pytest.raises(EngineDeadError):
            async for output in stream:
                read.append(output)
        assert [t for output in read for t in output.outputs[0].token_ids] == [5] * 4

    with_llm(test, lambda request: [5] * 5000, dies_after=4)


def test_the_engine_receives_the_requested_pace() -> None:
    async def test(llm: AsyncLLM) -> None:
        assert llm.max_outputs_per_s == 0 and llm.client.rows_per_s is None
        llm.set_max_outputs_per_s(2000)
        assert llm.max_outputs_per_s == llm.client.rows_per_s == 2000
        with pytest.raises(InvalidParameterError, match="max_outputs_per_s"):
            llm.set_max_outputs_per_s(-1)

    with_llm(test)


def test_a_bug_in_reading_outputs_is_reported() -> None:
    async def test(llm: AsyncLLM) -> None:
        def broken(outputs):
            raise ZeroDivisionError("a bug")

        llm.session.output_processor.process_outputs = broken
        with pytest.raises(EngineDeadError, match="ZeroDivisionError: a bug"):
            await collect(llm, "a")

    with_llm(test)


def test_shutdown_ends_readers() -> None:
    async def test(llm: AsyncLLM) -> None:
        task = asyncio.create_task(collect(llm, "a", ENDLESS))
        await asyncio.sleep(0.01)
        llm.shutdown()
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shutdown"):
            await task
        with pytest.raises(EngineDeadError):
            await collect(llm, "b")

    with_llm(test, lambda request: [5] * 9000)


def test_utilities_and_tokenizer() -> None:
    async def test(llm: AsyncLLM) -> None:
        assert (await llm.get_metrics())["called"] == "get_metrics"
        assert await llm.reset_prefix_cache() == {"called": "reset_prefix_cache"}
        assert await llm.call_utility("ping", 1) == {"called": "ping"} and llm.client.calls[-1] == (
            "ping",
            1,
        )
        assert await llm.get_tokenizer() is llm.tokenizer is not None
        assert llm.get_default_sampling_params() == SamplingParams()

    with_llm(test)


def test_from_engine_args_makes_an_asyncio_client(monkeypatch) -> None:
    config, made = text_config(), []

    async def start_client(config_, engine, on_progress):
        made.append((engine, ScriptedClient(config, lambda request: TEXT)))
        return made[0][1]

    monkeypatch.setattr(connect, "start_client", start_client)
    llm = AsyncLLM.from_engine_args(EngineArgs(), engine="ipc://daemon")
    assert made == [("ipc://daemon", llm.client)] and llm.config == config


@pytest.mark.parametrize("round_trip", [False, True])
def test_over_a_real_engine_core(round_trip) -> None:
    """Many streams, some of them abandoned, over an engine that steps in its own thread."""

    async def test() -> None:
        config = text_config()
        llm = AsyncLLM(
            config,
            (RoundTripClient if round_trip else InprocClient)(
                config, executor=FakeExecutor(config)
            ),
        )

        async def left(request_id: str) -> None:
            stream = llm.generate(
                [5, 6, 7], SamplingParams(max_tokens=None, ignore_eos=True), request_id
            )
            await anext(stream)
            await stream.aclose()

        params = SamplingParams(temperature=0, max_tokens=20, output_kind=RequestOutputKind.DELTA)
        kept = [collect(llm, f"kept-{n}", params, [n, n + 1]) for n in range(20)]
        results = await asyncio.gather(*kept, *(left(f"left-{n}") for n in range(5)))
        for n, outputs in enumerate(results[:20]):
            eos = [llm.tokenizer.eos_token_id]
            expected, reason, _ = expected_output([n, n + 1], params, eos, config)
            assert [t for output in outputs for t in output.outputs[0].token_ids] == expected
            assert outputs[-1].outputs[0].finish_reason == str(reason)
        assert not llm.has_unfinished_requests()
        metrics = await llm.get_metrics()
        assert metrics["num_running"] == metrics["num_waiting"] == 0
        await llm.call_utility("check_integrity")
        llm.shutdown()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_taken_output_is_not_queued_and_nothing_is_lost():
    async def test(llm):
        whole = "".join(output.outputs[0].text for output in await collect(llm, "plain"))
        for every in (1, 2, 3):  # the callback takes every n-th output
            seen: list[str] = []
            num_taken = num_offered = 0

            def take(output) -> bool:
                nonlocal num_taken, num_offered
                assert not output.finished and output.error is None
                num_offered += 1
                if num_offered % every:
                    return False
                num_taken += 1
                seen.append(output.outputs[0].text)
                return True

            async for output in llm.generate("prompt", DELTA, f"taken {every}", take_at_once=take):
                seen.append(output.outputs[0].text)
            assert "".join(seen) == whole and num_taken >= 1

    with_llm(test)


def test_an_error_of_the_callback_fails_only_its_reader():
    async def test(llm):
        def take(output) -> bool:
            raise ValueError("mine")

        neighbour = asyncio.ensure_future(collect(llm, "neighbour"))
        with pytest.raises(ValueError, match="mine"):
            await collect(llm, "faulty", take_at_once=take)
        assert (
            (await neighbour)[-1].finished and not llm.has_unfinished_requests() and not llm.errored
        )

    with_llm(test)


def test_a_panic_while_outputs_are_read_reaches_every_reader(monkeypatch) -> None:
    """A library in Rust panics with an exception that is no Exception; nobody waits for ever."""

    class PanicError(BaseException):
        pass

    def panic(outputs: object) -> None:
        raise PanicError("unwrap")

    async def test(llm: AsyncLLM) -> None:
        monkeypatch.setattr(llm.session, "take", panic)
        with pytest.raises(EngineDeadError, match="PanicError: unwrap"):
            await collect(llm, "one")
        assert llm.errored

    with_llm(test)
