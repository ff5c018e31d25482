"""The mixer of Mamba 2: its result is that of the formula, whole and in chunks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from quire.executor.models.layers import LayerFactory
from quire.executor.models.mamba import Mamba2Mixer
from quire.ipc.models.mamba_config import Mamba2Config
from quire.kernels import registry
from quire.kernels.metadata import AttentionMetadata, StateRows

HIDDEN, NUM_TOKENS, NUM_PLACES = 24, 41, 3
PLAIN = Mamba2Config(num_heads=6, head_dim=4, state_size=5, num_groups=2, kernel_size=4, eps=1e-5)
FALCON = replace(
    PLAIN, has_norm=False, has_conv_bias=False, part_scales=(0.5, 1.2, 1.0, 0.8, 0.9), out_scale=0.7
)
VARIANTS = {
    "gate first": PLAIN,
    "gate last": replace(PLAIN, gate_first=False, has_in_bias=True, has_out_bias=True),
    "no norm, factors": FALCON,
    "one group, two taps": replace(PLAIN, num_groups=1, kernel_size=2),
}


def make_mixer(config: Mamba2Config) -> tuple[Mamba2Mixer, dict[str, torch.Tensor]]:
    """A mixer with random weights and memory for states, and its weights by name."""
    make = LayerFactory(registry.select("cpu", torch.float32), torch.float32, torch.device("cpu"))
    mixer = Mamba2Mixer(make, HIDDEN, config)
    generator = torch.Generator().manual_seed(3)
    weights = {}
    table = list(mixer.weights(""))
    assert {name: list(tensor.shape) for name, tensor in table} == dict(
        config.weight_shapes(HIDDEN)
    )
    for name, tensor in table:
        weights[name] = values = 0.5 * torch.randn(tensor.shape, generator=generator)
        make.fill(tensor, values.clone())
    garbage = (
        torch.full((NUM_PLACES, *part.shape), 7.0, dtype=torch.float32)
        for part in config.state_parts
    )
    mixer.bind_states(list(garbage))
    return mixer, weights


def run(mixer: Mamba2Mixer, x: torch.Tensor, first: int, place: int) -> torch.Tensor:
    """The mixer's result for the tokens x of a request, which begin at position `first`."""
    count = len(x)
    states = StateRows(
        torch.tensor([place], dtype=torch.int32),
        torch.tensor([first + count - 1]),
        torch.tensor([-1]),
        torch.tensor([0], dtype=torch.int32),
    )
    length = first + count
    metadata = AttentionMetadata(
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(count, dtype=torch.int64),
        int(count == 1),
        [count],
        [length],
        states=states,
    )
    with torch.inference_mode():
        return mixer(x, torch.arange(first, length), metadata)


def expected(config: Mamba2Config, w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The paper's formula in fp64, one token after another."""
    w = {name: values.double() for name, values in w.items()}
    zeros, heads_of_group = torch.zeros(1).double(), config.num_heads // config.num_groups
    p = x.double() @ w["in_proj.weight"].T + w.get("in_proj.bias", zeros)
    scales = torch.tensor(config.part_scales).double()
    p = p * scales.repeat_interleave(torch.tensor(config.part_sizes))
    z, mixed, dt = p.split([config.inner_size, config.conv_size, config.num_heads], 1)
    padded = F.pad(mixed.T, (config.kernel_size - 1, 0))[None]
    bias = w.get("conv1d.bias")
    mixed = F.silu(F.conv1d(padded, w["conv1d.weight"], bias, groups=config.conv_size))[0].T
    x, b, c = mixed.split(config.part_sizes[1:4], 1)
    x = x.unflatten(1, (config.num_heads, -1))
    b, c = (
        part.unflatten(1, (config.num_groups, -1)).repeat_interleave(heads_of_group, 1)
        for part in (b, c)
    )
    dt = F.softplus(dt + w["dt_bias"])
    state, outputs = torch.zeros(*x.shape[1:], config.state_size).double(), []
    for t in range(len(x)):
        keep = (-dt[t] * w["A_log"].exp()).exp()
        state = keep[:, None, None] * state
        state = state + (dt[t][:, None] * x[t])[:, :, None] * b[t][:, None, :]
        outputs.append((state * c[t][:, None, :]).sum(2) + w["D"][:, None] * x[t])
    y, gate = torch.stack(outputs).flatten(1), F.silu(z)
    if config.has_norm:
        y = y * gate if config.gate_first else y
        groups = y.unflatten(1, (config.num_groups, -1))
        groups = groups * (groups.square().mean(2, keepdim=True) + config.eps).rsqrt()
        y = groups.flatten(1) * w["norm.weight"]
    if not config.has_norm or not config.gate_first:
        y = y * gate
    return (y @ w["out_proj.weight"].T + w.get("out_proj.bias", zeros)) * config.out_scale


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_result_is_that_of_the_formula(variant: str) -> None:
    config = VARIANTS[variant]
    mixer, weights = make_mixer(config)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5))
    whole = run(mixer, x, 0, 1)
    torch.testing.assert_close(whole.double(), expected(config, weights, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(1,) * NUM_TOKENS, (2, 30, 9)])
def test_chunks_go_on_from_the_states(sizes: tuple[int, ...]) -> None:
    """Nearly the same bits: torch's vectors end elsewhere."""
    mixer, _ = make_mixer(FALCON)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5))
    whole, first, chunks = run(mixer, x, 0, 1), 0, []
    for chunk in x.split(list(sizes)):
        chunks.append(run(mixer, chunk, first, 2))
        first += len(chunk)
    torch.testing.assert_close(torch.cat(chunks), whole, rtol=1e-5, atol=1e-5)
