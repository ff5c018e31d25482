"""Models whose layers are divided among ranks, against one rank.

The ranks are threads; tests/executor/ranks/test_multiproc_executor.py has them as processes.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from quire.executor.model import StateLayer
from quire.executor.weights.table import Slice
from quire.ipc.params import SamplingParams
from quire.tests.executor.driver import Row, generate, start_executor
from quire.tests.executor.rank_threads import RankThreads
from quire.tests.tiny_models import GEMMA4_EXPERTS

KINDS = (
    *("qwen2", "llama", "qwen3", "gemma3_text", "mistral", "smollm3", "granite", "ministral3"),
    *("phi3", "gemma4_text", "gpt_oss", "olmo2"),
)
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
HYBRIDS = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "lfm3"),
    "kimi_linear",
)
OF_MAMBA = ("granitemoehybrid", "falcon_h1", "bamba", "nemotron_h", "mamba2")


def random_workload(executor: Any, seed: int) -> list[Row]:
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(3, 250) for _ in range(rng.randrange(1, 60))]
        for _ in range(rng.randrange(1, 6))
    ]
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0]),
        top_k=rng.choice([0, 0, 5]),
        top_p=rng.choice([1.0, 0.9]),
        seed=rng.randrange(1000),
        logprobs=2,
        prompt_logprobs=rng.choice([None, 1]),
        repetition_penalty=rng.choice([1.0, 1.1]),
    )
    most = rng.choice([1, 7, 1000])
    return generate(executor, prompts, rng.randrange(1, 12), params, lambda row: most)


def check_equal(one: list[Row], other: list[Row]) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a.error, b.error) == (None, None)
        assert a.output == b.output
        for mine, theirs in (
            *zip(a.logprobs, b.logprobs, strict=True),
            *((a.prompt_logprobs[i], b.prompt_logprobs[i]) for i in a.prompt_logprobs),
        ):
            # the sampled (or prompt's) token; the order of others may differ where they are equal
            np.testing.assert_allclose(mine[1][0], theirs[1][0], atol=1e-4)


@pytest.mark.sampled(step=5)
@pytest.mark.parametrize("kind", [*KINDS, *MIXTURES, *HYBRIDS, *OF_MAMBA])
def test_two_ranks_give_the_tokens_of_one(tiny, kind: str) -> None:
    one, two = start_executor(tiny(kind)), RankThreads.of(tiny(kind), 2)
    check_equal(random_workload(one, 0), random_workload(two, 0))
    two.shutdown()


def test_two_ranks_have_all_streams(tiny) -> None:
    """Those of Gemma 3n, with sparse MLPs, whose largest activations are those of all ranks."""
    model = tiny("gemma3n_text")
    one, two = start_executor(model), RankThreads.of(model, 2)
    check_equal(random_workload(one, 0), random_workload(two, 0))
    two.shutdown()


@pytest.mark.parametrize(
    ("kind", "size", "num_stages", "arguments"),
    [
        ("qwen2", 1, 2, {}),
        ("llama", 1, 3, {"tie_word_embeddings": False}),
        ("gemma3_text", 1, 2, {}),
        ("mixtral", 1, 2, {}),
        ("qwen2", 2, 2, {}),
    ],
)
def test_stages_give_the_tokens_of_one(tiny, kind, size, num_stages, arguments) -> None:
    model = tiny(kind, num_hidden_layers=4, **arguments)
    one, stages = start_executor(model), RankThreads.of(model, size, num_stages)
    runners = [rank.runner for rank in stages.ranks]
    assert all((runner.program is not None) == (size == 1) for runner in runners)
    assert all(runner.bursts is None for runner in runners)  # they need a step's own tokens
    for seed in range(3):
        check_equal(random_workload(one, seed), random_workload(stages, seed))
    loads = [rank.collective_rpc("expert_load")[0] for rank in stages.ranks]
    assert loads == ([{}] * len(loads) if kind != "mixtral" else loads)
    if kind == "mixtral":
        assert [list(load) for load in loads] == [[0, 1], [2, 3]]
    stages.shutdown()


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize(
    ("kind", "size", "num_stages"),
    [
        ("qwen3_next", 1, 2),
        ("lfm2", 1, 3),
        ("granitemoehybrid", 1, 2),
        ("falcon_h1", 2, 2),
        ("mamba2", 1, 2),
        ("deepseek_v2", 1, 2),
        ("kimi_linear", 2, 2),
        ("phi3", 1, 2),
        ("gemma4_text", 1, 2),
    ],
)
def test_stages_of_other_layers(tiny, kind: str, size: int, num_stages: int) -> None:
    model = tiny(kind, **(GEMMA4_EXPERTS if kind == "gemma4_text" else {}))
    one, stages = start_executor(model), RankThreads.of(model, size, num_stages)
    layers = [len(rank.model.state_layers()) for rank in stages.ranks[::size]]
    assert sum(layers) == len(one.model.state_layers())
    for seed in range(2):
        check_equal(random_workload(one, seed), random_workload(stages, seed))
    stages.shutdown()


@pytest.mark.parametrize(
    ("kind", "num_stages", "num_layers"),
    [
        ("qwen2", 2, [2, 1]),
        # layers that read keys and values of another one are in its stage, and get their inputs
        # from the stage before
        ("gemma3n_text", 3, [1, 1, 4]),
        ("gemma4_text", 2, [2, 4]),
    ],
)
def test_stages_in_bfloat16_have_the_bits_of_one_rank(tiny, kind, num_stages, num_layers) -> None:
    model = tiny(kind, **({"num_hidden_layers": 3} if kind == "qwen2" else {}))
    options = {"dtype": "bfloat16"}
    one, stages = start_executor(model, **options), RankThreads.of(model, 1, num_stages, **options)
    assert [len(rank.model.layer_range) for rank in stages.ranks] == num_layers
    assert all(rank.runner.program is not None for rank in stages.ranks)
    tables = {rank.kv_cache_windows for rank in stages.ranks}  # of all stages alike
    assert [set(windows) for windows in tables] == [set(one.kv_cache_windows)]
    for seed in range(2):
        rows = zip(random_workload(one, seed), random_workload(stages, seed), strict=True)
        for mine, theirs in rows:
            assert mine.output == theirs.output
            assert [p[1].tolist() for p in mine.logprobs] == [
                p[1].tolist() for p in theirs.logprobs
            ]
    stages.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["qwen2", "mixtral"])
def test_random_workloads(tiny, kind: str, size: int, num_stages: int) -> None:
    one, two = start_executor(tiny(kind)), RankThreads.of(tiny(kind), size, num_stages)
    for seed in range(100, 200):
        check_equal(random_workload(one, seed), random_workload(two, seed))
    two.shutdown()


@pytest.mark.parametrize(
    ("kind", "size", "num_kv_heads"),
    [
        ("llama", 2, 1),
        ("llama", 4, 1),
        ("olmo2", 4, 2),
        pytest.param("olmo3", 4, 1, marks=pytest.mark.slow),
        pytest.param("olmoe", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_heads_that_ranks_have_in_common(tiny, kind: str, size: int, num_kv_heads: int) -> None:
    """OLMo's keys are normed over all heads, each of which counts once."""
    model = tiny(kind, num_attention_heads=4, num_key_value_heads=num_kv_heads)
    one, several = start_executor(model), RankThreads.of(model, size)
    check_equal(random_workload(one, 5), random_workload(several, 5))
    assert {rank.model.layers[0].self_attn.num_kv_heads for rank in several.ranks} == {1}
    several.shutdown()


