"""Several decode steps in one native call give the tokens of single steps, whatever the parameters
of the rows and wherever their blocks end.
"""

from __future__ import annotations

import random

import pytest
import torch
from quire.executor.runner.bursts import Bursts
from quire.executor.sampling.sampler import NOT_FINITE
from quire.executor.worker import Worker
from quire.ipc.params import SamplingParams
from quire.ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from quire.kernels import registry
from quire.tests.executor.driver import Driver, Row, generate, greedy, start_executor

if not any(found.name == "native" for found in registry.implementations("argmax")):
    pytest.skip("the native library is not built", allow_module_level=True)

MODELS = {"qwen2": ("qwen2", {}), "qwen3-tied": ("qwen3", {"tie_word_embeddings": True})}
DRAWN = [
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=6),
]


@pytest.fixture
def counted(monkeypatch) -> list[int]:
    """Record the rows of each burst."""
    counts: list[int] = []
    run = Bursts.run

    def counting(self: Bursts, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        counts.append(len(scheduler_output.slots))
        return run(self, scheduler_output)

    monkeypatch.setattr(Bursts, "run", counting)
    return counts


def random_prompts(chance: random.Random, count: int) -> list[list[int]]:
    return [
        [chance.randrange(300) for _ in range(chance.choice((1, 7, 15, 16, 17, 31, 40)))]
        for _ in range(count)
    ]


def look_ahead(
    executor: Worker,
    prompts: list[list[int]],
    params: list[SamplingParams],
    max_tokens: int,
    chance: random.Random,
) -> list[Row]:
    """Like driver.generate, but each step decodes a random number of tokens, the same for
    each row.
    """
    driver = Driver(executor)
    rows = [
        driver.add(str(i), prompt, p)
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
    ]
    driver.step({row.request_id: len(row.prompt) for row in rows})
    while (left := max_tokens - len(rows[0].output)) > 0:
        count = min(left, chance.choice((1, 2, 5, 8, 20)))
        driver.step(
            {row.request_id: 1 for row in rows},
            lookahead={row.request_id: count - 1 for row in rows},
        )
    executor.execute_model(
        SchedulerOutput(0, [], [], [], [], freed_slots=[row.slot for row in rows])
    )
    return rows


@pytest.mark.sampled
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_bursts_give_the_tokens_of_single_steps(model, dtype, num_threads, tiny, counted):
    kind, overrides = MODELS[model]
    executor = start_executor(tiny(kind, **overrides), dtype=dtype, num_threads=num_threads)
    for seed in range(8):
        chance = random.Random(seed)
        prompts = random_prompts(chance, chance.choice((1, 1, 2, 3, 8)))
        params = [chance.choice([greedy(), greedy(), *DRAWN]) for _ in prompts]
        expected = [
            generate(executor, [prompt], 45, p)[0].output for prompt, p in zip(prompts, params)
        ]
        del counted[:]
        assert [row.output for row in look_ahead(executor, prompts, params, 45, chance)] == expected
        assert counted and set(counted) == {len(prompts)}


@pytest.mark.parametrize(
    "params",
    [
        greedy(logprobs=2),
        greedy(repetition_penalty=1.3),
        greedy(logit_bias={7: 3.0}),
        SamplingParams(temperature=0.8, seed=3, min_tokens=30, max_tokens=40, stop_token_ids=[4]),
    ],
    ids=["logprobs", "penalty", "bias", "min_tokens"],
)
def test_a_row_that_needs_the_host_runs_step_by_step(params, tiny, counted):
    executor, chance = start_executor(tiny("qwen2")), random.Random(1)
    prompts = random_prompts(chance, 2)
    expected = [
        generate(executor, [prompt], 30, p)[0].output
        for prompt, p in zip(prompts, (greedy(), params))
    ]
    rows = look_ahead(executor, prompts, [greedy(), params], 30, chance)
    assert [row.output for row in rows] == expected and not counted
    assert len(rows[1].logprobs) == (30 if params.logprobs else 0)


def test_rows_with_unequal_lookahead_or_a_prompt_run_step_by_step(tiny, counted):
    executor, chance = start_executor(tiny("qwen2")), random.Random(2)
    prompts = random_prompts(chance, 3)
    expected = [row.output for row in generate(executor, prompts, 12)]
    driver = Driver(executor)
    rows = [driver.add(str(i), prompt) for i, prompt in enumerate(prompts)]
    driver.step({"0": len(prompts[0])}, lookahead={"0": 2})  # after its prompt
    driver.step({"1": len(prompts[1])})
    driver.step({"0": 1, "1": 1}, lookahead={"0": 3, "1": 1})
    assert len(prompts[0]) > 1 and not counted
    driver.step({"1": 1, "0": 1}, lookahead={"0": 4, "1": 4})
    driver.step({"2": len(prompts[2]), "0": 1})
    driver.step({"0": 1, "2": 1}, lookahead={"0": 1, "2": 1})
    executor.execute_model(
        SchedulerOutput(0, [], [], [], [], freed_slots=[row.slot for row in rows])
    )
    assert counted == [2, 2] and [len(row.output) for row in rows] == [15, 8, 3]
    assert [row.output[:12] for row in rows] == [
        output[: len(row.output)] for row, output in zip(rows, expected)
    ]


@pytest.mark.parametrize("params", [greedy(), *DRAWN], ids=["greedy", "drawn", "filtered"])
def test_a_row_that_fails_keeps_its_earlier_tokens_and_fails_alone(params, tiny, counted):
    """In the middle of a burst row 1 samples a token whose embedding is NaN."""
    executor, chance = start_executor(tiny("qwen2")), random.Random(3)
    prompts = random_prompts(chance, 3)
    expected = [generate(executor, [prompt], 9, params)[0].output for prompt in prompts]
    bad = next(
        i
        for i in range(2, 8)
        if expected[1][i] not in {*sum(prompts, []), *expected[0], *expected[2], *expected[1][:i]}
    )
    executor.model.embed_tokens.weight[expected[1][bad]] = float("nan")
    driver = Driver(executor)
    rows = [driver.add(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    driver.step({row.request_id: len(row.prompt) for row in rows})
    result = driver.step(dict.fromkeys("012", 1), lookahead=dict.fromkeys("012", 7))
    assert (
        counted == [3]
        and result.errors == {rows[1].slot: NOT_FINITE}
        and result.num_sampled == [8, bad, 8]
    )
    assert [row.output for row in rows] == [expected[0], expected[1][: bad + 1], expected[2]]
    held = executor.runner.batch
    assert held.num_tokens[rows[1].slot] == len(prompts[1]) + bad + 1


def test_bursts_are_recorded_again_with_the_program(tiny, counted):
    """After new weights or a new cache the next burst uses them."""
    executor, params = start_executor(tiny("qwen2")), [greedy()]
    worker, prompt = executor, [list(range(20))]
    expected = look_ahead(executor, prompt, params, 30, random.Random(4))[0].output
    worker.sleep(["kv_cache"])
    with pytest.raises(RuntimeError, match="sleeps"):
        worker.runner.bursts
    worker.wake_up(["kv_cache"])
    assert look_ahead(executor, prompt, params, 30, random.Random(5))[0].output == expected
    worker.load_weights(str(tiny("qwen2", seed=1)))
    other = look_ahead(executor, prompt, params, 30, random.Random(6))[0].output
    assert (
        other == generate(start_executor(tiny("qwen2", seed=1)), prompt, 30)[0].output != expected
    )


def test_no_bursts_is_reported(tiny):
    assert start_executor(tiny("qwen2")).burst_weights_bytes > 0
    for arguments in ({"cpu_isa": "none"}, {"kernels": {"sample_tokens": "reference"}}):
        assert start_executor(tiny("qwen2"), **arguments).burst_weights_bytes == 0


def test_the_cache_equals_that_of_single_steps(tiny):
    """Keys and values are compared bit by bit, since other requests may find a prefix that a burst
    computed.
    """
    caches = []
    for chance in (random.Random(7), None):
        executor = start_executor(tiny("qwen2"), dtype="bfloat16")
        prompts = random_prompts(random.Random(8), 3)
        if chance is None:
            generate(executor, prompts, 33)
        else:
            look_ahead(executor, prompts, [greedy()] * 3, 33, chance)
        # Blocks are allocated in another order, so they are compared by content.
        layer = executor.model.attention_layers()[-1]
        caches.append(
            sorted(
                torch.stack([layer.key_cache, layer.value_cache], 1)[1:]
                .view(torch.int16)
                .flatten(1)
                .tolist(),
                key=str,
            )
        )
    assert caches[0] == caches[1]
