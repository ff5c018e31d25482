"""The tables of the slots: entry, growth, reuse, and which parameters are refused."""

from __future__ import annotations

import numpy as np
import pytest
from quire.executor.input_batch import (
    NO_LOGPROBS,
    WHOLE_VOCABULARY,
    InputBatch,
    find_unsupported,
)
from quire.executor.sampling.logits_stages import LogitsStages
from quire.ipc.errors import InvalidParameterError
from quire.ipc.params import PoolingParams, SamplingParams
from quire.ipc.step_messages import NewRequestData, RowRefusal


def make_batch() -> InputBatch:
    return InputBatch(max_num_seqs=4, max_model_len=50, block_size=16, stages=LogitsStages((), 4))


def request(slot: int, token_ids: list[int], **params) -> NewRequestData:
    return NewRequestData(
        slot, f"r{slot}", token_ids, len(token_ids), SamplingParams(**{"seed": 7, **params})
    )


def test_a_block_outside_the_cache_is_refused() -> None:
    batch = make_batch()
    batch.num_cache_blocks = 8
    batch.append_blocks(1, [1, 7])
    for bad in ([8], [0], [3, -1]):
        with pytest.raises(ValueError, match="new_block_ids: must be between 1 and 7, got"):
            batch.append_blocks(1, bad)
    assert batch.num_blocks[1] == 2


def test_tokens_outside_a_slots_blocks_are_refused() -> None:
    batch, slots = make_batch(), np.array([1, 3])
    batch.append_blocks(1, [4])
    batch.append_blocks(3, [5, 6])
    batch.check_blocks(slots, np.array([16, 32]))
    with pytest.raises(ValueError, match="blocks of slot 3, which hold 32 tokens, got 33"):
        batch.check_blocks(slots, np.array([16, 33]))


def test_a_request_fills_its_row():
    batch = make_batch()
    batch.add(
        request(
            2,
            [5, 6, 7],
            temperature=0.5,
            top_k=9,
            top_p=0.25,
            min_p=0.125,
            seed=2**63 - 1,
            logprobs=3,
        )
    )
    assert batch.token_ids[2, :3].tolist() == [5, 6, 7] and batch.num_tokens.tolist() == [
        0,
        0,
        3,
        0,
    ]
    columns = (
        batch.temperature,
        batch.top_k,
        batch.top_p,
        batch.min_p,
        batch.seeds,
        batch.num_logprobs,
    )
    assert [column[2] for column in columns] == [0.5, 9, 0.25, 0.125, 2**63 - 1, 3]
    batch.add(request(1, [1], top_k=-1))
    assert batch.top_k[1] == 0 and batch.num_logprobs[1] == NO_LOGPROBS


def test_which_slots_sample_and_which_of_them_filter():
    batch = make_batch()
    for slot, params in enumerate(
        (
            {"temperature": 0.0, "top_k": 5},
            {"temperature": 1.0},
            {"temperature": 1.0, "top_p": 0.9},
            {"min_p": 0.1},
        )
    ):
        batch.add(request(slot, [1], **params))
    assert (batch.random_slots, batch.filtered_slots) == ({1, 2, 3}, {2, 3})
    batch.add(request(2, [1], temperature=1.0))
    batch.remove(3)
    assert (batch.random_slots, batch.filtered_slots) == ({1, 2}, set())


def test_top_k_beyond_32_bits_means_all():
    batch = make_batch()
    batch.add(request(0, [1], top_k=2**40))
    assert batch.top_k[0] == 2**31 - 1


def test_the_smallest_top_p_is_not_rounded_to_zero():
    batch = make_batch()
    batch.add(request(0, [1], top_p=5e-324))
    assert batch.top_p[0] > 0


def test_blocks_and_tokens_are_appended():
    batch = make_batch()
    batch.add(request(3, [1, 2]))
    batch.append_blocks(3, [9, 4])
    batch.append_blocks(3, [7])
    batch.append_blocks(3, [])
    assert batch.block_tables[0, 3, : batch.num_blocks[3]].tolist() == [9, 4, 7]
    batch.add(request(0, [8]))
    batch.append_tokens(np.array([3, 0]), np.array([11, 12]))
    assert batch.token_ids[3, :3].tolist() == [1, 2, 11] and batch.token_ids[0, :2].tolist() == [
        8,
        12,
    ]
    assert batch.num_tokens[[3, 0]].tolist() == [3, 2]


