"""A pass whose products take their neighbours, with the reference's operations on a CPU: which
calls are left, and the results of the operations one by one.
"""

from collections import Counter

import torch
from quire.executor.models.decoder import Decoder
from quire.executor.models.layers import LayerFactory
from quire.executor.program.fused_pass import FusedPass, Placeholder, Unrecordable, fuse, noted
from quire.executor.program.step_program import OpByOp
from quire.executor.tracing.instruments import Instruments
from quire.executor.weights.loader import fill_with_random_weights
from quire.ipc.models.architectures import ARCHITECTURES
from quire.kernels import registry
from quire.kernels.ops import make_metadata

CPU = torch.device("cpu")
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 100,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
REFERENCE = dict.fromkeys(registry.CONTRACTS, "reference")


class Packed:
    """A packed weight that takes its neighbours, of up to two rows with a norm."""

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def __call__(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def logits(self, x):
        return self(x)

    def fuses(self, num_rows: int) -> bool:
        return num_rows <= 2

    def fused(self, x, norm=None, gate="", residual=None):
        ops = registry.select("cpu", x.dtype, REFERENCE)
        y = self(x if norm is None else ops.rms_norm(x, *norm))
        if gate:
            return getattr(ops, f"{gate}_and_mul")(y)
        return y if residual is None else residual.add_(y)


def make(rows: int, name: str = "Qwen3ForCausalLM", **more):
    row = ARCHITECTURES[name]
    ops = registry.select("cpu", torch.float32, REFERENCE, head_dim=16)
    ops.replace("pack_linear", Packed)
    factory = LayerFactory(ops, torch.float32, CPU)
    model = Decoder.of_row(row, row.parse(SHAPE | more), factory, 128)
    fill_with_random_weights(model, 0, lambda stage, fraction: None, factory.fill)
    for layer in model.attention_layers():
        layer.key_cache, layer.value_cache = torch.zeros(2, 33, 16, 2, 16)
    blocks = torch.arange(rows, dtype=torch.int32)[:, None]
    step = make_metadata(
        torch.arange(rows + 1, dtype=torch.int32),
        torch.ones(rows, dtype=torch.int32),
        [blocks],
        [blocks[:, 0].long() * 16],
        rows,
        [1] * rows,
        [1] * rows,
    )
    inputs = torch.arange(rows, dtype=torch.int32), torch.zeros(rows).long(), step
    return model, ops, (*inputs, torch.arange(rows))


def test_products_take_norms_gates_and_the_stream():
    per_layer = {"product": 4, "fused_qk_rope_reshape_and_cache": 1, "paged_attention": 1}
    around = {"embedding": 1, "rms_norm": 1, "linear": 1, "argmax": 1}
    for rows in (1, 2):
        model, ops, inputs = make(rows)
        with torch.inference_mode():
            calls, results = noted(model, ops, *inputs, None)
            counts = Counter(call.op for call in fuse(calls, results, ops))
            expected = Counter({op: 2 * count for op, count in per_layer.items()})
            assert counts == expected + Counter(around)
            assert len(calls) == 22 and all(isinstance(one, Placeholder) for one in results)
            both = [kind(model, ops)(*inputs) for kind in (OpByOp, FusedPass)]
        for one, other in zip(*both, strict=True):
            assert torch.equal(one, other)


def test_a_pass_that_leaves_its_tensors_in_the_model_can_be_repeated():
    """Gemma 4 keeps the inputs of its layers until its next pass."""
    more = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100}
    more |= {"layer_types": ["full_attention"] * 2, "global_head_dim": 16}
    more |= {"hidden_act": "gelu_pytorch_tanh"}
    model, ops, inputs = make(2, "Gemma4ForCausalLM", **more)
    passes = FusedPass(model, ops)
    with torch.inference_mode():
        found = [run(*inputs) for run in (OpByOp(model, ops), passes, passes)]
    assert passes._is_fused
    for one, other, again in zip(*found, strict=True):
        assert torch.equal(one, other) and torch.equal(one, again)


def test_a_pass_that_cannot_be_noted_leaves_the_model_as_it_was(monkeypatch):
    model, ops, inputs = make(1)
    before = [vars(layer).copy() for layer in model.layers]
    attach = Instruments.attach

    def fail(self, owner):
        attach(self, owner)
        raise Unrecordable("something else")

    monkeypatch.setattr(Instruments, "attach", fail)
    passes = FusedPass(model, ops)
    with torch.inference_mode():
        found = passes(*inputs)
        assert all(map(torch.equal, found, OpByOp(model, ops)(*inputs)))
    assert not passes._is_fused and [vars(layer) for layer in model.layers] == before


def test_a_result_that_is_read_twice_is_kept():
    """The norm before an MLP stays, if more than its projection reads it."""
    model, ops, inputs = make(1)
    with torch.inference_mode():
        calls, results = noted(model, ops, *inputs, None)
    normed = next(call for call in calls if call.op == "fused_add_rms_norm").args[0]
    with torch.inference_mode():
        kept = fuse(calls, (*results, normed), ops)
        gone = fuse(calls, results, ops)
    assert [call.op for call in kept].count("rms_norm") == 2
    assert [call.op for call in gone].count("rms_norm") == 1


def test_a_model_without_such_weights_runs_operation_by_operation():
    model, ops, inputs = make(1)
    for layer in model.layers:
        for one in (layer.self_attn.qkv_proj, layer.self_attn.o_proj):
            one.use(one.packed.__call__)
        for one in (layer.mlp.gate_up_proj, layer.mlp.down_proj):
            one.use(one.packed.__call__)
    model.lm_head.use(model.lm_head.packed.__call__)  # a bound method has no `fuses`
    assert not FusedPass(model, ops)._is_fused
