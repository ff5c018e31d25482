"""Budgets of the sampling kernels, for a vocabulary of 151 936 tokens."""

import pytest
import torch
from quire.kernels.choice import LogitChanges
from quire.kernels.triton import choice, logits, logprobs, noise, sampling
from quire.tests.kernels.triton.budget import WIDE_LOAD, Budget, combinations, f32, i32, i64

B, V, N = 64, 151_936, 640
READS_ROWS = {
    "first_token_kernel",
    "tally_kernel",
    "choose_kernel",
    "chunk_logprobs_kernel",
    "change_kernel",
}


def sample() -> torch.Tensor:
    columns = i32(B), f32(B), f32(B), i64(B), i64(B)
    return sampling.sample_tokens(f32(B, V), f32(B), *columns, largest=i64(B))


def sample_unfiltered() -> torch.Tensor:
    columns = None, None, None, i64(B), i64(B)
    return sampling.sample_tokens(f32(B, V), f32(B), *columns, largest=i64(B))


def penalize() -> None:
    logits.apply_penalties(f32(B, V), i64(N), i64(N), i32(N), f32(N), f32(N), f32(N))


def change() -> torch.Tensor:
    changes = LogitChanges(
        *(i64(B), i64(B), i64(B), i32(B, V // 32)),
        *(i32(B + 1), i32(N), f32(N), i32(B + 1), i32(N), i32(N), f32(B, 3)),
    )
    return choice.change_logits(f32(B, V), i64(B), f32(B, V), changes)


def choose(columns: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, ...]:
    return choice.choose_tokens(f32(B, V), i64(B), *columns, f32(B, V), i64(B), 20)


# Only the launches that read whole rows have wide loads; test_budget checks each.
BUDGETS = [
    Budget("argmax", lambda: sampling.argmax(f32(B, V)), registers=64, wide_loads=False),
    Budget("sample_tokens", sample, registers=168, shared=16 * 1024, launches=2, wide_loads=False),
    Budget(
        "sample_tokens, no filters",
        sample_unfiltered,
        registers=80,
        shared=1024,
        wide_loads=False,
    ),
    Budget(
        "random_gumbel",
        lambda: noise.random_gumbel(i64(B), i64(B), V),
        registers=64,
        wide_loads=False,
    ),
    Budget(
        "gather_logprobs, 20",
        lambda: logprobs.gather_logprobs(f32(B, V), i64(B), 20),
        registers=128,
        launches=2,
        wide_loads=False,
    ),
    Budget("change_logits", change, registers=128, shared=1024, wide_loads=False),
    Budget(
        "choose_tokens, greedy",
        lambda: choose((None,) * 6),
        registers=128,
        wide_loads=False,
    ),
    Budget(
        "choose_tokens",
        lambda: choose((f32(B), i32(B), f32(B), f32(B), i64(B), i64(B))),
        registers=168,
        launches=2,
        wide_loads=False,
    ),
    Budget("apply_penalties", penalize, registers=40, wide_loads=False),
    Budget(
        "apply_grammar_bitmask",
        lambda: logits.apply_grammar_bitmask(f32(B, V), i32(B, V // 32), i64(B)),
        registers=40,
        wide_loads=False,
    ),
]


@pytest.mark.parametrize(("budget", "arch"), combinations(BUDGETS), ids=str)
def test_budget(budget, arch):
    for launch in budget.check(arch):
        assert launch.count(WIDE_LOAD) or launch.kernel not in READS_ROWS, str(launch)