def test_the_longest_sequence_fits():
    batch = make_batch()
    batch.add(request(0, list(range(49))))
    batch.append_blocks(0, [1, 2, 3, 4])
    batch.append_tokens(np.array([0]), np.array([5]))
    assert batch.num_tokens[0] == 50


def test_a_slot_is_reused():
    batch = make_batch()
    batch.add(request(1, [1, 2, 3], logprobs=2, prompt_logprobs=1))
    assert batch.prompt_logprobs_slots == {1} and batch.num_prompt_logprobs[1] == 1
    batch.append_blocks(1, [5])
    batch.remove(1)
    batch.add(request(1, [4]))
    batch.append_blocks(1, [8])
    assert batch.num_tokens[1] == 1 and batch.block_tables[
        0, 1, : batch.num_blocks[1]
    ].tolist() == [8]
    assert batch.num_logprobs[1] == batch.num_prompt_logprobs[1] == NO_LOGPROBS
    assert not batch.refusals and not batch.prompt_logprobs_slots


def test_the_whole_vocabulary_and_more_than_fit():
    batch = make_batch()
    batch.add(request(0, [1], logprobs=-1, prompt_logprobs=2**40))
    assert batch.num_logprobs[0] == batch.num_prompt_logprobs[0] == WHOLE_VOCABULARY


def test_unsupported_parameters_are_named():
    batch = make_batch()
    batch.add(request(0, [1], seed=None))
    assert batch.refusals[0].startswith("seed: must be resolved")


class Picky:
    """A stage that refuses a bias on token 9 and records its calls."""

    def __init__(self):
        self.slots = set()

    def enter(self, request):
        if 9 in (request.sampling_params.logit_bias or {}):
            raise InvalidParameterError("logit_bias", "not nine")
        self.slots.add(request.slot)
        return True

    def leave(self, slot):
        self.slots.remove(slot)


def test_stages_are_notified_of_requests_and_may_refuse_them():
    picky = Picky()
    batch = InputBatch(4, 50, 16, LogitsStages([picky], 4))
    batch.add(request(0, [1], logit_bias={9: 1.0}))
    batch.add(request(1, [1], logit_bias={8: 1.0}))
    assert batch.refusals == {0: RowRefusal("logit_bias", "not nine")} and picky.slots == {1}
    batch.remove(0)
    batch.remove(1)
    batch.remove(3)
    assert batch.refusals == {} and picky.slots == set()


def test_an_unresolved_seed_is_named():
    assert find_unsupported(SamplingParams(seed=0)) is None
    assert find_unsupported(SamplingParams()).startswith("seed: ")


def test_a_request_that_pools_is_never_sampled():
    batch = InputBatch(4, 50, 16, LogitsStages((), 4))
    new = NewRequestData(2, "r", [5, 6, 7], 3, PoolingParams(task="embed"))
    batch.add(new)
    assert batch.pooling == {2: new.params} and batch.num_tokens[2] == 4
    assert not batch.refusals and not batch.random_slots
    batch.remove(2)
    assert batch.pooling == {}


def test_each_group_of_layers_has_its_blocks():
    batch = InputBatch(4, 50, 16, LogitsStages((), 4), kv_cache_windows=(0, 20))
    batch.num_cache_blocks = 10
    batch.append_blocks(1, [1, 2, 0, 3])  # the null block, where the window has been
    batch.append_blocks(1, [8, 9])
    assert batch.num_blocks[1] == 3
    assert batch.block_tables[:, 1, :3].tolist() == [[1, 2, 8], [0, 3, 9]]
    with pytest.raises(ValueError, match=r"between 0 and 9, got \[10, 2\]"):
        batch.append_blocks(1, [10, 2])
    with pytest.raises(ValueError):  # not equally many of each group
        batch.append_blocks(1, [5])
