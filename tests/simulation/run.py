"""One simulated run: programs with requests, engines that die, and what must hold at the end.

`python -P -m quire.tests.simulation.run SEED` repeats a run and prints its events.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import msgspec
from quire import AsyncLLM, LLMEngine, RequestOutput, SamplingParams
from quire.frontend.clients.blocking_client import BlockingClient
from quire.frontend.requests import image_inputs, input_processor
from quire.frontend.requests.prompts import IMAGES, PreparedImages, Prompt
from quire.frontend.supervision.resubmission import NUM_ALONE_IF_KILLED, NUM_DEATHS
from quire.frontend.supervision.supervised_client import SupervisedClient
from quire.ipc.config import EngineConfig, MultiModalConfig
from quire.ipc.errors import EngineRestartedError, InvalidParameterError
from quire.ipc.lora import LoRARequest
from quire.ipc.messages import EngineCoreRequest, ImageItem
from quire.ipc.params import RequestOutputKind, child_seed
from quire.tests.core.engine_loop import assert_nothing_left
from quire.tests.fake_encoder import VISION, WHOLE, read_prompt, with_images
from quire.tests.fake_loras import adapter_digest
from quire.tests.fakes import expected_output, make_config
from quire.tests.simulation.engine import (
    POISON,
    Daemon,
    SimulatedClient,
    SimulatedEngine,
    SimulatedLoop,
    SimulatedSuccessors,
)
from quire.tests.simulation.world import World

CALLS = ("ping", "scheduler_state", "get_metrics", "reset_prefix_cache", "pace")
CALLS_OF_LORAS = ("add_lora", "remove_lora", "list_loras")
NUM_LORAS = 5
MISSING = LoRARequest("missing", 99, "/missing")
MOST_WITH_IMAGES = 180  # tokens of a prompt


@dataclass
class Job:
    name: str
    prompt: list[int]
    params: SamplingParams
    starts_s: float
    aborts_after: int | None  # so many tokens
    core_request: EngineCoreRequest | None = None
    num_ends: int = 0
    error: str | None = None
    lora: LoRARequest | None = None
    images: list[ImageItem] = field(default_factory=list)

    @property
    def is_poison(self) -> bool:
        return POISON in self.prompt

    @property
    def asked(self) -> Prompt:
        """The prompt as a program gives it."""
        if not self.images:
            return self.prompt
        return {"prompt_token_ids": self.prompt, IMAGES: PreparedImages(self.images)}


def random_lora(rng: random.Random, **fields: Any) -> LoRARequest:
    number = rng.randint(1, NUM_LORAS)
    return LoRARequest(f"lora-{number}", number, f"/adapters/{number}", **fields)


def random_call(rng: random.Random, config: EngineConfig) -> tuple[Any, ...]:
    """A utility of CALLS or CALLS_OF_LORAS, and its arguments."""
    if not config.lora_config.enable_lora or rng.random() < 0.3:
        return (rng.choice(CALLS[:-1]),)
    method = rng.choice(CALLS_OF_LORAS)
    if method == "add_lora":
        is_bad = rng.random() < 0.1
        return method, MISSING if is_bad else random_lora(rng, load_inplace=rng.random() < 0.3)
    return (method, rng.randint(1, NUM_LORAS)) if method == "remove_lora" else (method,)


def random_jobs(rng: random.Random, prefix: str, has_poison: bool) -> list[Job]:
    jobs: list[Job] = []
    for i in range(rng.choice([1, 3, 6, 10])):
        prompt = [rng.randrange(POISON) for _ in range(rng.choice([1, 5, 30, 120]))]
        if jobs and rng.random() < 0.3:
            prompt = (jobs[-1].prompt + prompt)[:180]
        max_tokens = rng.choice([1, 10, 40, 70])
        n = rng.choice([1, 1, 1, 2])
        params = SamplingParams(
            n=n,
            temperature=rng.choice([0.0, 1.0]) if n == 1 else 1.0,
            seed=rng.choice([None, rng.randrange(2**40)]),
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, max_tokens // 2]),
            ignore_eos=True,
            stop_token_ids=rng.sample(range(97), 3) if rng.random() < 0.3 else None,
            logprobs=rng.choice([None, None, 2]),
            output_kind=rng.choice(list(RequestOutputKind)),
            stream_interval=rng.choice([1, 1, 5]),
        )
        starts_s = rng.choice([0.0, rng.uniform(0, 3)])
        aborts_after = rng.randrange(30) if rng.random() < 0.15 else None
        jobs.append(Job(f"{prefix}{i}", prompt, params, starts_s, aborts_after))
    if has_poison:
        jobs[-1].prompt = [POISON, *jobs[-1].prompt]
        jobs[-1].aborts_after = None
    return jobs


class Result:
    """What a program has received for one job, from outputs of any kind."""

    def __init__(self, job: Job):
        self.job = job
        self.tokens: list[list[int]] = [[] for _ in range(job.params.n)]
        self.num_logprobs = [0] * job.params.n
        self.reasons: list[str | None] = [None] * job.params.n

    def take(self, output: RequestOutput) -> None:
        is_delta = self.job.params.output_kind == RequestOutputKind.DELTA
        for completion in output.outputs:
            i, known = completion.index, self.tokens[completion.index]
            assert not (is_delta and self.reasons[i] and completion.token_ids), "a row after an end"
            if is_delta:
                known += completion.token_ids
            else:
                assert completion.token_ids[: len(known)] == known, "tokens changed"
                known[:] = completion.token_ids
            num_logprobs = len(completion.logprobs or ())
            self.num_logprobs[i] = num_logprobs + (self.num_logprobs[i] if is_delta else 0)
            self.reasons[i] = completion.finish_reason or self.reasons[i]
        if output.finished:
            self.job.num_ends += 1
            self.job.error = output.error

    def check(self, config: EngineConfig) -> None:
        job, request = self.job, self.job.core_request
        assert request is not None
        params = request.sampling_params
        for i in range(params.n):
            seed = child_seed(params.seed, i) if params.n > 1 else params.seed
            own = SamplingParams(
                temperature=params.temperature,
                seed=seed,
                max_tokens=params.max_tokens,
                min_tokens=params.min_tokens,
                stop_token_ids=params.stop_token_ids,
            )
            weights = adapter_digest(job.lora.lora_path) if job.lora else 0
            tokens, reason, _ = expected_output(read_prompt(request), own, [], config, weights)
            if self.reasons[i] in ("abort", "error"):
                assert self.tokens[i] == tokens[: len(self.tokens[i])], (job.name, i)
            else:
                assert (self.tokens[i], self.reasons[i]) == (tokens, str(reason)), (job.name, i)
            if params.logprobs is not None:
                assert self.num_logprobs[i] == len(self.tokens[i]), (job.name, i)


class Program:
    """A session with a supervised client, and what it does."""

    def __init__(self, world: World, name: str, config: EngineConfig, daemon: Daemon | None):
        self.world, self.name, self.config, self.rng = world, name, config, world.rng
        self.is_blocking = daemon is None and self.rng.random() < 0.4
        has_poison = "poison_after" in config.model_config.hf_overrides and name == "a"
        self.jobs = random_jobs(self.rng, name, has_poison)
        if (vision := config.model_config.vision) is not None:
            for job in self.jobs:
                most, may_split = MOST_WITH_IMAGES, not vision.sees_whole_images
                job.prompt, job.images = with_images(job.prompt, most, may_split)
        if config.lora_config.enable_lora:
            for job in self.jobs:
                job.lora = self.rng.choice([None, *(random_lora(self.rng) for _ in range(9))])
            if self.rng.random() < 0.1:
                self.jobs[0].lora = MISSING
        engine = SimulatedEngine(world, config, 0) if daemon is None else daemon.engine
        first = SimulatedClient(world, engine, shared=daemon is not None)
        self.client = SupervisedClient(
            first,
            config,
            successors=partial(SimulatedSuccessors, world, daemon),
            clock=world.monotonic,
        )
        self._record_requests()
        self.results = {job.name: Result(job) for job in self.jobs}

    def _record_requests(self) -> None:
        """Notes what the session sends: its seed is drawn there."""
        add, jobs = self.client.add_request, {job.name: job for job in self.jobs}

        def add_request(request: EngineCoreRequest) -> None:
            jobs[request.request_id.rsplit("-", 1)[0]].core_request = request
            add(request)

        self.client.add_request = add_request

    # ------------------------------------------------------------ asyncio

    async def run(self) -> None:
        llm = AsyncLLM(self.config, self.client)
        self.session = llm.session
        calls = [asyncio.create_task(self._call(llm)) for _ in range(self.rng.randint(0, 3))]
        await asyncio.gather(*(self._stream(llm, job) for job in self.jobs), *calls)
        state = await self._insist(llm, "scheduler_state")
        if not self.client.is_shared:
            assert state["requests"] == [] and state["waiting_for_grammar"] == [], state
        assert await self._insist(llm, "check_integrity") is True
        self._check()
        if self.client.is_shared:
            await self.client.shutdown_async()
        else:
            assert_nothing_left(self.client._engine._engine.core)

    async def _stream(self, llm: AsyncLLM, job: Job) -> None:
        await asyncio.sleep(job.starts_s)
        self.world.log(f"{job.name} begins")
        result = self.results[job.name]
        stream = llm.generate(job.asked, job.params, job.name, lora_request=job.lora)
        async with aclosing(stream) as outputs:
            async for output in outputs:
                result.take(output)
                is_over = job.aborts_after is not None and len(result.tokens[0]) > job.aborts_after
                if is_over and not output.finished:
                    job.num_ends += 1
                    result.reasons = [reason or "abort" for reason in result.reasons]
                    break
        self.world.log(f"{job.name} ends: {result.reasons} {result.tokens}")

    async def _call(self, llm: AsyncLLM) -> None:
        await asyncio.sleep(self.rng.uniform(0, 3))
        method = self.rng.choice([*CALLS, "pause"])
        if self.config.lora_config.enable_lora and self.rng.random() < 0.7:
            await self._insist(llm, *random_call(self.rng, self.config))
        elif method == "pace":
            llm.set_max_outputs_per_s(self.rng.choice([0, 10, 1000]))
        elif method == "pause":
            await self._insist(llm, "pause", "keep")
            await asyncio.sleep(self.rng.uniform(0, 1))
            await self._insist(llm, "resume")
        else:
            await self._insist(llm, method)

    async def _insist(self, llm: AsyncLLM, method: str, *args: Any) -> Any:
        """Calls it again where two engines died during the call, which then raises an error."""
        while True:
            with suppress(EngineRestartedError), suppress_missing():
                return await llm.call_utility(method, *args)
            if MISSING in args:
                return None

    # ------------------------------------------------------------ blocking

    def run_blocking(self) -> None:
        llm = LLMEngine(self.config, BlockingClient(self.client, SimulatedLoop(self.world)))
        self.session = llm.session
        waiting = sorted(self.jobs, key=lambda job: job.starts_s)
        while waiting or llm.has_unfinished_requests():
            if waiting and (self.rng.random() < 0.2 or not llm.has_unfinished_requests()):
                job = waiting.pop(0)
                llm.add_request(job.name, job.asked, job.params, lora_request=job.lora)
            if self.rng.random() < 0.02:
                with suppress(EngineRestartedError), suppress_missing():
                    llm.call_utility(*random_call(self.rng, self.config))
            self._take(llm.step())
            for job in self.jobs:
                num_tokens = len(self.results[job.name].tokens[0])
                if job.aborts_after is not None and num_tokens > job.aborts_after:
                    self._take(llm.abort_request(job.name))
        for _ in range(self.world.num_kills + 1):
            with suppress(EngineRestartedError):
                assert llm.call_utility("check_integrity") is True
        self._check()
        assert_nothing_left(self.client._engine._engine.core)

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.results[output.request_id].take(output)

    # ------------------------------------------------------------ what must hold

    def _check(self) -> None:
        assert not self.session.has_unfinished_requests()
        client = self.client
        assert not client._resubmission.is_active
        assert not client._awaiting_output, client._awaiting_output
        for job in self.jobs:
            assert job.num_ends == 1, f"{job.name} ended {job.num_ends} times"
            self.results[job.name].check(self.config)
            if job.lora is MISSING:
                is_ended = job.error or self.results[job.name].reasons[0] == "abort"
                assert is_ended, f"{job.name} has no adapter"
                continue
            if job.error is not None:
                assert "the engine died" in job.error, job.error
                assert job.is_poison or self._may_be_cause(job), f"{job.name} did nothing"

    def _may_be_cause(self, job: Job) -> bool:
        """Whether one of its completions was sent to so many engines that died that it looks like
        the cause.
        """
        assert job.core_request is not None
        request_id = job.core_request.request_id
        present = [
            death
            for death in self.world.deaths
            if any(one.endswith(request_id) for one in death.request_ids)
        ]
        is_killed = all(death.number == signal.SIGKILL for death in self.world.deaths)
        return len(present) >= (NUM_ALONE_IF_KILLED if is_killed else NUM_DEATHS)


@dataclass
class Outcome:
    digest: str
    num_deaths: int
    num_requests: int
    num_quarantined: int
    num_innocent: int


def random_limits(rng: random.Random, seed: int) -> dict[str, Any]:
    """Every third seed has adapters; others draw as if there were none."""
    if seed % 3 != 2:
        return {}
    max_loras = rng.choice([1, 2, 3])
    max_cpu_loras = max_loras + rng.choice([0, 0, 1, NUM_LORAS])
    return dict(enable_lora=True, max_loras=max_loras, max_cpu_loras=max_cpu_loras)


def with_vision(config: EngineConfig, seed: int) -> EngineConfig:
    """In every fifth seed the model reads images, some of which wait for room or for their turn."""
    if seed % 5 != 3:
        return config
    # tokens of an image do not see each other where the model keeps states
    has_states = "num_state_checkpoints" in config.model_config.hf_overrides
    vision = VISION if has_states or seed % 2 else WHOLE
    limits = MultiModalConfig(
        encoder_cache_tokens=(12, 30, 1000)[seed % 3], max_encoder_tokens=(1, 9, 100)[seed % 7 % 3]
    )
    model_config = msgspec.structs.replace(config.model_config, vision=vision)
    return msgspec.structs.replace(config, model_config=model_config, multimodal_config=limits)


@contextmanager
def suppress_missing() -> Iterator[None]:
    """Of add_lora for MISSING."""
    try:
        yield
    except InvalidParameterError as error:
        assert "/missing is not there" in str(error)


def simulate(seed: int, *, is_printing: bool = False) -> Outcome:
    world = World(seed, is_printing=is_printing)
    rng = world.rng
    is_daemon = rng.random() < 0.3
    overrides = {"poison_after": rng.choice([1, 2, 20])} if rng.random() < 0.25 else {}
    if seed % 4 == 1:  # the model keeps states
        overrides["num_state_checkpoints"] = 1 + seed % 9
    config = make_config(
        hf_overrides=overrides,
        state_checkpoint_interval=32,
        engine_restarts=1000,
        seed=rng.randrange(1000),
        max_num_seqs=rng.choice([2, 8]),
        num_gpu_blocks_override=rng.choice([40, 257]),
        max_num_batched_tokens=rng.choice([32, 2048]),
        async_scheduling=rng.random() < 0.3,
        # GiB, of which each MiB is a block
        kv_offloading_size=0.03 if seed % 8 in (1, 2) else None,
        num_scheduler_steps=rng.choice([0, 0, 4]),
        preemption_mode=rng.choice(["recompute", "swap"]),
        swap_space=0.2,
        disable_log_stats=True,
        **random_limits(rng, seed),
    )
    config = with_vision(config, seed)
    ids = mock.Mock(secrets, token_hex=lambda size: f"{rng.getrandbits(64):016x}")
    with (
        mock.patch.object(time, "monotonic", world.monotonic),
        mock.patch.object(input_processor, "secrets", ids),
        mock.patch.object(image_inputs, "_own_preparer"),  # the images are prepared
    ):
        daemon = Daemon(world, config) if is_daemon else None
        number = rng.randint(1, 3) if is_daemon else 1
        programs = [Program(world, "abc"[i], config, daemon) for i in range(number)]
        try:
            if programs[0].is_blocking:
                programs[0].run_blocking()
            else:

                async def main() -> None:
                    await asyncio.gather(*(program.run() for program in programs))
                    await asyncio.sleep(1)  # until a daemon knows that they have left
                    if daemon is not None and not daemon.engine.is_over:
                        assert_nothing_left(daemon.engine.core)

                world.run(main())
        finally:
            world.close()
    jobs = [job for program in programs for job in program.jobs]
    failed = [job for job in jobs if job.error is not None]
    return Outcome(
        hashlib.sha256("\n".join(world.events).encode()).hexdigest(),
        len(world.deaths),
        len(jobs),
        len(failed),
        sum(not job.is_poison for job in failed),
    )


if __name__ == "__main__":
    print(simulate(int(sys.argv[1]), is_printing=True))
