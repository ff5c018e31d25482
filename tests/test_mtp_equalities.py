"""Models whose files have a head for multi-token prediction, in bfloat16 on native kernels: the
bits of a request's tokens and log-probabilities do not depend on its drafts, of which many are
right.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from quire import LLM, AsyncLLM, SamplingParams
from quire.ipc.params import RequestOutputKind
from quire.kernels.cpu.native.replay import Program
from quire.tests.client_forms import closing, make_async_engine, make_engine
from quire.tests.equalities import (
    few_blocks,
    make_jobs,
    needs_native_kernels,
    run_alone,
    settings_with,
)
from quire.tests.mtp_checkpoints import NEMOTRON, QWEN, save_with_head
from quire.tests.test_bit_equalities import assert_same_bits, name_of, run
from quire.tests.workloads import Job

pytestmark = needs_native_kernels

FEW = few_blocks()
DRAFTING = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}


MODELS = [*((kind, 1) for kind in (*QWEN, "glm4_moe_lite", NEMOTRON)), ("glm4_moe", 2)]


@pytest.fixture(scope="module", params=MODELS, ids=str)
def model(request, tmp_path_factory) -> str:
    kind, num_heads = request.param
    directory = tmp_path_factory.mktemp(kind)
    right = dict(is_right=True, num_heads=num_heads)
    return str(save_with_head(directory, kind, "bfloat16", **right))


def common(model: str) -> dict[str, Any]:
    return dict(model=model, dtype="bfloat16", max_model_len=300, state_checkpoint_interval=64)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return make_jobs(24, max_prompt=120, max_output=100, crowding=16)


@pytest.fixture(scope="module")
def expected(model, jobs):
    """Without drafts."""
    return run_alone(common(model), jobs)


@pytest.mark.sampled(step=8)
@pytest.mark.parametrize("settings", settings_with(FEW), ids=name_of)
def test_drafts_of_a_head_change_no_bit(model, jobs, expected, settings):
    settings = common(model) | settings | dict(speculative_config=DRAFTING)
    with closing(make_engine(**settings)) as engine:
        assert_same_bits(jobs, run(engine, jobs), expected)
        assert_same_bits(jobs, run(engine, jobs, aborts=False), expected, aborts=False)
        metrics = engine.call_utility("get_metrics")
        assert metrics["num_accepted_tokens"] > 0.1 * metrics["num_draft_tokens"] > 30
        assert (metrics["num_preemptions"] > 0) == (settings.items() >= FEW.items())
        engine.call_utility("check_integrity")


@pytest.mark.sampled(step=3)
def test_completions_of_one_prompt_and_drafts_of_one_native_call(model):
    params = SamplingParams(
        n=4, temperature=1.0, seed=3, max_tokens=30, ignore_eos=True, logprobs=1
    )
    prompt = {"prompt_token_ids": list(range(20, 180))}
    answers = []
    for drafting in (None, DRAFTING):
        with LLM(**common(model), engine="inproc", speculative_config=drafting) as llm:
            [output] = llm.generate([prompt], params, use_tqdm=False)
            answers.append([(one.token_ids, one.logprobs) for one in output.outputs])
            if drafting is not None:
                assert llm.get_metrics()["num_accepted_tokens"] > 40
                draft = llm.llm_engine.client._engine.core.executor._draft
                assert isinstance(draft.drafter.passes.run, Program)
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_a_stream_continues_on_another_engine(tmp_path):
    model = str(save_with_head(tmp_path, "qwen3_5_text", "bfloat16", is_right=True))
    params = SamplingParams(
        temperature=0.8,
        seed=4,
        max_tokens=180,  # many, so that the engine dies before the last one
        ignore_eos=True,
        logprobs=1,
        output_kind=RequestOutputKind.CUMULATIVE,
    )

    async def answer(llm: AsyncLLM, name: str, is_killed: bool) -> list[Any]:
        prompt = {"prompt_token_ids": list(range(20, 120))}
        async for output in llm.generate(prompt, params, name):
            if is_killed and len(output.outputs[0].token_ids) >= 20:
                is_killed = False
                os.kill(llm.client.engine_pid, signal.SIGKILL)
        return [output.outputs[0].token_ids, output.outputs[0].logprobs]

    async def run_both() -> None:
        settings = common(model) | dict(speculative_config=DRAFTING)
        llm = make_async_engine("process async", **settings)
        try:
            undisturbed = await answer(llm, "a", is_killed=False)
            assert await answer(llm, "b", is_killed=True) == undisturbed
            assert llm.client.restarts.by_cause.total() == 1
            assert (await llm.get_metrics())["num_accepted_tokens"] > 10  # of the second engine
        finally:
            await llm.shutdown_async()

    asyncio.run(run_both())
