"""Everything that layers call is found, with its path, and put back."""

import pytest
import torch
from quire.executor.tracing.instruments import Instruments, address_of, walk
from quire.kernels.cpu.native.library import library
from quire.tests.executor.driver import start_executor


@pytest.fixture(scope="module")
def runner(tiny):
    return start_executor(tiny("llama"), cpu_isa="auto" if library else "none").runner


def test_layers_have_the_names_of_the_checkpoint(runner):
    paths = [path for _, path in walk(runner.model)]
    assert len(set(paths)) == len(paths)
    assert {"", "embed_tokens", "norm", "lm_head", "layers.2.self_attn.o_proj"} <= set(paths)
    assert {"layers.0.input_layernorm", "layers.0.post_attention_layernorm"} <= set(paths)
    stored = {name.removesuffix(".weight") for name, _ in _named(runner)}
    assert {f"model.{path}" for path in paths if path.endswith(("o_proj", "layernorm"))} <= stored


def _named(runner):
    """The names of the checkpoint that do not need a weight."""
    for i in range(runner.model.config.num_hidden_layers):
        prefix = f"model.layers.{i}."
        for name in ("self_attn.o_proj", "input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", None


def test_every_call_passes_through_and_is_put_back(runner):
    sites = []

    def around(site, function, arguments, keywords):
        sites.append(site)
        return function(*arguments, **keywords)

    before = [(id(layer), dict(vars(layer))) for layer, _ in walk(runner.model)]
    instruments = Instruments(runner.ops, around, lambda site: None, lambda site: None)
    x = torch.randn(3, runner.model.config.hidden_size)
    plain = runner.model.layers[0].mlp(x.clone())
    instruments.attach(runner.model)
    assert torch.equal(runner.model.layers[0].mlp(x.clone()), plain)
    assert [(site.module, site.op) for site in sites] == [
        ("layers.0.mlp.gate_up_proj", "linear"),
        ("layers.0.mlp", "silu_and_mul"),
        ("layers.0.mlp.down_proj", "linear"),
    ]
    assert sites[0].weight_bytes > 0 and sites[0].sizes[0] == x.shape[1]
    runner.model.compute_logits(x)
    assert sites[-1].module == "lm_head"
    instruments.detach()
    assert [(id(layer), dict(vars(layer))) for layer, _ in walk(runner.model)] == before
    runner.model.layers[0].mlp(x)
    assert len(sites) == 4


def test_weights_are_found_by_address(runner):
    instruments = Instruments(runner.ops, None, lambda site: None, lambda site: None)
    instruments.attach(runner.model)
    norm = runner.model.norm.weight
    assert instruments.weights[address_of(norm)] == norm.nbytes
    layer = runner.model.layers[0].self_attn
    assert address_of(layer.key_cache) not in instruments.weights
    instruments.detach()


def test_a_tensor_without_an_address_has_a_number():
    tensor = torch.ones(2, 2).to_mkldnn()
    assert address_of(tensor) == id(tensor)
