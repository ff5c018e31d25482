"""Specifies the choice of tokens with all options, by the operations that it joins.

Must not know: speed.
"""

import torch
from torch import Tensor

from ..choice import OWN_LOGITS, LogitChanges
from ..registry import function, register


@register("change_logits", name="reference", priority=0)
def change_logits(logits: Tensor, largest: Tensor, raw: Tensor, changes: LogitChanges) -> Tensor:
    is_kept, is_masked = changes.raw_rows >= 0, changes.mask_rows >= 0
    raw[changes.raw_rows[is_kept]] = logits[changes.rows[is_kept]]
    masks = changes.bitmask[changes.mask_rows[is_masked]]
    function("apply_grammar_bitmask")(logits, masks, changes.rows[is_masked])
    edited = changes.rows.repeat_interleave(changes.edit_starts.diff().long())
    logits[edited, changes.edit_tokens.long()] += changes.edit_values
    counts = changes.penalty_starts.diff().long()
    function("apply_penalties")(
        logits,
        changes.rows.repeat_interleave(counts),
        changes.penalty_tokens.long(),
        changes.penalty_counts,
        *changes.penalties.repeat_interleave(counts, dim=0).unbind(1),
    )
    changed = logits[changes.rows]
    largest[changes.rows] = function("argmax")(changed)[0]
    return changed.amax(-1)


@register("choose_tokens", name="reference", priority=0)
def choose_tokens(
    logits: Tensor,
    largest: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    raw: Tensor,
    raw_rows: Tensor,
    k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    token_ids = largest
    if temperature is not None:
        columns = temperature, top_k, top_p, min_p, seeds, positions
        token_ids = function("sample_tokens")(logits, *columns, largest)
    device, num_rows = logits.device, len(logits)
    ids = torch.empty(num_rows, k + 1, dtype=torch.int32, device=device)
    logprobs = torch.empty(num_rows, k + 1, device=device)
    ranks = torch.empty(num_rows, dtype=torch.int32, device=device)
    own, copied = raw_rows == OWN_LOGITS, raw_rows >= 0
    for mine, values in ((own, logits[own]), (copied, raw[raw_rows[copied]])):
        found = function("gather_logprobs")(values, token_ids[mine], k)
        for column, value in zip((ids, logprobs, ranks), found, strict=True):
            column[mine] = value
    return token_ids, ids, logprobs, ranks
