"""Sampling on the CPU: each row pays only for what it asks.
May know: torch on CPUs, the contracts.
Must not know: models, requests."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..reference.sampling import GREEDY_BELOW, WORD, gumbel_from_words, philox4x32, random_gumbel
from ..registry import register
from .device import PRIORITY, is_cpu

NOISE_CHUNK = 2**18  # logits per pass of the generator, so that its temporaries stay in the cache


class Filters(NamedTuple):
    """What a row's filters and its noise depend on; each [R], as in sample_tokens, but top_k is V where it keeps all."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor

    def at(self, rows: Tensor) -> Filters:
        return Filters(*(column[rows] for column in self))


@register("sample_tokens", name="cpu", predicate=is_cpu, priority=PRIORITY)
def sample_tokens(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    token_ids = logits.argmax(-1)
    vocab_size = logits.shape[1]
    top_k = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    is_random = temperature >= GREEDY_BELOW
    is_filtered = (top_k < vocab_size) | (top_p < 1) | (min_p > 0)

    rows = (is_random & ~is_filtered).nonzero().flatten()
    for chunk in rows.split(max(1, NOISE_CHUNK // vocab_size)) if len(rows) else ():
        scaled = _scale(logits[chunk], temperature[chunk])
        token_ids[chunk] = scaled.add_(random_gumbel(seeds[chunk], positions[chunk], vocab_size)).argmax(-1)
    rows = (is_random & is_filtered).nonzero().flatten()
    if len(rows):
        filters = Filters(top_k, top_p, min_p, seeds, positions).at(rows)
        token_ids[rows] = _sample_filtered(_scale(logits[rows], temperature[rows]), filters)
    return token_ids


def _scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """[R, V], in place: logits / temperature, shifted so that the largest is 0."""
    return logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature[:, None])


def _sample_filtered(scaled: Tensor, filters: Filters) -> Tensor:
    """scaled [R, V] -> token ids [R]. First with each row's largest logits alone, then, for rows that need more, with all of them sorted."""
    vocab_size = scaled.shape[1]
    num_candidates = 256 if int(filters.top_k.max()) <= 128 else 1024
    if vocab_size <= 2 * num_candidates:
        return _draw(scaled, *scaled.sort(descending=True, stable=True), filters)[0]
    token_ids, needs_more = _draw(scaled, *_largest(scaled, num_candidates), filters)
    rows = needs_more.nonzero().flatten()
    for row in rows.split(1) if len(rows) else ():
        token_ids[row] = _draw(scaled[row], *scaled[row].sort(descending=True, stable=True), filters.at(row))[0]
    return token_ids


def _largest(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, values and ids [R, count], descending, equals by id. Which of those equal to the last one are among
    them is arbitrary."""
    ids = scaled.topk(count, sorted=False).indices.sort().values
    values, order = scaled.gather(1, ids).sort(descending=True, stable=True)
    return values, ids.gather(1, order)


def _draw(scaled: Tensor, values: Tensor, ids: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """One token per row from its candidates [R, C], the largest of `scaled` [R, V], in the contract's order.

    Returns token ids [R], and [R] bool: the filters reach the last candidate, so that this row needs more of them.
    """
    is_partial = values.shape[1] < scaled.shape[1]
    weights = values.double().exp()
    kept = (weights >= filters.min_p[:, None]) & (torch.arange(values.shape[1]) < filters.top_k[:, None])
    weights = torch.where(kept, weights, 0.0)
    total = weights.sum(-1)
    for row in kept[:, -1].nonzero().flatten().tolist() if is_partial else ():
        all_weights = scaled[row].exp()
        total[row] = torch.where(all_weights >= filters.min_p[row], all_weights, 0.0).sum(dtype=torch.float64)
    mass_before = weights.cumsum(-1) - weights
    kept &= (mass_before < (filters.top_p * total)[:, None]) | (filters.top_p >= 1)[:, None]
    needs_more = (kept & (values == values[:, -1:])).any(-1) if is_partial else torch.zeros(len(ids), dtype=torch.bool)

    width = int(kept.sum(-1).max())
    noise = _gumbel_at(ids[:, :width], filters.seeds, filters.positions)
    best = torch.where(kept[:, :width], values[:, :width] + noise, float("-inf")).argmax(-1, keepdim=True)
    return ids.gather(1, best).flatten(), needs_more


def _gumbel_at(ids: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """random_gumbel at some tokens: ids [R, C] -> [R, C] fp32."""
    seeds, positions = seeds[:, None], positions[:, None]
    counter = (ids >> 2, positions & WORD, positions >> 32 & WORD, torch.zeros_like(positions))
    words = torch.stack(philox4x32(counter, (seeds & WORD, seeds >> 32 & WORD)), dim=-1)
    return gumbel_from_words(words.gather(-1, (ids & 3)[..., None]).squeeze(-1))
