"""Layers from outside replace built-in ones where their condition holds."""

from typing import Any

import pytest
from quire import LLM, SamplingParams
from quire.executor.models import register_layer
from quire.executor.models.blocks import Attention, GatedMLP
from quire.executor.models.layer_registry import BUILT_IN, choose_layer, unregister_layer
from quire.executor.models.layers import RMSNorm
from quire.tests.executor.driver import start_executor

GREEDY = SamplingParams(temperature=0, max_tokens=12)


class MyMLP(GatedMLP):
    made: list[int] = []

    def __init__(self, make, config, layer, bias, is_merged=False, size=0):
        super().__init__(make, config, layer, bias, is_merged, size)
        self.made.append(layer)


class MyAttention(Attention):
    pass


class MyNorm(RMSNorm):
    pass


@pytest.fixture(scope="module")
def expected() -> dict[str | None, list[int]]:
    """The tokens of the built-in model, by quantization."""
    return {quantization: generate(quantization)[0] for quantization in (None, "int4")}


def generate(quantization: str | None) -> tuple[list[int], Any]:
    """Greedy tokens, and the engine's worker."""
    with LLM(engine="inproc", quantization=quantization) as llm:
        [output] = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
        worker = llm.llm_engine.client._engine.core.executor
        assert worker.runner.program is not None
        parts = [part for layer in worker.model.layers for part in (layer.mlp, layer.self_attn)]
        return output.outputs[0].token_ids, {type(part) for part in (*parts, worker.model.norm)}


@pytest.fixture
def replaced(request):
    built_in, layer, when = request.param
    MyMLP.made.clear()
    register_layer(built_in, layer, when=when)
    yield
    unregister_layer(built_in, layer)
    assert all(choose_layer(type(name, (), {}), None, 0).__name__ == name for name in BUILT_IN)


CASES = [
    ("GatedMLP", MyMLP, lambda config, layer: layer % 2 == 1),
    ("Attention", MyAttention, lambda config, layer: config.head_dim == 64),
    ("RMSNorm", MyNorm, lambda config, layer: layer is None),
]


@pytest.mark.parametrize("replaced", CASES, indirect=True, ids=lambda case: case[0])
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_a_subclass_gives_the_same_tokens(expected, replaced, quantization):
    """Replaced layers are quantized and recorded as the built-in ones are."""
    result, kinds = generate(quantization)
    assert kinds & {MyMLP, MyAttention, MyNorm}
    if MyMLP.made:
        assert MyMLP.made == [1, 3]
    assert result == expected[quantization]


def test_a_block_must_return_what_the_residual_stream_has(tiny):
    class Wide:
        name = "mlp"

        def __init__(self, *args, **kwargs):
            self.inner = GatedMLP(*args, **kwargs)

        def __call__(self, x):
            return self.inner(x).double()

        def weights(self, prefix):
            return self.inner.weights(prefix)

    register_layer("GatedMLP", Wide)
    try:
        with pytest.raises(ValueError, match=r"Wide returns \[\d+, \d+\] torch.float64; a block"):
            start_executor(tiny("qwen2"))
    finally:
        unregister_layer("GatedMLP", Wide)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown layer 'MLP'; there are: Attention, GatedMLP"):
        register_layer("MLP", MyMLP)
    with pytest.raises(ValueError, match="GatedMLP has no replacement"):
        unregister_layer("GatedMLP", MyMLP)


class OwnWeights(GatedMLP):
    """Of its matrices one is not made by `linear`."""

    def __init__(self, make, config, layer, bias, is_merged=False, size=0):
        super().__init__(make, config, layer, bias, is_merged, size)
        self.table = make.parameter(2, config.hidden_size)


@pytest.mark.parametrize("layer", [MyMLP, OwnWeights])
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_what_quantization_leaves_out_is_logged_once(tiny, caplog, layer, quantization):
    register_layer("GatedMLP", layer)
    try:
        with caplog.at_level("WARNING", "quire"):
            start_executor(tiny("llama"), dtype="bfloat16", quantization=quantization)
    finally:
        unregister_layer("GatedMLP", layer)
    warnings = [r.getMessage() for r in caplog.records if "quantization applies" in r.getMessage()]
    if layer is OwnWeights and quantization:
        [warning] = warnings
        assert "OwnWeights keeps matrices of its own, which stay bfloat16" in warning
    else:
        assert warnings == []
