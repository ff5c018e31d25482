"""Products of few rows with their neighbours, in Triton's interpreter: as exact as torch's, rounded
as the operations one by one, and whole models with the logits of the same operations.
"""

from collections import Counter

import pytest
import torch
from quire.executor.program import fused_pass
from quire.executor.program.fused_pass import FusedPass
from quire.executor.program.step_program import OpByOp
from quire.kernels import registry
from quire.kernels.triton import few_rows
from quire.tests.kernels.triton.interpreted.test_model import build, metadata

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
REFERENCE = registry.select("cpu", torch.float32, dict.fromkeys(registry.CONTRACTS, "reference"))


def one_by_one(x, weight, bias, norm, gate, residual, wide: torch.dtype):
    """The operations of the reference, with the product's sums in `wide`."""
    x = x if norm is None else REFERENCE.rms_norm(x, *norm)
    y = x.to(wide) @ weight.to(wide).T
    y = (y if bias is None else y + bias.to(wide)).to(x.dtype)
    if gate:
        return getattr(REFERENCE, f"{gate}_and_mul")(y)
    if residual is not None:
        residual = residual.clone()
        REFERENCE.add(y, residual)
        return residual
    return y


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter runs programs one after another."""
    monkeypatch.setattr(few_rows, "COLUMNS", (16,))
    few_rows.tile.cache_clear()
    yield
    few_rows.tile.cache_clear()


CASES = [
    # rows, in, out, neighbours
    (1, 600, 70, {"norm"}),
    (2, 264, 34, {"norm", "gate"}),
    (1, 130, 40, {"residual"}),
    (2, 520, 33, {"bias"}),
    (1, 257, 48, {"bias", "norm", "residual"}),
    (2, 96, 1056, {"bias", "norm", "gate"}),
]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_as_exact_as_the_operations_one_by_one(case, dtype):
    """An error of at most 1.5 times theirs, against sums in fp64."""
    rows, inputs, outputs, parts = case
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    x = normal(rows, inputs + 8)[:, :inputs]
    weight, bias = normal(outputs, inputs, scale=inputs**-0.5), normal(outputs)
    norm = (normal(inputs).to(torch.float32 if inputs == 264 else dtype), 1e-6)
    residual = normal(rows, outputs + 3)[:, :outputs]
    neighbours = (
        norm if "norm" in parts else None,
        ("silu" if inputs == 96 else "gelu_tanh") if "gate" in parts else "",
        residual if "residual" in parts else None,
    )
    own_bias = bias if "bias" in parts else None
    exact = one_by_one(x, weight, own_bias, *neighbours, torch.float64).double()
    theirs = one_by_one(x, weight, own_bias, *neighbours, torch.float32).double()
    mine = few_rows.multiply(x, weight, own_bias, *neighbours)
    assert mine.dtype == dtype and mine.shape == exact.shape
    if "residual" in parts:
        assert mine is residual
    # one step of the result's dtype: `exact` is itself rounded between the operations
    least = torch.finfo(dtype).eps * exact.abs().max()
    assert (mine - exact).abs().max() <= 1.5 * (theirs - exact).abs().max() + least


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_intermediate_results_are_rounded(dtype):
    """Numbers for which sums are exact: every bit is that of the operations one by one."""
    torch.manual_seed(0)
    weight = torch.randint(-2, 3, (64, 256)).to(dtype)
    x = torch.randint(-8, 9, (2, 256)).to(dtype) / 8
    norm = torch.randn(256).to(dtype), 1e-6
    residual, bias = torch.randn(2, 64).to(dtype), torch.randn(64).to(dtype)
    for neighbours in ((None, "silu", None), (None, "", residual)):
        expected = one_by_one(x, weight, bias, *neighbours, torch.float64)
        mine = few_rows.multiply(x, weight, bias, *neighbours)
        torch.testing.assert_close(mine, expected, rtol=0 if neighbours[1] == "" else 2e-7, atol=0)
    chosen = torch.eye(256)[:64].to(dtype)  # the product is the norm itself
    mine = few_rows.multiply(x, chosen, None, norm)
    if dtype != torch.float32:
        assert torch.equal(mine, REFERENCE.rms_norm(x, *norm)[:, :64])


@pytest.mark.parametrize("parts", [{"norm", "gate"}, {"bias", "residual"}], ids=str)
def test_the_bits_of_a_row_do_not_depend_on_the_other(parts, monkeypatch):
    """Of a weight with more chunks than are under way at once."""
    monkeypatch.setattr(few_rows, "DEPTH", 128)
    monkeypatch.setattr(few_rows, "HELD", 32)  # two chunks of 16 columns
    few_rows.tile.cache_clear()
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    x, weight, bias, norm = normal(2, 600), normal(40, 600), normal(40), (normal(600), 1e-6)

    def of(rows: slice) -> torch.Tensor:
        return few_rows.multiply(
            x[rows],
            weight,
            bias if "bias" in parts else None,
            norm if "norm" in parts else None,
            "silu" if "gate" in parts else "",
            torch.ones(2, 40).bfloat16()[rows] if "residual" in parts else None,
        )

    alone = [of(slice(row, row + 1)) for row in range(2)]
    assert torch.equal(of(slice(2)), torch.cat(alone))


def passes(name: str, rows: int, monkeypatch):
    """The hidden states and logits of a decode of `rows` requests: (operation by operation, fused,
    the fused calls).
    """
    monkeypatch.setattr(few_rows, "MOST_ROWS", ((1 << 40, 2),))
    kept, found = fused_pass.launch, []

    def launch(calls, results):
        found.append(calls)
        return kept(calls, results)

    monkeypatch.setattr(fused_pass, "launch", launch)
    tables = torch.arange(rows, dtype=torch.int32)[:, None] % 9
    positions, step = metadata([1] * rows, [1 + i % 9 for i in range(rows)], tables)
    token_ids, indices = torch.arange(rows, dtype=torch.int32) + 5, torch.arange(rows)
    results = []
    for kind in (OpByOp, FusedPass):
        model, ops = build(name, "cuda")
        for layer in model.attention_layers():
            layer.key_cache.normal_(generator=torch.Generator().manual_seed(1))
            layer.value_cache.normal_(generator=torch.Generator().manual_seed(2))
        with torch.inference_mode():
            results.append(kind(model, ops)(token_ids, positions, step, indices))
    return (*results, found)


LAYER = {"product": 4, "fused_qk_rope_reshape_and_cache": 1, "paged_attention": 1}
AROUND = {"embedding": 1, "rms_norm": 1, "linear": 1, "argmax": 1}  # the last norm, the head


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize(
    ("name", "rows", "more"),
    [
        ("Qwen2ForCausalLM", 1, {}),
        ("Qwen3ForCausalLM", 2, {}),
        ("Gemma2ForCausalLM", 2, None),
    ],
)
def test_a_decode_has_four_products_for_each_layer(name, rows, more, monkeypatch):
    """Two layers, with one launch for each product, position and attention."""
    expected, mine, (calls,) = passes(name, rows, monkeypatch)
    for one, other in zip(mine, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert torch.equal(mine[2], expected[2])
    counts = Counter(call.op for call in calls)
    if more is not None:
        layers = {op: 2 * count for op, count in LAYER.items()}
        assert counts == Counter(layers) + Counter(AROUND) + Counter(more)
    else:  # they have norms after their blocks, which stay
        assert counts["product"] == 8 and "gelu_tanh_and_mul" not in counts
        assert "silu_and_mul" not in counts


def test_experts_run_operation_by_operation(monkeypatch):
    monkeypatch.setattr(fused_pass, "launch", None)
    model, ops = build("GptOssForCausalLM", "cuda")
    run = FusedPass(model, ops)
    inputs = torch.zeros(1, dtype=torch.int32), *metadata([1], [1], torch.zeros(1, 1).int())
    with pytest.raises(fused_pass.Unrecordable, match="route_experts"), torch.inference_mode():
        fused_pass.noted(model, ops, *inputs, torch.zeros(1).long(), None)
    assert run._is_fused and isinstance(model.layers[0].self_attn.ops, registry.OpTable)
