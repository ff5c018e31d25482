"""enable_expert_parallel with data_parallel_size=2: two processes, each with half of the experts,
give the tokens of one engine with all of them; also with work on one engine alone, with aborts,
pauses and sleep, and when an engine is killed.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from quire import AsyncLLM, LLMEngine, SamplingParams
from quire.ipc.params import StructuredOutputsParams
from quire.tests.client_forms import closing, engine_args, make_engine
from quire.tests.fake_engine import is_gone
from quire.tests.quantized_checkpoints import write_quantized
from quire.tests.test_replicas import expected_of, said
from quire.tests.tiny_models import save_tiny_model

SETTINGS = dict(max_model_len=256, num_gpu_blocks_override=400, max_num_batched_tokens=64)
Wanted = dict[str, tuple[list[int], SamplingParams]]


class Engines:
    def __init__(self, model: Path, **settings) -> None:
        self.runner = asyncio.Runner()
        own = dict(data_parallel_size=2, enable_expert_parallel=True, engine_restarts=100)
        args = engine_args(model=str(model), **{**SETTINGS, **own, **settings})
        self.llm = self.runner.run(AsyncLLM.start(args))

    def run(self, coroutine):
        return self.runner.run(asyncio.wait_for(coroutine, 120))

    def pids(self) -> list[int]:
        return [one.client.engine_pid for one in self.llm.client._engine._replicas]

    def counts(self) -> list[tuple[int, int]]:
        """Of each engine: its tokens, and the passes in which it had nothing to compute."""
        client = self.llm.client
        metrics = self.run(client.call_each_async("get_metrics"))
        status = self.run(client.call_each_async("status"))
        return [
            (metrics[i]["num_generation_tokens"], status[i]["waves"]["joined_passes"])
            for i in range(2)
        ]

    def close(self) -> None:
        pids = self.pids()
        self.runner.run(self.llm.shutdown_async())
        self.runner.close()
        assert all(map(is_gone, pids))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe")


@pytest.fixture(scope="module")
def one_engine(model) -> Iterator[LLMEngine]:
    with closing(make_engine(model=str(model), **SETTINGS)) as engine:
        yield engine


@pytest.fixture(scope="module")
def engines(model) -> Iterator[Engines]:
    engines = Engines(model)
    yield engines
    engines.close()


def workload(seed: int, number: int, max_tokens: int = 30) -> Wanted:
    """Greedy and sampled, with log-probabilities, a penalty, completions, a grammar."""
    rng = random.Random(seed)
    kinds: list[dict] = [
        {"logprobs": 2},
        {"frequency_penalty": 0.5},
        {"n": 2, "temperature": 1.0},
        {"structured_outputs": StructuredOutputsParams(regex="[ab]{5,40}"), "ignore_eos": False},
    ]
    wanted = {}
    for i in range(number):
        settings = {"temperature": rng.choice([0.0, 0.9]), "ignore_eos": True} | rng.choice(kinds)
        prompt = [rng.randrange(5, 290) for _ in range(rng.randint(1, 90))]
        tokens = rng.randint(1, max_tokens)
        params = SamplingParams(seed=rng.randrange(99), max_tokens=tokens, **settings)
        wanted[f"{seed}-{i}"] = (prompt, params)
    return wanted


async def stream(llm: AsyncLLM, request_id: str, wanted: Wanted, delay_s: float = 0.0) -> list:
    await asyncio.sleep(delay_s)
    prompt, params = wanted[request_id]
    async for output in llm.generate({"prompt_token_ids": prompt}, params, request_id):
        pass
    assert output.error is None, output.error
    return said(output)


async def burst(llm: AsyncLLM, wanted: Wanted, rng: random.Random) -> dict[str, list]:
    """Some at once, others later, also when all are idle again."""
    delays = [rng.choice([0.0, 0.0, rng.random() * 0.2]) for _ in wanted]
    streams = [stream(llm, one, wanted, delay) for one, delay in zip(wanted, delays)]
    return dict(zip(wanted, await asyncio.gather(*streams)))


@pytest.mark.slow
def test_the_bits_of_one_engine_in_bursts(one_engine, engines) -> None:
    rng = random.Random(0)
    for seed in range(3):
        wanted = workload(seed, rng.randint(1, 12))
        assert engines.run(burst(engines.llm, wanted, rng)) == expected_of(one_engine, wanted)


@pytest.mark.slow
def test_drafts_and_requests_that_are_swapped_out(one_engine, model) -> None:
    """Each engine drafts for its own requests; a pass that verifies drafts is one of both."""
    drafts = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}
    few = dict(num_gpu_blocks_override=20, preemption_mode="swap", speculative_config=drafts)
    engines = Engines(model, **few)
    try:
        wanted = workload(70, 16, max_tokens=60)
        found = engines.run(burst(engines.llm, wanted, random.Random(5)))
        metrics = engines.run(engines.llm.client.call_each_async("get_metrics"))
    finally:
        engines.close()
    assert found == expected_of(one_engine, wanted)
    assert all(metrics[i]["num_draft_tokens"] for i in range(2))
    assert any(metrics[i]["num_blocks_swapped_in"] for i in range(2))


def test_an_engine_without_requests_takes_part(one_engine, engines) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, seed=0)
    wanted = {"alone": ([9, 8, 7], params)}
    before = engines.counts()
    assert engines.run(burst(engines.llm, wanted, random.Random(1))) == expected_of(
        one_engine, wanted
    )
    tokens, joined = zip(
        *((b[0] - a[0], b[1] - a[1]) for a, b in zip(before, engines.counts(), strict=True))
    )
    assert min(tokens) == 0 < max(tokens)
    idle = tokens.index(0)
    assert joined[idle] >= max(tokens) and joined[1 - idle] == 0


def test_each_engine_has_half_of_the_experts(one_engine, engines) -> None:
    [whole] = one_engine.collective_rpc("memory_usage")
    halves = engines.run(engines.llm.collective_rpc("memory_usage"))
    experts = 8 * 3 * 64 * 48 * 4  # of the only layer that has some: 8 of 3 matrices in float32
    assert [one["weights_bytes"] for one in halves] == [whole["weights_bytes"] - experts // 2] * 2


def test_aborts_pauses_and_sleep_between_passes(one_engine, engines) -> None:
    wanted = workload(60, 8, max_tokens=80)
    expected = expected_of(one_engine, wanted)
    llm = engines.llm

    async def disturbed() -> dict[str, list]:
        streams = asyncio.create_task(burst(llm, wanted, random.Random(2)))
        abandoned = workload(61, 3, max_tokens=100)
        others = [asyncio.create_task(stream(llm, one, abandoned)) for one in abandoned]
        for change in ("keep", "sleep", "weights"):
            await asyncio.sleep(0.1)
            if change == "keep":
                await llm.pause(mode="keep")
                assert await llm.is_paused()
                for other in others:
                    other.cancel()
                await llm.resume()
            elif change == "sleep":
                await llm.sleep(level=2)
                await llm.wake_up()
            else:
                await llm.load_weights(llm.config.model_config.model)
        said_by = await streams
        await asyncio.gather(*others, return_exceptions=True)
        return said_by

    assert engines.run(disturbed()) == expected
    engines.run(llm.pause(mode="wait"))
    engines.run(llm.resume())
    assert engines.run(llm.client.call_utility_async("check_integrity"))


async def stream_and_kill(engines: Engines, wanted: Wanted, victims: list[int]) -> dict:
    client = engines.llm.client
    streams = asyncio.create_task(burst(engines.llm, wanted, random.Random(3)))
    for victim in victims:
        while not all(client.engines_up()):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        pids = engines.pids()
        os.kill(pids[victim], signal.SIGKILL)
        while engines.pids() == pids:
            await asyncio.sleep(0.01)
        assert all(map(is_gone, pids))  # the others of the group, too
    return await streams


def test_an_ordinary_shutdown_logs_no_error(model, capfd) -> None:
    """The engine that leaves first breaks the pass of the other, which leaves too."""
    engines = Engines(model)
    params = SamplingParams(temperature=0.0, max_tokens=240, ignore_eos=True, seed=0)

    async def begin() -> None:
        async for _ in engines.llm.generate({"prompt_token_ids": [9, 8, 7]}, params, "long"):
            return

    engines.run(begin())
    engines.close()  # in the middle of passes
    said_by_engines = capfd.readouterr().err
    assert not re.findall(r".* ERROR .*|Traceback.*", said_by_engines), said_by_engines


@pytest.mark.slow
def test_streams_resume_when_an_engine_is_killed(one_engine, engines) -> None:
    wanted = workload(70, 6, max_tokens=160)
    before = engines.llm.client.restarts.num_resumed
    said_by = engines.run(stream_and_kill(engines, wanted, [1]))
    assert said_by == expected_of(one_engine, wanted)
    restarts = engines.llm.client.restarts
    assert restarts.num_resumed > before and restarts.num_quarantined == 0
    assert restarts.by_cause == {"SIGKILL": 1}


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(5))
def test_kills_at_random(one_engine, engines, seed: int) -> None:
    rng = random.Random(seed)
    wanted = workload(100 + seed, 16, max_tokens=160)
    victims = [rng.randrange(2) for _ in range(4)]
    said_by = engines.run(stream_and_kill(engines, wanted, victims))
    assert said_by == expected_of(one_engine, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)])
def test_engines_of_several_ranks(one_engine, model, sizes: tuple[int, int]) -> None:
    """With stages, the first one has no layer of experts."""
    parallel = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), sizes))
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, seed=0)
    wanted = {f"r{i}": ([9, 8, i], params) for i in range(5)}
    engines = Engines(model, **parallel)
    try:
        found = engines.run(burst(engines.llm, wanted, random.Random(1)))
        alone = {"alone": ([9, 8, 7], params)}
        assert engines.run(burst(engines.llm, alone, random.Random(1))) == expected_of(
            one_engine, alone
        )
    finally:
        engines.close()
    assert found == expected_of(one_engine, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mixtral", {"dtype": "bfloat16"}),
        ("qwen3_moe", {"quantization": "int8"}),
        ("qwen2_moe", {"dtype": "bfloat16", "quantization": "int4"}),
        ("gpt_oss", {"data_parallel_size": 5}),
        ("qwen3_moe", {"dtype": "bfloat16", "format": "awq"}),
    ],
)
def test_random_workloads(tmp_path, kind: str, settings: dict) -> None:
    """Few blocks, so that engines preempt requests, each at steps of its own."""
    children = psutil.Process().children()  # those of the module's engines
    is_awq = "format" in settings  # whose groups have 32 columns
    sizes = {"moe_intermediate_size": 64} if is_awq else {}
    model = save_tiny_model(tmp_path / "model", kind, **sizes)
    settings = settings | dict(num_gpu_blocks_override=40)
    if (format := settings.pop("format", None)) is not None:
        write_quantized(tmp_path / "quantized", model, format)
        model = tmp_path / "quantized"
    rng = random.Random(4)
    own = {name: value for name, value in settings.items() if name != "data_parallel_size"}
    with closing(make_engine(model=str(model), **{**SETTINGS, **own})) as one:
        engines = Engines(model, **settings)
        try:
            for seed in range(200, 220):
                wanted = workload(seed, rng.randint(1, 20))
                assert engines.run(burst(engines.llm, wanted, rng)) == expected_of(one, wanted)
        finally:
            engines.close()
    assert psutil.Process().children() == children
