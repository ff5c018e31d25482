"""The fake executor's checks fire. Each wrong step below would otherwise pass unnoticed in every
test that relies on the fake executor.
"""

import pytest
from quire.ipc.params import SamplingParams
from quire.ipc.step_messages import NewRequestData, SchedulerOutput
from quire.tests.fakes import FakeExecutor, digest_of, make_config, token_from_digest

GREEDY = SamplingParams(temperature=0.0, seed=0)


def new(slot: int, request_id: str, token_ids: list[int]) -> NewRequestData:
    return NewRequestData(slot, request_id, token_ids, len(token_ids), GREEDY)


def make_executor(**arguments) -> FakeExecutor:
    """Make an executor that has run one step of two requests: "a" (20 tokens) in slot 0 with blocks
    1, 2 and "b" (5 tokens) in slot 1 with block 3.
    """
    executor = FakeExecutor(make_config(**arguments))
    executor.initialize_kv_cache(20)
    first = SchedulerOutput(
        0,
        [0, 1],
        [20, 5],
        [0, 0],
        [[1, 2], [3]],
        [new(0, "a", list(range(20))), new(1, "b", [7] * 5)],
    )
    assert executor.execute_model(first).num_sampled == [1, 1]
    return executor


def test_a_correct_step_gives_the_expected_tokens():
    executor = make_executor()
    sampled = executor.slots[0].token_ids[20]
    assert sampled == token_from_digest(digest_of(list(range(20))), GREEDY, 97)
    output = executor.execute_model(SchedulerOutput(1, [1, 0], [1, 1], [5, 20], [[], []]))
    assert output.token_ids[1] == token_from_digest(digest_of([*range(20), sampled]), GREEDY, 97)


def test_a_chunk_samples_nothing_and_a_hit_reads_the_shared_block():
    executor = make_executor()
    shared = [*range(16), 50, 51, 52]
    output = executor.execute_model(
        SchedulerOutput(1, [2], [2], [16], [[1, 4]], [new(2, "c", shared)])
    )
    assert output.num_sampled == [0] and output.token_ids == []
    output = executor.execute_model(SchedulerOutput(2, [2], [1], [18], [[]]))
    assert output.token_ids == [token_from_digest(digest_of(shared), GREEDY, 97)]


WRONG = {
    "empty step": SchedulerOutput(1, [], [], [], []),
    "columns": SchedulerOutput(1, [0], [1], [20], []),
    "a slot twice": SchedulerOutput(1, [0, 0], [1, 1], [20, 21], [[], []]),
    "nothing to compute": SchedulerOutput(1, [0], [0], [20], [[]]),
    "over the budget": SchedulerOutput(
        1, [2], [101], [0], [[4, 5, 6, 7, 8, 9, 10]], [new(2, "c", [1] * 101)]
    ),
    "step number": SchedulerOutput(0, [0], [1], [20], [[]]),
    "taken slot": SchedulerOutput(1, [0], [3], [0], [[4]], [new(0, "c", [1, 2, 3])]),
    "slot out of range": SchedulerOutput(1, [8], [3], [0], [[4]], [new(8, "c", [1, 2, 3])]),
    "request in two slots": SchedulerOutput(1, [2], [3], [0], [[4]], [new(2, "a", [1, 2, 3])]),
    "new request without a row": SchedulerOutput(1, [0], [1], [20], [[]], [new(2, "c", [1])]),
    "free slot freed": SchedulerOutput(1, [0], [1], [20], [[]], freed_slots=[5]),
    "not continuous": SchedulerOutput(1, [0], [1], [19], [[]]),
    "beyond its tokens": SchedulerOutput(1, [0], [2], [20], [[]]),
    "table too short": SchedulerOutput(1, [2], [17], [0], [[4]], [new(2, "c", [1] * 17)]),
    "null block": SchedulerOutput(1, [0], [1], [20], [[0]]),
    "block out of range": SchedulerOutput(1, [0], [1], [20], [[20]]),
    "block twice in a table": SchedulerOutput(1, [0], [1], [20], [[1]]),
    "writes into another's block": SchedulerOutput(
        1, [2], [3], [0], [[1]], [new(2, "c", [1, 2, 3])]
    ),
    "hit of half a block": SchedulerOutput(1, [2], [2], [8], [[1]], [new(2, "c", list(range(10)))]),
    "hit of everything": SchedulerOutput(
        1, [2], [1], [16], [[1, 4]], [new(2, "c", list(range(16)))]
    ),
    "hit on other tokens": SchedulerOutput(1, [2], [1], [16], [[1, 4]], [new(2, "c", [9] * 17)]),
    "hit on an empty block": SchedulerOutput(
        1, [2], [1], [16], [[5, 4]], [new(2, "c", list(range(17)))]
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_step_is_detected(name):
    with pytest.raises(AssertionError):
        make_executor(max_num_batched_tokens=100).execute_model(WRONG[name])


def test_scripts():
    executor = make_executor()
    executor.tokens["a", 1], executor.errors["b", 1] = 42, "broken"
    output = executor.execute_model(SchedulerOutput(1, [0, 1], [1, 1], [20, 5], [[], []]))
    assert (output.num_sampled, output.token_ids, output.errors) == ([1, 0], [42], {1: "broken"})
    executor.nan_rows.add(("a", 2))
    assert executor.execute_model(SchedulerOutput(2, [0], [1], [21], [[]])).errors == {
        0: FakeExecutor.NAN_ERROR
    }
