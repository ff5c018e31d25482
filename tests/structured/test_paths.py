"""The same grammars give the same tokens on every path: chunked, preempted, swapped, cached,
overlapped, through every client, with n > 1.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from quire import (
    LLM,
    AsyncLLM,
    EngineArgs,
    InvalidParameterError,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.tests.structured.generator import numbered

# Every third is greedy; the others are random, each with its own seed.
PARAMS = [
    SamplingParams(
        max_tokens=48,
        temperature=0.0 if seed % 3 == 0 else 1.2,
        seed=seed,
        structured_outputs=structured,
    )
    for seed, structured in numbered(20_000, 48)
]
PROMPTS = [
    f"{'One day, a little fox saw a big tree. ' * (i % 5)}Answer {i}: " for i in range(len(PARAMS))
]
SETTINGS = dict(
    engine="inproc",
    num_threads=1,
    dtype="float32",
    max_num_seqs=16,
    max_model_len=256,
    num_gpu_blocks_override=600,
    max_num_batched_tokens=512,
)
# one sequence fits; the others preempt each other
FEW = dict(block_size=8, num_gpu_blocks_override=40)


def tokens_of(outputs: list) -> list[tuple[list[int], str, object]]:
    return [
        (c.token_ids, c.finish_reason, output.error) for output in outputs for c in output.outputs
    ]


def generate(params: list[SamplingParams] = PARAMS, **settings) -> tuple[list, dict]:
    with LLM(**{**SETTINGS, **settings}) as llm:
        # checks the grammars first: then all requests arrive together, and few blocks are too few
        first = [msgspec.structs.replace(one, max_tokens=1) for one in params]
        llm.generate(["a"] * len(first), first, use_tqdm=False)
        result = tokens_of(llm.generate(PROMPTS, params, use_tqdm=False))
        assert llm.llm_engine.client.call_utility("check_integrity")
        return result, llm.llm_engine.client.call_utility("get_metrics")


@pytest.fixture(scope="module")
def expected() -> list:
    result = generate(enable_prefix_caching=False)[0]
    assert sum(reason == "stop" for _, reason, _ in result) > len(result) // 2 and all(
        error is None for _, _, error in result
    )
    return result


@pytest.mark.sampled(step=8)
@pytest.mark.parametrize(
    "settings",
    [
        dict(max_num_batched_tokens=16),
        dict(max_num_seqs=3),
        dict(**FEW, preemption_mode="recompute"),
        dict(**FEW, preemption_mode="swap"),
        dict(num_scheduler_steps=4),
        dict(async_scheduling=True),
        dict(**FEW, async_scheduling=True, preemption_mode="recompute"),
        dict(enable_jump_forward=False),
        dict(enable_jump_forward=False, max_num_batched_tokens=16, max_num_seqs=3),
        dict(engine="process"),
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()),
)
def test_settings_do_not_change_outputs(expected, settings) -> None:
    result, metrics = generate(**settings)
    assert result == expected
    assert metrics["num_preemptions"] > 0 or not settings.items() >= FEW.items()


def test_a_warm_prefix_cache_does_not_change_outputs(expected) -> None:
    with LLM(**SETTINGS) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert tokens_of(outputs) == expected
        assert sum(output.num_cached_tokens for output in outputs) > 100


def test_requests_alone_give_the_same(expected) -> None:
    with LLM(**SETTINGS) as llm:
        for prompt, params, one in list(zip(PROMPTS, PARAMS, expected))[:12]:
            assert tokens_of(llm.generate(prompt, params, use_tqdm=False)) == [one]


def test_asyncio_gives_the_same(expected) -> None:
    async def one(engine: AsyncLLM, index: int):
        async for output in engine.generate(PROMPTS[index], PARAMS[index], request_id=str(index)):
            last = output
        return last

    async def main() -> list:
        engine = AsyncLLM.from_engine_args(
            EngineArgs(**{name: value for name, value in SETTINGS.items() if name != "engine"}),
            engine="inproc",
        )
        try:
            return await asyncio.gather(*(one(engine, index) for index in range(len(PARAMS))))
        finally:
            engine.shutdown()

    assert tokens_of(asyncio.run(main())) == expected


def test_log_probabilities_are_the_models_own(expected) -> None:
    """They do not include the grammar's mask: a token that the model finds unlikely keeps its low
    probability.
    """
    with_logprobs = [msgspec.structs.replace(params, logprobs=2) for params in PARAMS]
    with LLM(**SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, with_logprobs, use_tqdm=False)
    assert tokens_of(outputs) == expected
    choices = [o for o, p in zip(outputs, PARAMS) if p.structured_outputs.choice is not None]
    assert (
        min(
            output.outputs[0].cumulative_logprob / len(output.outputs[0].token_ids)
            for output in choices
        )
        < -3.0
    )


def test_several_completions_of_one_request() -> None:
    params = SamplingParams(
        n=4,
        temperature=1.0,
        seed=7,
        max_tokens=32,
        structured_outputs=StructuredOutputsParams(regex="[a-f]{4}-[0-9]{4}"),
    )
    alone = [
        SamplingParams(
            temperature=1.0, seed=7 + i, max_tokens=32, structured_outputs=params.structured_outputs
        )
        for i in range(4)
    ]
    with LLM(**SETTINGS) as llm:
        together = tokens_of(llm.generate("x", params, use_tqdm=False))
        assert together == tokens_of(llm.generate(["x"] * 4, alone, use_tqdm=False))
        assert len({tuple(token_ids) for token_ids, _, _ in together}) > 1


def test_a_grammar_that_does_not_compile_raises_for_one_caller_and_is_reported_to_many() -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    with LLM(**SETTINGS) as llm:
        with pytest.raises(
            InvalidParameterError, match="^structured_outputs: cannot be compiled"
        ) as raised:
            llm.generate("x", bad, use_tqdm=False)
        assert raised.value.parameter == "structured_outputs"
        refused, fine = llm.generate(
            ["x", "x"], [bad, SamplingParams(max_tokens=3)], use_tqdm=False
        )
    assert (refused.error_parameter, refused.outputs[0].finish_reason) == (
        "structured_outputs",
        "error",
    )
    assert fine.error is None and len(fine.outputs[0].token_ids) == 3
