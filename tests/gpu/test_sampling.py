"""Sampling on a GPU: the CPU reference's tokens for real vocabulary sizes, in any batch, eager and
from a CUDA graph.
"""

import pytest
import torch
from quire.kernels import registry
from quire.kernels.ops import LogitChanges
from quire.kernels.reference import sampling as reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICE, NEUTRAL = "cuda", {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
FILTERS = [
    {},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 20_000},
    {"top_p": 0.1},
    {"top_p": 0.95},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 3000, "top_p": 0.9, "min_p": 0.02},
    {"top_p": 0.8, "min_p": 0.05},
    {"temperature": 5.0, "top_p": 0.5},
]


def inputs(rows: int, vocab_size: int, scale: float) -> list[torch.Tensor]:
    """In host memory: logits, the filters' columns, seeds, positions."""
    torch.manual_seed(vocab_size)
    logits = scale * torch.randn(rows, vocab_size)
    logits[::2] = logits[::2].bfloat16().float()
    columns = [
        torch.tensor([(NEUTRAL | FILTERS[row % len(FILTERS)])[name] for row in range(rows)])
        for name in NEUTRAL
    ]
    return [
        logits,
        *columns,
        torch.randint(-(2**63), 2**63 - 1, (rows,)),
        torch.randint(0, 2**40, (rows,)),
    ]


@pytest.fixture(scope="module")
def ops():
    return registry.select(DEVICE, torch.float32)


@pytest.mark.parametrize(
    ("rows", "vocab_size"), [(2000, 90), (65, 32_000), (39, 151_936), (26, 50_257)]
)
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_the_reference_samples_the_same_tokens(ops, rows, vocab_size, scale):
    """Draws differ only if two scores are within a logarithm's rounding: one in a million."""
    host = inputs(rows, vocab_size, scale)
    device = [column.to(DEVICE) for column in host]
    drawn = ops.sample_tokens(*device).cpu()
    assert torch.equal(drawn, reference.sample_tokens(*host))
    for row in range(min(rows, 13)):
        assert torch.equal(
            ops.sample_tokens(*(column[row : row + 1] for column in device)).cpu(),
            drawn[row : row + 1],
        )


def test_without_filters_the_same_tokens(ops):
    logits, temperature, *_, seeds, positions = (
        column.to(DEVICE) for column in inputs(64, 151_936, 2.0)
    )
    neutral = [torch.full((64,), value, device=DEVICE) for value in (0, 1.0, 0.0)]
    drawn = ops.sample_tokens(logits, temperature, None, None, None, seeds, positions)
    assert torch.equal(drawn, ops.sample_tokens(logits, temperature, *neutral, seeds, positions))


def test_a_graph_reads_its_memory_at_replay(ops):
    first, second = (
        [column.to(DEVICE) for column in inputs(16, 32_000, scale)] for scale in (1.0, 3.0)
    )
    memory = [column.clone() for column in first]
    ops.sample_tokens(*memory)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn, largest = ops.sample_tokens(*memory), ops.argmax(memory[0])
    for columns in (first, second, first):
        for place, column in zip(memory, columns, strict=True):
            place.copy_(column)
        graph.replay()
        assert (
            torch.equal(drawn, ops.sample_tokens(*columns))
            and torch.equal(largest[0], columns[0].argmax(-1))
            and largest[1].all()
        )


@pytest.mark.parametrize("k", [0, 1, 20, 100])
def test_log_probabilities(ops, k):
    torch.manual_seed(k)
    logits = torch.stack([torch.randperm(151_936) for _ in range(9)]) * 2e-4  # all different
    token_ids = torch.randint(0, 151_936, (9,))
    given = ops.gather_logprobs(logits.to(DEVICE), token_ids.to(DEVICE), k)
    for mine, theirs in zip(given, reference.gather_logprobs(logits, token_ids, k), strict=True):
        torch.testing.assert_close(
            mine.cpu(), theirs, rtol=1e-6, atol=1e-5 if theirs.is_floating_point() else 0
        )


@pytest.mark.parametrize("k", [0, 20])
def test_one_launch_draws_and_scores_as_two_operations(ops, k):
    """The tokens are the same. Sums of probabilities may be of another order."""
    logits, *columns = (column.to(DEVICE) for column in inputs(39, 151_936, 2.0))
    largest, raw = ops.argmax(logits)[0], logits.flip(0).contiguous()
    raw_rows = torch.arange(39, device=DEVICE) % 3 - 2  # not scored, the row's own, or of raw
    drawn = ops.sample_tokens(logits, *columns)
    for _ in range(2):  # the counters are 0 again
        token_ids, *scores = ops.choose_tokens(logits, largest, *columns, raw, raw_rows, k)
        assert torch.equal(token_ids, drawn)
        for raw_row, values in ((-1, logits), (0, raw[:1].expand_as(logits))):
            mine = (raw_rows == raw_row).nonzero().flatten()
            expected = ops.gather_logprobs(values[mine].contiguous(), drawn[mine], k)
            for given, wanted in zip(scores, expected, strict=True):
                torch.testing.assert_close(given[mine], wanted, rtol=1e-6, atol=1e-5)


def test_all_changes_of_logits_in_one_launch(ops):
    torch.manual_seed(0)
    rows, vocab_size, count = 9, 151_936, 1000
    logits = torch.randn(rows, vocab_size, device=DEVICE)
    expected, raw = logits.clone(), torch.empty(1, vocab_size, device=DEVICE)
    masks = torch.randint(-(2**31), 2**31 - 1, (rows, vocab_size // 32), dtype=torch.int32)
    tokens = torch.stack([torch.randperm(vocab_size)[:count] for _ in range(rows)]).flatten()
    counts, values = torch.randint(0, 3, (len(tokens),)).int(), torch.randn(len(tokens))
    penalties = torch.rand(rows, 3) + 0.5
    of_rows = torch.arange(rows)
    masks, tokens, counts, values, penalties, of_rows = (
        column.to(DEVICE) for column in (masks, tokens, counts, values, penalties, of_rows)
    )
    starts = (torch.arange(rows + 1, device=DEVICE) * count).int()
    kept = torch.where(of_rows == 4, 0, -1)
    edits, penalised = (starts, tokens.int(), values), (starts, tokens.int(), counts, penalties)
    largest = torch.zeros_like(of_rows)
    changes = LogitChanges(of_rows, kept, of_rows, masks, *edits, *penalised)
    peaks = ops.change_logits(logits, largest, raw, changes)
    assert torch.equal(raw[0], expected[4])
    pairs = of_rows.repeat_interleave(count)
    expected[pairs, tokens] += values
    factors = penalties.repeat_interleave(count, dim=0).unbind(1)
    ops.apply_penalties(expected, pairs, tokens, counts, *factors)
    ops.apply_grammar_bitmask(expected, masks, of_rows)
    assert torch.equal(logits, expected)
    assert torch.equal(peaks, expected.amax(-1)) and torch.equal(largest, ops.argmax(expected)[0])


def test_noise(ops):
    seeds, positions = inputs(64, 1000, 1.0)[-2:]
    noise = ops.random_gumbel(seeds.to(DEVICE), positions.to(DEVICE), 151_936).cpu()
    torch.testing.assert_close(
        noise, reference.random_gumbel(seeds, positions, 151_936), rtol=1e-6, atol=1e-6
    )
