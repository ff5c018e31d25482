"""Specifies sampling, with Philox numbers, filters over one sorted row, and Gumbel-max.

Must not know: speed.
"""

import functools

import torch
from torch import Tensor

from ..registry import register

# Lower temperatures are greedy, as in vLLM: dividing by them would overflow.
GREEDY_BELOW = 1e-5
LARGEST_U = 1 - 2**-24  # the largest fp32 below 1; keeps the noise finite
WORD = 0xFFFFFFFF


def philox4x32(
    counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor], rounds: int = 10
) -> tuple[Tensor, ...]:
    """Four words of counter and two of key -> four random words.

    Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Words are
    i64 tensors that hold 32 bits each; shapes broadcast. The product of two words wraps in i64, but
    its 64 bits are correct; an arithmetic shift and a mask give its high word.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = (product1 >> 32 & WORD) ^ c1 ^ k0
        c1 = product1 & WORD
        c2 = (product0 >> 32 & WORD) ^ c3 ^ k1
        c3 = product0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


@register("random_gumbel", name="reference", priority=0)
def random_gumbel(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    quads = torch.arange((num_tokens + 3) // 4, device=seeds.device)[None, :]
    seeds, positions = seeds[:, None], positions[:, None]
    counter = (quads, positions & WORD, positions >> 32 & WORD, torch.zeros_like(quads))
    words = philox4x32(counter, (seeds & WORD, seeds >> 32 & WORD))
    return gumbel_from_words(torch.stack(words, dim=-1).flatten(1)[:, :num_tokens])


def gumbel_from_words(words: Tensor) -> Tensor:
    """Words [...] i64 of 32 bits -> Gumbel(0, 1) noise [...] fp32."""
    u = words.float().add_(0.5).mul_(2**-32).clamp_(max=LARGEST_U)
    return u.neg_().log1p_().neg_().log_().neg_()


@register("apply_penalties", name="reference", priority=0)
def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    values = logits[rows, token_ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[rows, token_ids] = values - frequency * counts - presence * (counts > 0)


@register("argmax", name="reference", priority=0)
def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits.argmax(-1), logits.isfinite().all(-1)


@functools.cache
def no_filters(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """top_k, top_p and min_p that keep all tokens."""
    return (
        torch.zeros(num_rows, dtype=torch.int32, device=device),
        torch.ones(num_rows, device=device),
        torch.zeros(num_rows, device=device),
    )


@register("sample_tokens", name="reference", priority=0)
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
    token_ids = logits.argmax(-1)
    noise = random_gumbel(seeds, positions, logits.shape[1])
    for row in range(len(logits)):
        if temperature[row] >= GREEDY_BELOW:
            # Subtracting the largest logit before the division leaves room for the noise at
            # temperatures near 0.
            scaled = (logits[row] - logits[row].max()) / temperature[row]
            order = logits[row].argsort(descending=True, stable=True)
            kept = keep_tokens(scaled, order, top_k[row], top_p[row], min_p[row])
            token_ids[row] = torch.where(kept, scaled + noise[row], float("-inf")).argmax()
    return token_ids


def keep_tokens(
    scaled: Tensor, order: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Returns which tokens of one row the filters keep.

    scaled [V] fp32: logits / temperature, largest 0; order [V]; filters []. Sums are in fp64.
    """
    weights = scaled[order].double().exp()  # softmax up to a factor
    kept = weights >= min_p
    if 0 < top_k < len(kept):
        kept[top_k:] = False
    if top_p < 1:
        weights = torch.where(kept, weights, 0.0)
        mass_before = weights.cumsum(-1) - weights
        kept &= mass_before < top_p * weights.sum()
    return torch.zeros_like(kept).scatter_(0, order, kept)


@register("gather_logprobs", name="reference", priority=0)
def gather_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    top, top_ids = logprobs.topk(k, dim=-1)
    ids = torch.cat((token_ids[:, None], top_ids), dim=1)
    ranks = (logits > logits.gather(1, token_ids[:, None])).sum(-1) + 1
    return ids.int(), torch.cat((chosen, top), dim=1), ranks.int()