@pytest.mark.sampled(step=4)
@pytest.mark.parametrize(
    ("kind", "size", "sizes"),
    [
        ("qwen3_next", 4, {}),
        ("qwen3_5_text", 4, {}),
        ("granitemoehybrid", 2, {"mamba_n_groups": 1}),
        ("bamba", 4, {}),
    ],
)
def test_heads_of_mixers_that_ranks_have_in_common(tiny, kind: str, size: int, sizes: dict) -> None:
    """Ranks have the same key head, or norm a group of features of which each has a part."""
    model = tiny(kind, **sizes)
    one, several = start_executor(model), RankThreads.of(model, size)
    for seed in (5, 6):
        check_equal(random_workload(one, seed), random_workload(several, seed))
    several.shutdown()


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "bamba"])
def test_each_rank_has_its_part_of_a_state(tiny, kind: str) -> None:
    one, two = start_executor(tiny(kind)), RankThreads.of(tiny(kind), 2)

    def sizes(layer: StateLayer) -> list[int]:
        return [part.num_bytes(4) for part in layer.state_parts]

    whole = [sizes(layer) for layer in one.model.state_layers()]
    for rank in two.ranks:
        parts = [sizes(layer) for layer in rank.model.state_layers()]
        assert [[2 * size for size in part] for part in parts] == whole
    two.shutdown()


def test_each_rank_has_its_part(tiny) -> None:
    one, two = start_executor(tiny("qwen2")), RankThreads.of(tiny("qwen2"), 2)
    [whole] = one.collective_rpc("memory_usage")
    for rank in two.ranks:
        [part] = rank.collective_rpc("memory_usage")
        assert part["weights_bytes"] < 0.55 * whole["weights_bytes"]
        assert rank.block_bytes == one.block_bytes // 2
    two.shutdown()


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"dtype": "bfloat16", "quantization": "int4"},
        {"kv_cache_dtype": "int8"},
        {"cpu_isa": "none"},
        {"load_format": "dummy"},
    ],
    ids=str,
)
def test_every_run_has_the_same_bits(tiny, arguments) -> None:
    """What is rounded differs from one rank's, but not from run to run."""
    outputs = []
    for _ in range(2):
        two = RankThreads.of(tiny("llama", tie_word_embeddings=False), 2, **arguments)
        rows = [row for seed in range(2) for row in random_workload(two, seed)]
        outputs.append([(row.output, [p[1].tolist() for p in row.logprobs]) for row in rows])
        two.shutdown()
    assert outputs[0] == outputs[1]


def test_dummy_weights_are_parts_of_one_ranks(tiny) -> None:
    arguments = {"load_format": "dummy"}
    one, two = (
        start_executor(tiny("qwen2"), **arguments),
        RankThreads.of(tiny("qwen2"), 2, **arguments),
    )
    check_equal(random_workload(one, 1), random_workload(two, 1))
    two.shutdown()


def test_slices() -> None:
    stored = torch.arange(12).view(3, 4)
    columns = Slice(1, 1, 3, 4)
    assert columns.of(stored).tolist() == [[1, 2], [5, 6], [9, 10]]
    assert columns.stored_shape(columns.of(stored)) == [3, 4]
    rows = Slice(0, 1, 3, 3)
    assert rows.of(stored).data_ptr() == stored[1].data_ptr()
    assert rows.stored_shape(rows.of(stored)) == [3, 4]
