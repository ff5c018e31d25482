"""Drafts that the library finds are those of the proposer in Python."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from quire.executor.runner.speculation.proposers import NgramProposer
from quire.kernels.cpu.native.calls import ALL_LOGITS, F32, Lookups, Op, Step
from quire.kernels.cpu.native.library import library

pytestmark = pytest.mark.skipif(library is None, reason="native kernels are not built here")

BLOCK_SIZE, LENGTH = 4, 40


@pytest.mark.parametrize("seed", range(20))
def test_drafts_are_those_of_the_proposer(seed: int):
    """Of random texts of few tokens, which repeat themselves a lot."""
    rng = np.random.default_rng(seed)
    least, more = int(rng.integers(1, 4)), int(rng.integers(0, 6))
    proposer = NgramProposer(least, least + more)
    count, width = 5, 7
    texts = rng.integers(0, rng.integers(2, 12), (8, LENGTH)).astype(np.int32)
    slots = rng.permutation(8)[:count]
    known, most = rng.integers(1, LENGTH - width, count), rng.integers(0, width, count)
    tables = rng.permutation(1000)[: count * 10].astype(np.int32).reshape(count, 10)
    rows = count * width
    arrays = {
        "token_ids": np.zeros(rows, np.int32),
        "positions": np.zeros(rows, np.int64),
        "slot_mapping": np.zeros(rows, np.int64),
        "query_start_loc": np.zeros(count + 1, np.int32),
        "seq_lens": np.zeros(count, np.int32),
        "logits_indices": np.zeros(rows, np.int64),
    }
    step = Step()
    for name, array in arrays.items():
        setattr(step, name, array.ctypes.data)
    step.num_requests, step.num_groups = count, 1
    step.block_tables, step.block_table_row = tables.ctypes.data, tables.shape[1]
    call = Lookups.zeros()
    call.op, call.dtype, call.rows = Op.LOOKUP_DRAFTS, F32, ALL_LOGITS
    call.texts, call.text_row = texts.ctypes.data, LENGTH
    call.slots, call.num_known, call.most = (x.ctypes.data for x in (slots, known, most))
    call.least_equal, call.most_equal, call.block_size = least, least + more, BLOCK_SIZE
    library.run_all((ctypes.c_void_p * 1)(ctypes.addressof(call)), step)

    end = 0
    for b, slot in enumerate(slots):
        text = texts[slot, : known[b]]
        drafts = proposer.propose(text, int(most[b]), None) if most[b] else text[:0]
        row = slice(end, end := end + 1 + len(drafts))
        places = np.arange(known[b] - 1, known[b] + len(drafts))
        assert arrays["token_ids"][row].tolist() == [text[-1], *drafts]
        assert arrays["positions"][row].tolist() == places.tolist()
        expected = tables[b, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        assert arrays["slot_mapping"][row].tolist() == expected.tolist()
        assert arrays["query_start_loc"][b + 1] == end
        assert arrays["seq_lens"][b] == known[b] + len(drafts)
    assert step.num_tokens == step.num_logits == end
    assert arrays["logits_indices"][:end].tolist() == list(range(end))
