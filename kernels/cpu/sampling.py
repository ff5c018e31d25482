"""Samples on the CPU. The cost of a row depends on its own parameters.

Must not know: models, requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..reference.sampling import GREEDY_BELOW, gumbel_from_words, no_filters
from ..registry import register
from .device import PRIORITY, is_cpu

NOISE_CHUNK = 2**15  # tokens per pass of the generator; temporaries stay in the cache
LOGPROBS_CHUNK = 2**18  # logits per pass of gather_logprobs, likewise

# Philox's constants: the mask and width of a word, the multipliers of (c0, c2) [2, 1, 1], and the
# key increments of the rounds [rounds, 2, 1, 1].
WORD, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)[:, None, None]
KEY_STEPS = (
    np.arange(10, dtype=np.uint64)[:, None, None, None]
    * np.array([0x9E3779B9, 0xBB67AE85], np.uint64)[:, None, None]
)


class Filters(NamedTuple):
    """The parameters of a row's choice besides its logits; each [R], as in sample_tokens.

    top_k is V where it keeps all tokens.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor

    def at(self, rows: Tensor) -> Filters:
        return Filters(*(column[rows] for column in self))


@register("argmax", name="cpu", predicate=is_cpu, priority=PRIORITY)
def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    # A sum is finite exactly if every term is, because finite logits are far from overflowing it.
    # It takes one pass and one number per row.
    return _argmax(logits), logits.sum(-1).isfinite()


@register("sample_tokens", name="cpu", predicate=is_cpu, priority=PRIORITY)
def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    largest: Tensor | None = None,
) -> Tensor:
    if top_k is None or top_p is None or min_p is None:
        top_k, top_p, min_p = no_filters(len(logits), logits.device)
    token_ids = _argmax(logits)
    vocab_size = logits.shape[1]
    top_k = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    filters = Filters(temperature, top_k, top_p, min_p, seeds, positions)
    is_random = temperature >= GREEDY_BELOW
    is_filtered = (top_k < vocab_size) | (top_p < 1) | (min_p > 0)
    for is_mine, sample in (
        (is_random & ~is_filtered, _sample_all),
        (is_random & is_filtered, _sample_filtered),
    ):
        rows = is_mine.nonzero().flatten()
        if len(rows) == len(logits) > 0:
            token_ids = sample(logits, filters)
        elif len(rows):
            token_ids[rows] = sample(logits[rows], filters.at(rows))
    return token_ids


def _argmax(values: Tensor) -> Tensor:
    """[R, V] -> [R], the lowest index of equals.

    numpy's argmax is vectorised, torch's on a CPU is not: 8 us against 180 at [32, 4096].
    """
    return torch.from_numpy(values.numpy().argmax(-1))


