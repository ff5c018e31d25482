"""Rows by client become one message each, once.
May know: OutputRows and the messages.
Must not know: the scheduler."""

import struct

from quire.core.output_rows import OutputRows
from quire.ipc.messages import Array, Finished, FinishReason, PromptLogprobs, SchedulerStats, SlotLogprobs, SlotPromptLogprobs


def test_rows_become_columns_of_their_client():
    rows = OutputRows(epoch=3)
    rows.of(1).add("a", 0, [5, 6])
    rows.of(1).add_num_cached_tokens(16)
    rows.of(0).add("b", 4, [7])
    rows.of(1).add("c", 9, [])
    rows.of(1).finish(FinishReason.ERROR, error="seed: bad")
    stats = SchedulerStats(num_running=2)
    outputs = rows.take(stats)
    assert list(outputs) == [1, 0]
    first = outputs[1]
    assert (first.epoch, first.request_ids, first.first_indices) == (3, ["a", "c"], [0, 9])
    assert (first.num_tokens, first.token_ids) == ([2, 0], [5, 6])
    assert first.num_cached_tokens == [(0, 16)] and first.finished == [Finished(1, FinishReason.ERROR, None, "seed: bad")]
    assert first.stats is stats and first.timestamp > 0
    assert (outputs[0].request_ids, outputs[0].token_ids, outputs[0].finished) == (["b"], [7], [])


def test_rows_are_handed_over_once():
    rows = OutputRows()
    assert not rows and rows.take(None) is None
    rows.of(0).add("a", 0, [1])
    assert rows
    taken = rows.take(None)[0]
    rows.of(0).add("a", 1, [2])
    assert taken.token_ids == [1] and rows.take(None)[0].token_ids == [2]
    assert rows.take(None) is None


def test_a_dropped_client_is_owed_nothing():
    rows = OutputRows()
    rows.of(0).add("a", 0, [1])
    rows.of(1).add("b", 0, [1])
    rows.drop(0)
    rows.drop(7)
    assert list(rows.take(None)) == [1]


def test_logprobs_belong_to_the_last_row():
    rows, array = OutputRows(), Array("f4", (1, 1), b"\0\0\0\0")
    rows.of(0).add("a", 0, [1])
    rows.of(0).add("b", 0, [2])
    rows.of(0).add_logprobs(SlotLogprobs(slot=9, token_ids=array, logprobs=array, ranks=array), 1)
    (logprobs,) = rows.take(None)[0].logprobs
    assert logprobs.row == 1 and logprobs.logprobs is array


def test_logprobs_of_tokens_after_the_end_are_cut_off():
    ids = Array("i4", (3, 2), struct.pack("<6i", *range(6)))
    values, ranks = Array("f4", (3, 2), struct.pack("<6f", *range(6))), Array("i4", (3,), struct.pack("<3i", 7, 8, 9))
    rows = OutputRows()
    rows.of(0).add("a", 0, [1, 2])
    rows.of(0).add_logprobs(SlotLogprobs(0, ids, values, ranks), 2)
    (logprobs,) = rows.take(None)[0].logprobs
    assert logprobs.token_ids == Array("i4", (2, 2), struct.pack("<4i", *range(4)))
    assert logprobs.logprobs == Array("f4", (2, 2), struct.pack("<4f", *range(4)))
    assert logprobs.ranks == Array("i4", (2,), struct.pack("<2i", 7, 8))


def test_prompt_logprobs_belong_to_the_last_row():
    rows, array = OutputRows(), Array("f4", (1, 1), b"\0\0\0\0")
    rows.of(0).add("a", 0, [])
    rows.of(0).add("b", 0, [])
    rows.of(0).add_prompt_logprobs(SlotPromptLogprobs(9, 17, array, array, array))
    assert rows.take(None)[0].prompt_logprobs == [PromptLogprobs(1, 17, array, array, array)]
