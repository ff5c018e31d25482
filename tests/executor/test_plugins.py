"""Installed plugins: they reach every engine, and their faults are named."""

import pytest
from quire import LLM, SamplingParams
from quire.executor.plugins import load_plugins
from quire.ipc.errors import EngineStartError, ModelLoadError
from quire.kernels import registry
from quire.tests.installed_plugins import install_plugin

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


PLUGIN = """
from quire.kernels.registry import register

@register("silu_and_mul", name="mine")
def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    return gate.sigmoid() * gate * up
"""


def test_kernels_of_an_installed_package_reach_a_child_engine(tmp_path, monkeypatch):
    """The plugin is registered in the child process: it is not imported here, and naming it as an
    override would fail if it were not registered there.
    """
    install_plugin(tmp_path, PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with LLM(engine="process", kernels={"silu_and_mul": "mine"}, dtype="float32") as llm:
        mine = llm.generate("12 + 30 =", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert "mine" not in {
        implementation.name for implementation in registry.implementations("silu_and_mul")
    }
    # once installed it is also the default; the answer is the same
    with LLM(engine="process", dtype="float32") as llm:
        assert llm.generate("12 + 30 =", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == mine


@pytest.mark.parametrize(
    ("code", "problem", "line"),
    [
        ("\nraise ValueError('no such device')", "ValueError: no such device", 2),
        ("raise SystemExit('no licence')", "SystemExit: no licence", 1),
        ("import not_there", "ModuleNotFoundError: No module named 'not_there'", 1),
        ("import json\n\njson.loads('x')", "JSONDecodeError: Expecting value.*", 3),
        ("x = 1\ny = (", "SyntaxError: '\\(' was never closed .*", 2),
    ],
)
def test_a_broken_plugin_is_named_with_its_line(tmp_path, monkeypatch, code, problem, line):
    install_plugin(tmp_path, code)
    monkeypatch.syspath_prepend(str(tmp_path))
    sentence = f"the plugin mine = my_kernels cannot be loaded: {problem}"
    place = rf" \({tmp_path}/my_kernels\.py:{line}\)$"
    with pytest.raises(ModelLoadError, match=sentence + place):
        load_plugins()


WRONG_SHAPE = """
from quire.executor.models import register_layer

class Half:
    name = "mlp"
    def __init__(self, make, config, layer, bias, is_merged=False):
        self.parts = [make.parameter(config.intermediate_size, config.hidden_size) for _ in "gu"]
        self.down = make.parameter(config.hidden_size, config.intermediate_size)
    def __call__(self, x):
        return x[:, ::2]
    def weights(self, prefix):
        for name, part in zip(("gate_proj", "up_proj", "down_proj"), (*self.parts, self.down)):
            yield f"{prefix}{name}.weight", part

register_layer("GatedMLP", Half)
"""
WRONG_SHAPE_OF_A_KERNEL = """
from quire.kernels.registry import register

@register("silu_and_mul", name="halved")
def silu_and_mul(x):
    return x[:, ::4].contiguous()
"""
NO_REFERENCE = """
import torch
from quire.kernels.registry import operation

@operation
def mine(x: torch.Tensor) -> torch.Tensor:
    "x -> x"
"""
RAISES_AT_CONSTRUCTION = """
from quire.executor.models import register_layer

def make_layer(make, config, layer, bias, is_merged=False):
    raise KeyError("no table for layer 0")

register_layer("GatedMLP", make_layer)
"""


@pytest.mark.sampled(step=4)
@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (WRONG_SHAPE, r"my_kernels\.Half returns \[\d+, 128\].* here \[\d+, 256\]"),
        (
            WRONG_SHAPE_OF_A_KERNEL,
            r"the plugin mine = my_kernels failed: its implementation 'halved' of silu_and_mul "
            r"returns \[\d+, 320\] torch.bfloat16, not \[\d+, 640\]",
        ),
        (NO_REFERENCE, r"no implementation of mine \(of my_kernels\).* named 'reference'"),
        (
            RAISES_AT_CONSTRUCTION,
            r"the plugin mine = my_kernels failed: KeyError: 'no table for layer 0' "
            r"\(.*/my_kernels\.py:5\)",
        ),
    ],
    ids=["wrong_shape", "wrong_shape_of_a_kernel", "no_reference", "construction"],
)
def test_an_engine_refuses_to_start_with_a_faulty_plugin(tmp_path, monkeypatch, code, sentence):
    install_plugin(tmp_path, code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises((ModelLoadError, EngineStartError, ValueError), match=sentence):
        LLM(engine="process").close()


RAISES_LATER = """
from quire.kernels.registry import register

@register("silu_and_mul", name="mine")
def silu_and_mul(x):
    if len(x) >= 77:
        raise ValueError(f"no table for {len(x)} rows")
    gate, up = x.chunk(2, dim=-1)
    return gate.sigmoid() * gate * up
"""


def test_an_exception_in_a_kernel_ends_the_requests_of_its_step(tmp_path, monkeypatch):
    install_plugin(tmp_path, RAISES_LATER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with LLM(engine="process") as llm:
        before = llm.generate("12 + 30 =", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        failing, other = llm.generate(
            [{"prompt_token_ids": [5] * 77}, "12 + 30 ="], GREEDY, use_tqdm=False
        )
        after = llm.generate("12 + 30 =", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    problem = "the plugin mine = my_kernels failed: ValueError: no table for "
    assert failing.error is not None and failing.error.endswith("my_kernels.py:7)")
    assert failing.outputs[0].finish_reason == "error" and problem in failing.error
    if other.error is None:  # it may be in the step that fails
        assert other.outputs[0].token_ids == before
    else:
        assert problem in other.error
    assert before == after


IDLE = """
from quire.executor.models import register_layer
from quire.executor.models.blocks import GatedMLP
from quire.kernels.registry import register

class Narrow(GatedMLP):
    pass

class Experts(GatedMLP):
    pass

class First(GatedMLP):
    pass

register_layer("GatedMLP", Narrow, when=lambda config, layer: config.hidden_size == 1)
register_layer("MixtureOfExperts", Experts)
register_layer("GatedMLP", First, when=lambda config, layer: layer == 0)

@register("rms_norm", name="half", predicate=lambda facts: facts.device == "cuda")
def rms_norm(x, weight, eps):
    return x

@register("silu_and_mul", name="mine")
def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    return gate.sigmoid() * gate * up
"""


@pytest.mark.slow
def test_a_plugin_that_replaces_nothing_says_so(tmp_path, monkeypatch, capfd):
    """One whose layer or kernel is used is not named."""
    install_plugin(tmp_path, IDLE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    LLM(engine="process", kernels={"gelu": "reference"}).close()
    lines = [line for line in capfd.readouterr().err.splitlines() if " replaces no" in line]
    plugin = "the plugin mine = my_kernels"
    layers = "Qwen2ForCausalLM with"
    assert [line[line.index(plugin) :] for line in lines] == [
        f"{plugin} replaces no kernel of rms_norm: 'native' is used, because the predicate of "
        "'half' declines this model or its priority is lower",
        f"{plugin} replaces nothing in {layers} Narrow: its condition `when` holds for no layer, "
        "or another replaces them",
        f"{plugin} replaces nothing in {layers} Experts: the model has no layer of the kind "
        "MixtureOfExperts",
    ]