def _scale(values: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """values [R, ...] / temperature [R], after subtracting the rows' largest logits [R, 1]"""
    return (values - largest).div_(temperature[:, None])


def _sample_all(logits: Tensor, filters: Filters) -> Tensor:
    """logits [R, V] -> token ids [R], for rows without filters."""
    token_ids = torch.empty(len(logits), dtype=torch.int64)
    for rows in torch.arange(len(logits)).split(max(1, NOISE_CHUNK // logits.shape[1])):
        some, chosen = logits[rows], filters.at(rows)
        scaled = _scale(some, some.amax(-1, keepdim=True), chosen.temperature)
        token_ids[rows] = _argmax(
            scaled.add_(random_gumbel(chosen.seeds, chosen.positions, logits.shape[1]))
        )
    return token_ids


def _sample_filtered(logits: Tensor, filters: Filters) -> Tensor:
    """logits [R, V] -> token ids [R].

    Tries the largest logits of each row first, then more of them for rows whose filters need more.
    """
    # In a small vocabulary 1024 is nearly all of it, and sorting it costs more than a second pass
    # for the rows that need it.
    num_candidates = 256 if int(filters.top_k.max()) <= 128 or logits.shape[1] <= 8192 else 1024
    token_ids, needs_more = _draw(logits, num_candidates, filters)
    while len(rows := needs_more.nonzero().flatten()):
        num_candidates *= 16
        token_ids[rows], needs_more[rows] = _draw(logits[rows], num_candidates, filters.at(rows))
    return token_ids


def _draw(logits: Tensor, num_candidates: int, filters: Filters) -> tuple[Tensor, Tensor]:
    """Draws one token per row of logits [R, V] from its largest candidates.

    Returns token ids [R] and [R] bool: True where the filters reach the last candidate, so that the
    row needs more candidates.
    """
    is_partial = 2 * num_candidates < logits.shape[1]
    values, ids = (
        _largest(logits, num_candidates)
        if is_partial
        else logits.sort(descending=True, stable=True)
    )
    largest, last = values[:, :1], values[:, -1:]
    scaled = _scale(values, largest, filters.temperature)
    weights = scaled.double().exp_()
    kept = (weights >= filters.min_p[:, None]) & (
        torch.arange(values.shape[1]) < filters.top_k[:, None]
    )
    weights = torch.where(kept, weights, 0.0)
    total = weights.sum(-1)
    # top_p is a share of this mass. Where the other filters keep all candidates, it is the mass of
    # the whole row (top_k then keeps all, or reaches the last candidate and the row is repeated).
    for row in kept[:, -1].nonzero().flatten().tolist() if is_partial else ():
        all_weights = _scale(logits[row, None], largest[row], filters.temperature[row, None]).exp_()
        total[row] = torch.where(all_weights >= filters.min_p[row], all_weights, 0.0).sum(
            dtype=torch.float64
        )
    mass_before = weights.cumsum(-1) - weights
    kept &= (mass_before < (filters.top_p * total)[:, None]) | (filters.top_p >= 1)[:, None]
    # Which of the logits equal to the last candidate's are candidates is arbitrary, so none of them
    # may be kept.
    needs_more = (
        (kept & (values == last)).any(-1) if is_partial else torch.zeros(len(ids), dtype=torch.bool)
    )

    width = max(1, int(kept.sum(-1).max()))  # rows with NaN keep nothing
    noise = _gumbel_at(ids[:, :width], filters.seeds, filters.positions)
    best = (
        noise.add_(scaled[:, :width])
        .masked_fill_(~kept[:, :width], float("-inf"))
        .argmax(-1, keepdim=True)
    )
    return ids.gather(1, best).flatten(), needs_more


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest logits of each row: values and ids [R, count], descending, equals
    by id.

    Which of the logits equal to the last one are among them is arbitrary.
    """
    ids = logits.topk(count, sorted=False).indices.sort().values
    values, order = logits.gather(1, ids).sort(descending=True, stable=True)
    return values, ids.gather(1, order)


@register("gather_logprobs", name="cpu", predicate=is_cpu, priority=PRIORITY)
def gather_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """It works on a few rows at a time, so that temporaries stay in the cache and no second [B, V]
    is allocated.

    Ranks are counted in numpy: torch's sum over booleans takes longer than the logarithms.
    """
    num_rows, chosen = max(1, LOGPROBS_CHUNK // logits.shape[1]), token_ids[:, None]
    if len(logits) <= num_rows:
        return _gather_logprobs(logits, chosen, k)
    pieces = [
        _gather_logprobs(*rows, k) for rows in zip(logits.split(num_rows), chosen.split(num_rows))
    ]
    ids, logprobs, ranks = zip(*pieces)
    return torch.cat(ids), torch.cat(logprobs), torch.cat(ranks)


def _gather_logprobs(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits [R, V], chosen [R, 1]"""
    logprobs = logits.log_softmax(-1)
    top, top_ids = logprobs.topk(k, dim=-1)
    is_likelier = logits.numpy() > logits.gather(1, chosen).numpy()
    ranks = np.count_nonzero(is_likelier, axis=-1).astype(np.int32) + 1
    return (
        torch.cat((chosen, top_ids), dim=1).int(),
        torch.cat((logprobs.gather(1, chosen), top), dim=1),
        torch.from_numpy(ranks),
    )


# ---------------------------------------------------------------- random numbers


@register("random_gumbel", name="cpu", predicate=is_cpu, priority=PRIORITY)
def random_gumbel(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    chunks = [
        _words(quads[None, :], seeds, positions)
        for quads in torch.arange((num_tokens + 3) // 4).split(NOISE_CHUNK // 4)
    ]
    return gumbel_from_words(torch.cat(chunks, dim=1).flatten(1)[:, :num_tokens])


def _gumbel_at(ids: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Computes `random_gumbel` for some tokens only: ids [R, C] -> [R, C] fp32."""
    words = _words(ids >> 2, seeds, positions)
    return gumbel_from_words(words.gather(-1, (ids & 3)[..., None]).squeeze(-1))


def _words(quads: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Returns the four Philox words of each quad of tokens: quads [R or 1, C], seeds and positions
    [R] -> [R, C, 4] i64.

    It computes the reference's rounds in numpy, which is twice as fast as torch here. The words of
    the counter are kept in pairs, (c0, c2) and (c1, c3). The high bits of the second pair are
    masked only before a multiplication.
    """
    key = seeds.numpy().view(np.uint64)
    counter = positions.numpy().view(np.uint64)
    even = np.empty((2, len(key), quads.shape[1]), np.uint64)
    even[0], even[1] = quads.numpy().view(np.uint64), (counter >> HALF)[:, None]
    odd = np.stack((counter & WORD, np.zeros_like(counter)))[:, :, None]
    for round_key in (np.stack((key & WORD, key >> HALF))[:, :, None] + KEY_STEPS) & WORD:
        products = (even * MULTIPLIERS)[::-1]
        even = products >> HALF
        even ^= odd
        even ^= round_key
        even &= WORD
        odd = products
    words = np.stack((even[0], odd[0], even[1], odd[1]), axis=-1)
    words &= WORD
    return torch.from_numpy(words.view(np.int64))
