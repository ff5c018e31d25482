"""The plan of several ranks and of engines that share experts: its figures are those of what they
allocate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quire.frontend.cli.plan import render
from quire.frontend.model_info import plan as planning
from quire.frontend.model_info.model_sizes import encoder_bytes
from quire.frontend.model_info.plan import RUNTIME_BYTES
from quire.ipc.models.state_layout import place_parts
from quire.tests.executor.engine_threads import EngineThreads
from quire.tests.executor.rank_threads import RankThreads
from quire.tests.frontend.model_info.test_plan import GIB, SLOW, plan, save_big
from quire.tests.test_image_drafts import DRAFTING, save_seeing_head
from quire.tests.test_images import configure
from quire.tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_big(tmp_path_factory.mktemp("big"))


@pytest.mark.parametrize(("tp", "pp", "num_layers"), [(2, 1, 3), (1, 2, 3), (1, 2, 4), (4, 1, 3)])
def test_ranks_allocate_what_the_plan_predicts(
    tp: int, pp: int, num_layers: int, tmp_path: Path
) -> None:
    """Of two stages the first is larger, with four layers because the other has a large head. With
    two heads of keys and values, four ranks have heads twice.
    """
    shape = {"num_hidden_layers": num_layers, "vocab_size": 4096 if num_layers == 4 else 256}
    model = str(save_tiny_model(tmp_path, "qwen2", **shape))
    arguments: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory_bytes": 200_000}
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    stated = plan(model, dtype="float32", device="cpu", **arguments, **sizes)
    ranks = RankThreads.of(model, tp, pp, **arguments)
    try:
        num_blocks = ranks.determine_num_blocks()
        usages = ranks.on_each(lambda rank: rank.collective_rpc("memory_usage")[0])
    finally:
        ranks.shutdown()
    cache_bytes = [usage["kv_cache_bytes"] for usage in usages]
    assert (stated.num_ranks, stated.num_blocks) == (tp * pp, num_blocks)
    assert stated.kv_cache_bytes == max(cache_bytes) * tp * pp
    weights_bytes = sum(usage["weights_bytes"] for usage in usages)
    assert stated.weights_bytes <= weights_bytes < 1.2 * stated.weights_bytes


@pytest.mark.parametrize(
    ("kind", "tp", "pp"), [("qwen3_5_text", 2, 1), ("lfm2", 1, 3), ("bamba", 4, 1), ("bamba", 2, 2)]
)
def test_ranks_keep_the_states_that_the_plan_predicts(kind, tp, pp, tmp_path: Path) -> None:
    model = str(save_tiny_model(tmp_path, kind))
    arguments: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory_bytes": 200_000}
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    stated = plan(model, dtype="float32", device="cpu", **arguments, **sizes)
    ranks = RankThreads.of(model, tp, pp, **arguments)
    parts = [
        [part for layer in rank.model.state_layers() for part in layer.state_parts]
        for rank in ranks.ranks
    ]
    ranks.shutdown()
    assert stated.states is not None
    assert stated.states.bytes_of_one == max(place_parts(own, 4)[1] for own in parts)


def test_each_stage_has_its_own_groups_of_layers(tmp_path: Path) -> None:
    """The first stage has layers with windows alone, the second one also a layer without."""
    types = ["sliding_attention"] * 3 + ["full_attention"]
    shape = {"num_hidden_layers": 4, "layer_types": types, "sliding_window": 24}
    model = str(save_tiny_model(tmp_path, "gemma3_text", **shape))
    arguments: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory_bytes": 200_000}
    for size in (1, 2):
        sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": 2}
        stated = plan(model, dtype="float32", device="cpu", **arguments, **sizes)
        ranks = RankThreads.of(model, size, 2, **arguments)
        num_blocks = ranks.determine_num_blocks()
        block_bytes = [rank.block_bytes for rank in ranks.ranks]
        ranks.shutdown()
        assert stated.block_bytes == max(block_bytes) * len(block_bytes)
        assert stated.num_blocks == num_blocks


def test_ranks_that_encode_images_are_those_that_the_plan_counts(tmp_path: Path) -> None:
    """Those of the first stage and, where a head drafts, those of the last one."""
    save_seeing_head(tmp_path, is_right=False)
    model = str(tmp_path / "whole")
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "encoder_cache_tokens": 500}
    stated = []
    for drafting in (None, DRAFTING):
        wanted = sizes | {"speculative_config": drafting}
        stated.append(plan(model, dtype="float32", device="cpu", max_model_len=512, **wanted))
        ranks = RankThreads(configure(model, **wanted))
        tables = [rank.model.images.table for rank in ranks.ranks]
        encoders = [rank.model.encoder for rank in ranks.ranks]
        ranks.shutdown()
        assert stated[-1].images_bytes == sum(table.nbytes for table in tables)
        assert [encoder is not None for encoder in encoders] == [True] * 2 + [bool(drafting)] * 2
    vision = ranks.config.model_config.vision
    more = stated[1].weights_bytes - stated[0].weights_bytes
    assert more > 2 * encoder_bytes(vision, "float32")


@pytest.mark.parametrize(
    ("kind", "size", "settings"),
    [
        ("mixtral", 4, {"dtype": "float32"}),
        ("qwen3_moe", 2, {"dtype": "bfloat16", "quantization": "int8"}),
        ("qwen2_moe", 2, {"dtype": "float32", "quantization": "int4"}),
        ("gpt_oss", 5, {"dtype": "bfloat16"}),
        ("gpt_oss", 5, {"dtype": "bfloat16", "quantization": "int8"}),
    ],
)
def test_engines_that_share_experts_allocate_what_the_plan_predicts(
    kind: str, size: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = str(save_tiny_model(tmp_path / "model", kind))
    settings = settings | {"max_model_len": 64, "kv_cache_memory_bytes": 200_000}
    if "quantization" in settings:
        settings["kernels"] = SLOW
    sharing = {"data_parallel_size": size, "enable_expert_parallel": True, "device": "cpu"}
    stated, whole = plan(model, **settings, **sharing), plan(model, **settings, device="cpu")
    engines = EngineThreads(model, tmp_path / "group", size, **settings)
    usages = [engine.collective_rpc("memory_usage")[0] for engine in engines.engines]
    engines.shutdown()
    assert [usage["weights_bytes"] for usage in usages] == [stated.weights_bytes] * size
    assert [usage["kv_cache_bytes"] for usage in usages] == [stated.kv_cache_bytes] * size
    assert stated.weights_bytes < whole.weights_bytes and stated.divides_experts
    assert stated.weights_bytes_by_dtype[settings.get("quantization", settings["dtype"])] == (
        stated.weights_bytes
    )
    assert stated.runtime_bytes == size * RUNTIME_BYTES + (size - 1) * stated.weights_bytes
    assert f"1/{size} of the experts in each" in render(stated)


def test_ranks_divide_the_memory(big: str) -> None:
    arguments: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu"}
    one, two = (plan(big, 40 * GIB, tensor_parallel_size=n, **arguments) for n in (1, 2))
    assert two.weights_bytes == one.weights_bytes and two.block_bytes == one.block_bytes
    assert two.runtime_bytes == one.runtime_bytes + RUNTIME_BYTES
    of_rank = (40 * GIB - one.weights_bytes - 2 * RUNTIME_BYTES) // 2
    assert two.num_blocks == int(0.4 * of_rank) // 2**20
    [*_, name, num_bytes] = two.flags
    assert (name, int(num_bytes)) == ("--kv-cache-memory-bytes", two.num_blocks * 2**20)
    for engines in (1, 2):
        arguments |= {"data_parallel_size": engines, "max_model_len": 8192}
        two = plan(big, 40 * GIB, tensor_parallel_size=2, **arguments)
        of_rank = (two.weights_bytes + two.kv_cache_bytes) / 2 / GIB
        assert f"2 ranks, each with {of_rank:.1f} GiB of weights and cache" in render(two)


@pytest.mark.parametrize("is_named", [True, False])
def test_each_rank_has_a_gpu(big: str, is_named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the weights and of each block, and a whole step, on each of two GPUs."""
    monkeypatch.setattr(planning, "gpu_memory_bytes", lambda: (23 * GIB, 24 * GIB))
    memory_bytes = 24 * GIB if is_named else None
    one, two = (
        plan(big, memory_bytes, device="cuda", tensor_parallel_size=size) for size in (1, 2)
    )
    assert (two.num_ranks, two.memory_bytes) == (2, 48 * GIB)
    assert (two.weights_bytes, two.block_bytes) == (one.weights_bytes, one.block_bytes)
    for name in ("withheld_bytes", "runtime_bytes", "step_bytes"):
        assert getattr(two, name) == 2 * getattr(one, name)
    free = one.free_bytes + one.weights_bytes // 2
    assert two.num_blocks == free // (one.block_bytes // 2)
    assert "the memory of 2 GPUs" in render(two) and "2 ranks, each with" in render(two)


def test_two_gpus_fit_what_one_does_not(big: str) -> None:
    arguments: dict[str, Any] = {"device": "cuda", "max_model_len": 5000}
    small = plan(big, 8 * GIB, tensor_parallel_size=2, **arguments)
    assert not plan(big, 14 * GIB, **arguments).fits
    assert "on each of 2 GPUs" in render(plan(big, 2 * GIB, tensor_parallel_size=2, **arguments))
    assert small.least_memory_bytes < 14 * GIB
    for more, fits in ((16, True), (-16, False)):
        at = small.least_memory_bytes + more
        assert plan(big, at, tensor_parallel_size=2, **arguments).fits == fits
