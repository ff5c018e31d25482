"""Quantized checkpoints and GGUF files whose layers are divided among ranks, against one rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from quire.executor.weights.packed_rows import PackedRows
from quire.executor.weights.table import ColumnOrder, Slice
from quire.ipc.errors import InvalidParameterError
from quire.ipc.params import SamplingParams
from quire.tests.executor.driver import Row, generate, start_executor
from quire.tests.executor.rank_threads import RankThreads
from quire.tests.gguf_checkpoints import write_gguf
from quire.tests.gguf_families import write_family_gguf
from quire.tests.gguf_hybrids import write_hybrid_gguf
from quire.tests.quantized_checkpoints import write_mxfp4, write_quantized

# of which two ranks have whole blocks
SIZES = {
    "intermediate_size": 128,
    "block_auto_adjust_ff_dim": False,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "shared_intermediate_size": 128,
    # on two ranks each has two key heads, and their value heads are interleaved in a GGUF file
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 32,
}
GGUF_WRITERS = {
    "deepseek_v2": write_family_gguf,
    "granitemoehybrid": write_hybrid_gguf,
    "qwen3_5_text": write_hybrid_gguf,
    "lfm2": write_hybrid_gguf,
    "mamba2": write_hybrid_gguf,
}
PROMPTS = [[5, 9, 2, 7], [11, 3], [4] * 30]


def write(kind: str, format: str, model: Path, directory: Path) -> Path:
    """A model of this format, or of a GGUF type."""
    if format == "mxfp4":
        write_mxfp4(directory / "model", model)
    elif format in ("F32", "Q8_0", "Q4_0"):
        GGUF_WRITERS.get(kind, write_gguf)(directory / "model.gguf", model, format)
        return directory / "model.gguf"
    else:
        write_quantized(directory / "model", model, format)
    return directory / "model"


def answers(executor) -> list[Row]:
    params = SamplingParams(temperature=0.0, seed=0, logprobs=2, prompt_logprobs=1)
    return generate(executor, PROMPTS, 6, params, lambda row: 16)


def numbers(row: Row) -> list[float]:
    """The log-probabilities of the prompt's tokens and of the first sampled one, whose context is
    the same everywhere.
    """
    of_prompt = [row.prompt_logprobs[i] for i in sorted(row.prompt_logprobs)]
    return [float(one[1][0]) for one in (row.logprobs[0], *of_prompt)]


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(
    ("kind", "format", "size", "num_stages"),
    [
        ("llama", "awq", 2, 1),
        ("llama", "Q8_0", 2, 2),
        ("gpt_oss", "mxfp4", 2, 1),
        *(
            pytest.param(kind, format, size, num_stages, marks=pytest.mark.slow)
            for kind in ("llama", "qwen3_moe")
            for format in ("gptq", "pack-quantized", "int-quantized", "fp8", "awq")
            for size, num_stages in ((2, 1), (1, 2))
        ),
        *(
            pytest.param(kind, format, 2, num_stages, marks=pytest.mark.slow)
            for kind, format in (
                ("llama", "Q4_0"),
                ("gemma3_text", "Q8_0"),
                ("phi3", "Q8_0"),
                *((kind, "F32") for kind in GGUF_WRITERS if kind != "qwen3_5_text"),
                ("qwen3_5_text", "Q8_0"),
            )
            for num_stages in (1, 2)
        ),
        ("qwen3_5_text", "F32", 4, 1),
    ],
)
def test_ranks_give_the_tokens_of_one(tiny, tmp_path, kind, format, size, num_stages) -> None:
    """In bfloat16 ranks have the same blocks, and round sums elsewhere."""
    model = write(kind, format, tiny(kind, **SIZES), tmp_path)
    options = {"disable_hybrid_kv_cache_manager": True}
    for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 0.05)):
        one = start_executor(model, dtype=dtype, **options)
        several = RankThreads.of(model, size, num_stages, dtype=dtype, **options)
        wanted, found = answers(one), answers(several)
        if dtype == "float32":
            assert [row.output for row in found] == [row.output for row in wanted]
        pairs = zip(found, wanted, strict=True)
        for mine, theirs in pairs if format != "F32" or dtype == "float32" else ():
            np.testing.assert_allclose(numbers(mine), numbers(theirs), atol=tolerance)
            if size == 1:
                assert numbers(mine) == numbers(theirs)
        several.shutdown()


def test_blocks_are_not_cut() -> None:
    """A rank has whole blocks, or the numbers of a part of one."""
    rows = torch.arange(2 * 4 * 34, dtype=torch.uint8).view(2, -1)
    packed = PackedRows(rows, "Q8_0")
    assert packed.can_cut(Slice(1, 64, 128, 128)) and not packed.can_cut(Slice(1, 0, 48, 128))
    assert torch.equal(packed.kept(Slice(1, 64, 128, 128)).rows, rows[:, 68:])
    assert packed.kept(Slice(0, 1, 2, 2)).rows.data_ptr() == rows[1].data_ptr()
    columns = torch.arange(128)
    apart = ColumnOrder(torch.cat([columns[96:], columns[32:64]]), 128)
    assert packed.can_cut(apart)
    assert torch.equal(packed.kept(apart).rows, torch.cat([rows[:, 102:], rows[:, 34:68]], 1))
    assert not packed.can_cut(ColumnOrder(columns[16:80], 128))
    assert not packed.can_cut(ColumnOrder(torch.cat([columns[:16], columns[64:80]]), 128))


def test_a_cut_through_blocks_is_refused(tiny, tmp_path) -> None:
    write_quantized(tmp_path / "model", tiny("llama", intermediate_size=128), "awq", group_size=64)
    with pytest.raises(InvalidParameterError, match="tensor_parallel_size: must divide the .*INT4"):
        RankThreads.of(tmp_path / "model", 4, dtype="bfloat16")


def test_each_rank_has_an_entry_of_packed_weights(tiny, tmp_path) -> None:
    options = {"quantization": "int8", "packed_weights_cache": str(tmp_path)}
    model, found = tiny("llama"), []
    for size, num_stages in ((2, 2), (2, 2), (2, 1)):
        several = RankThreads.of(model, size, num_stages, **options)
        found.append([(row.output, numbers(row)) for row in answers(several)])
        several.shutdown()
        if not found[1:]:
            written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(written) == 4 and found[0] == found[1]
    now = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(now) == 6 and {path: now[path] for path in written} == written
