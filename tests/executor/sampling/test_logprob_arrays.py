"""Arrays in wire format, and log-probabilities of several steps joined into one entry per slot."""

import numpy as np
from quire.executor.sampling.logprob_arrays import join_logprobs, to_array
from quire.ipc.step_messages import SlotLogprobs
from quire.tests.executor.driver import to_numpy


def entry(slot: int, token_ids: list[list[int]]) -> SlotLogprobs:
    ids = np.array(token_ids, np.int32)
    return SlotLogprobs(
        slot, to_array(ids), to_array(-ids.astype(np.float32)), to_array(ids[:, 0] + 1)
    )


def test_an_array_is_contiguous_and_has_its_type():
    columns = np.arange(12, dtype=np.float32).reshape(3, 4)[:, :2]
    array = to_array(columns)
    assert (array.dtype, array.shape) == ("f4", (3, 2))
    np.testing.assert_array_equal(to_numpy(array), columns)


def test_steps_are_joined_by_slot():
    steps = [
        [entry(4, [[1, 2]]), entry(2, [[3]])],
        [],
        [entry(4, [[5, 6], [7, 8]])],
        [entry(4, [[9, 9]])],
    ]
    joined = join_logprobs(steps)
    assert joined == [entry(4, [[1, 2], [5, 6], [7, 8], [9, 9]]), entry(2, [[3]])]
    assert joined[0].token_ids.shape == (4, 2) and joined[0].ranks.shape == (4,)
