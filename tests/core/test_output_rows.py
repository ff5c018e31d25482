"""Rows are grouped by client into one message each, and sent once."""

import struct

import pytest
from quire.core.output_rows import OutputRows
from quire.ipc.counters import SchedulerStats
from quire.ipc.messages import Array, Finished, FinishReason, PromptLogprobs
from quire.ipc.step_messages import SlotLogprobs, SlotPromptLogprobs


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
    assert first.num_cached_tokens == [(0, 16)] and first.finished == [
        Finished(1, FinishReason.ERROR, None, "seed: bad")
    ]
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


def test_a_dropped_client_gets_no_rows():
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
    values, ranks = (
        Array("f4", (3, 2), struct.pack("<6f", *range(6))),
        Array("i4", (3,), struct.pack("<3i", 7, 8, 9)),
    )
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


# ------------------------------------------------------------ the tokens of several steps together


def paced(num_rows: int, rows_per_s: int = 1000, step_s: float = 0.009):
    """Return (the rows of client 0, which has a pace, and a function). The function runs a step in
    which `num_rows` requests get a token each and returns what was sent as {request id: (first
    index, tokens)}, or None.
    """
    rows = OutputRows()
    rows.pace(0, rows_per_s)
    num_steps = 0

    def step(end: str | None = None):
        nonlocal num_steps
        for i in range(num_rows):
            rows.of(0).add(f"r{i}", num_steps, [100 * num_steps + i])
            if f"r{i}" == end:
                rows.of(0).finish(FinishReason.LENGTH)
        num_steps += 1
        rows.now = step_s * num_steps
        return by_request(rows.take(None, everything=False))

    return rows, step


def by_request(taken) -> dict[str, tuple[int, list[int]]] | None:
    if taken is None:
        return None
    message, received, end = taken[0], {}, 0
    for request_id, first_index, num_tokens in zip(
        message.request_ids, message.first_indices, message.num_tokens, strict=True
    ):
        start, end = end, end + num_tokens
        received[request_id] = (first_index, message.token_ids[start:end])
    return received


def test_many_rows_are_sent_together_after_several_steps():
    rows, step = paced(20)  # 20 rows at 1000 per second: every 20 ms
    first, *others = [step() for _ in range(7)]  # steps of 9 ms
    assert first == {f"r{i}": (0, [i]) for i in range(20)}
    assert others[:2] == [None, None] and others[3:5] == [None, None]
    assert others[2] == {f"r{i}": (1, [100 + i, 200 + i, 300 + i]) for i in range(20)}
    assert others[5]["r7"] == (4, [407, 507, 607]) and not rows


def test_each_token_has_its_step():
    rows, step = paced(2, rows_per_s=100)
    step(), step()
    rows.of(0).add("late", 0, [7])
    rows.now = 0.5
    message = rows.take(None)[0]
    assert message.request_ids == ["r0", "r1", "late"] and message.step_times == [0.018, 0.5]
    assert message.token_steps == [0, 0, 1] and message.timestamp == 0.5


def test_a_finish_sends_deferred_rows_at_once():
    rows, step = paced(20)
    step(), step()
    assert step(end="r3") == {"r3": (1, [103, 203])}
    assert rows.holds_any and len(by_request(rows.take(None))) == 19 and not rows.holds_any
    assert rows.take(None) is None


def test_a_first_token_and_its_timings_are_sent_at_once():
    rows, step = paced(20)
    step()
    for i in range(20):
        rows.of(0).add(f"r{i}", 1, [5])
    rows.of(0).add("new", 0, [6])
    rows.of(0).add_num_cached_tokens(16)
    rows.now = 0.010
    message = rows.take(None, everything=False)[0]
    assert (
        message.request_ids == ["new"]
        and message.num_cached_tokens == [(0, 16)]
        and message.token_ids == [6]
    )


def test_log_probabilities_of_several_steps_become_one_array():
    rows, arrays = OutputRows(), [Array("i4", (1, 2), struct.pack("<2i", i, 9)) for i in range(3)]
    rows.pace(0, 1)
    for index, array in enumerate(arrays):
        rows.of(0).add("a", index, [index])
        rows.of(0).add_logprobs(
            SlotLogprobs(0, array, array, Array("i4", (1,), struct.pack("<i", index))), 1
        )
        rows.now = 1.0 + index / 1000
        taken = rows.take(None, everything=index == 2)
    (logprobs,) = taken[0].logprobs
    assert taken[0].token_ids == [1, 2] and logprobs.row == 0
    assert logprobs.token_ids == Array(
        "i4", (2, 2), struct.pack("<4i", 1, 9, 2, 9)
    ) and logprobs.ranks == Array("i4", (2,), struct.pack("<2i", 1, 2))


@pytest.mark.parametrize(
    "num_rows, rows_per_s", [(20, 0), (4, 1000)], ids=["by default", "few rows"]
)
def test_each_step_is_sent_at_once_without_a_pace(num_rows, rows_per_s):
    rows, step = paced(num_rows, rows_per_s)
    assert all(len(step()) == num_rows for _ in range(5)) and not rows


def test_no_row_is_deferred_longer_than_50_ms():
    rows, step = paced(500, rows_per_s=1, step_s=0.026)
    assert [received is not None for received in (step() for _ in range(5))] == [
        True,
        False,
        True,
        False,
        True,
    ]


def test_clients_have_separate_paces_and_dropped_clients_have_none():
    rows, step = paced(1, rows_per_s=1)
    step()
    rows.of(1).add("other", 0, [1])
    rows.of(0).add("r0", 1, [2])
    rows.now = 0.010
    assert list(rows.take(None, everything=False)) == [1] and rows.holds_any
    rows.drop(0)
    assert not rows and rows.take(None) is None
