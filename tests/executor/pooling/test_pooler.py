"""Requests that pool, through the engine core and a model: against transformers, in chunks, in a
batch, with a cached prefix, after preemption.
"""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
import torch
from quire.core.engine_core import EngineCore
from quire.executor.pooling.heads import normalized
from quire.ipc.messages import EngineCoreRequest
from quire.ipc.models.pooling import Pooling
from quire.ipc.params import PoolingParams, SamplingParams
from quire.tests.executor.driver import make_config
from quire.tests.executor.pooling_core import pool, run
from transformers import AutoModel

MODES = ("cls", "mean", "lasttoken")


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(3)
    return [rng.choices(range(200), k=length) for length in lengths]


PROMPTS = prompts(1, 7, 33, 100, 64, 255)


@pytest.fixture(scope="module")
def start(tiny):
    cores: dict[str, EngineCore] = {}

    def start(**arguments) -> EngineCore:
        key = repr(arguments)
        if key not in cores:
            pooling = arguments.pop("pooling", Pooling())
            config = make_config(tiny("qwen3"), **arguments)
            replace = msgspec.structs.replace
            model_config = replace(config.model_config, pooling=pooling)
            config = replace(config, model_config=model_config)
            cores[key] = EngineCore(config, check_every_step=True)
        return cores[key]

    yield start
    for core in cores.values():
        core.shutdown()


def embed(core: EngineCore, texts: list[list[int]], **params) -> list[np.ndarray]:
    return pool(core, texts, **{"task": "embed", **params})


@pytest.fixture(scope="module")
def expected(tiny) -> list[np.ndarray]:
    """The hidden states of each prompt, by transformers."""
    model = AutoModel.from_pretrained(tiny("qwen3"), dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([p])).last_hidden_state[0].numpy() for p in PROMPTS]


def test_embeddings_equal_those_of_transformers(start, expected):
    for rows, own in zip(expected, embed(start(), PROMPTS)):
        assert abs(own - normalized(rows[-1])).max() < 1e-5
        assert abs(np.linalg.norm(own) - 1) < 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_equals_transformers_and_chunks_change_no_bit(start, expected, mode):
    pooling = Pooling(modes=(mode,), activation="identity")
    params = {"skip_reading_prefix_cache": mode != "lasttoken"}
    whole = embed(start(pooling=pooling), PROMPTS, **params)
    for rows, own in zip(expected, whole):
        right = {"cls": rows[0], "mean": rows.mean(0), "lasttoken": rows[-1]}[mode]
        assert abs(own - right).max() < 1e-5
    chunked = start(pooling=pooling, max_num_batched_tokens=24, dtype="float32")
    for own, other in zip(whole, embed(chunked, PROMPTS, **params)):
        assert own.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_batch_and_a_cached_prefix_change_no_bit(start, dtype):
    core = start(dtype=dtype)
    together = embed(core, PROMPTS)
    core.call_utility("reset_prefix_cache", [False])
    for text, own in zip(PROMPTS, together):
        for _ in range(2):  # the second time from the prefix cache
            assert embed(core, [text])[0].tobytes() == own.tobytes()
    assert core.observer.get_metrics()["prefix_cache_hits"] > 0


def test_a_task_by_token_gives_a_row_for_each(start, expected):
    params = {"task": "token_embed", "skip_reading_prefix_cache": True}
    for rows, own in zip(expected, embed(start(), PROMPTS, **params)):
        assert own.shape == rows.shape and abs(own - normalized(rows)).max() < 1e-5


def test_dimensions_are_cut_before_they_are_normalised(start, expected):
    for rows, own in zip(expected, embed(start(), PROMPTS, dimensions=8)):
        assert abs(own - normalized(rows[-1, :8])).max() < 1e-5
    raw = embed(start(), PROMPTS, use_activation=False)
    assert all(abs(own - rows[-1]).max() < 1e-5 for rows, own in zip(expected, raw))


def test_requests_that_pool_and_generate_share_steps(start):
    core = start()
    greedy = SamplingParams(temperature=0.0, seed=0, max_tokens=6)
    alone = {i: run(core, {"r": (p[:200], greedy)})["r"] for i, p in enumerate(PROMPTS)}
    pooled = embed(core, PROMPTS)
    mixed: dict = {f"g{i}": (p[:200], greedy) for i, p in enumerate(PROMPTS)}
    mixed |= {f"p{i}": (p, PoolingParams(task="embed")) for i, p in enumerate(PROMPTS)}
    found = run(core, mixed)
    assert all(found[f"g{i}"] == tokens for i, tokens in alone.items())
    assert all(found[f"p{i}"].tobytes() == own.tobytes() for i, own in enumerate(pooled))


def test_preemption_in_the_middle_of_a_prompt_changes_no_bit(start):
    pooling = Pooling(modes=("mean",))
    params = {"skip_reading_prefix_cache": True}
    expected = embed(start(pooling=pooling), PROMPTS, **params)
    for mode in ("swap", "recompute"):
        core = start(pooling=pooling, max_num_batched_tokens=24, preemption_mode=mode)
        wanted = PoolingParams(task="embed", **params)
        for i, text in enumerate(PROMPTS):
            core.add_request(EngineCoreRequest(str(i), text, wanted))
        for _ in range(9):
            core.step_fn()
        core.scheduler.preempt(core.scheduler.running.pop())
        found = run(core, {})
        for i, own in enumerate(expected):
            if str(i) in found:
                assert found[str(i)].tobytes() == own.tobytes()
        assert str(len(PROMPTS) - 1) in found


def test_a_prompt_whose_beginning_was_not_computed_fails_alone(start):
    """A client that does not say that all tokens are read."""
    core = start(pooling=Pooling(modes=("mean",)))
    text = PROMPTS[-1]
    embed(core, [text], skip_reading_prefix_cache=True)
    wanted = PoolingParams(task="embed")
    found = run(core, {"bad": (text, wanted), "good": (PROMPTS[1], wanted)})
    assert "the first were not computed" in found["bad"] and found["good"].shape == (64,)


def test_refusals_name_the_parameter(start):
    text = PROMPTS[0]
    found = run(
        start(),
        {
            "a": (text, PoolingParams(task="classify")),
            "b": (text * 257, PoolingParams(task="embed")),
        },
    )
    assert found["a"].startswith("task: must be one of embed, token_embed for this model")
    assert found["b"].startswith("prompt_token_ids: ")
    found = run(start(pooling=None), {"c": (text, PoolingParams(task="embed"))})
    assert found["c"].startswith("params: must be SamplingParams")
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=1)
    assert run(start(runner="pooling"), {"d": (text, params)})["d"].startswith("params: ")
