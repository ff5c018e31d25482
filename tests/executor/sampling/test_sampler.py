"""From logits to tokens: parameters reach the operation by slot, log-probabilities are in wire
format, bad rows fail alone.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quire.executor.input_batch import InputBatch
from quire.executor.sampling.logits_stages import LogitsStages
from quire.executor.sampling.sampler import Sampler
from quire.executor.sampling.token_stages import make_stages
from quire.ipc.params import SamplingParams
from quire.ipc.step_messages import NewRequestData
from quire.kernels import registry
from quire.tests.executor.driver import to_numpy

VOCAB_SIZE = 40
OPS = registry.select("cpu", torch.float32)


def make_batch(*rows: dict, stages: LogitsStages | None = None) -> InputBatch:
    """Slot i holds i + 1 tokens and the i-th row's parameters."""
    batch = InputBatch(8, 64, 16, stages or LogitsStages((), 8))
    for slot, params in enumerate(rows):
        batch.add(
            NewRequestData(
                slot, f"r{slot}", [1] * (slot + 1), 1, SamplingParams(**{"seed": slot, **params})
            )
        )
    return batch


def make_logits(num_rows: int) -> torch.Tensor:
    return 2 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))


def test_greedy_is_argmax_in_any_batch():
    logits = make_logits(4)
    greedy, mixed = (
        make_batch(*[{"temperature": 0.0}] * 4),
        make_batch({"temperature": 0.0}, {}, {"temperature": 0.0}, {"top_k": 3}),
    )
    slots = np.arange(4)
    assert Sampler(OPS)(logits, greedy, slots).token_ids.tolist() == logits.argmax(-1).tolist()
    assert (
        Sampler(OPS)(logits, mixed, slots).token_ids[[0, 2]].tolist()
        == logits.argmax(-1)[[0, 2]].tolist()
    )


def test_a_row_depends_only_on_its_slot():
    """The same logits, seeds and positions give the same tokens in another order and in smaller
    batches.
    """
    rows = [
        {},
        {"temperature": 0.7, "top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2, "temperature": 1.4},
        {"temperature": 0.0},
    ]
    batch, logits, sampler = make_batch(*rows), make_logits(5), Sampler(OPS)
    whole = sampler(logits, batch, np.arange(5)).token_ids
    order = np.array([3, 0, 4, 2, 1])
    assert sampler(logits[order], batch, order).token_ids.tolist() == whole[order].tolist()
    for slot in range(5):
        assert sampler(logits[slot : slot + 1], batch, np.array([slot])).token_ids.tolist() == [
            whole[slot]
        ]


def test_the_operation_gets_the_slots_parameters_and_the_position_of_the_new_token():
    calls = []

    class Ops:
        argmax = staticmethod(OPS.argmax)

        @staticmethod
        def sample_tokens(logits, *columns):
            calls.append([column.tolist() for column in columns])
            return torch.zeros(len(logits), dtype=torch.int64)

    rows = [{"temperature": 0.5, "top_k": 4}, {"top_p": 0.5, "seed": 99}, {"min_p": 0.25}]
    Sampler(Ops())(make_logits(2), make_batch(*rows), np.array([2, 1]))
    assert calls == [[[1.0, 1.0], [0, 0], [1.0, 0.5], [0.25, 0.0], [2, 99], [3, 2]]]


def test_a_new_request_in_a_slot_uses_its_own_parameters():
    """The parameters of a step are cached for the next step with the same rows."""
    batch, sampler, slots = make_batch({}, {"seed": 5}), Sampler(OPS), np.arange(2)
    logits = torch.zeros(2, VOCAB_SIZE)
    sampler(logits, batch, slots)
    batch.add(NewRequestData(1, "next", [1, 1], 1, SamplingParams(seed=77, top_k=3)))
    fresh = Sampler(OPS)(logits, batch, slots.copy()).token_ids.tolist()
    assert sampler(logits, batch, slots).token_ids.tolist() == fresh
    assert fresh[1] < 3  # the first three of equal logits


def test_logprobs_have_each_rows_own_k():
    logits = make_logits(4)
    output = Sampler(OPS)(
        logits,
        make_batch({"logprobs": 2}, {}, {"logprobs": 0}, {"logprobs": 5, "temperature": 0.0}),
        np.arange(4),
    )
    expected = logits.log_softmax(-1)
    assert [entry.slot for entry in output.logprobs] == [0, 2, 3]
    for entry, k in zip(output.logprobs, (2, 0, 5)):
        assert (entry.token_ids.dtype, entry.logprobs.dtype, entry.ranks.dtype) == (
            "i4",
            "f4",
            "i4",
        )
        ids, values, (rank,) = (
            to_numpy(entry.token_ids),
            to_numpy(entry.logprobs),
            to_numpy(entry.ranks),
        )
        assert ids.shape == values.shape == (1, k + 1)
        row, sampled = expected[entry.slot], int(output.token_ids[entry.slot])
        assert ids[0, 0] == sampled and rank == 1 + int((row > row[sampled]).sum())
        np.testing.assert_allclose(values[0], row[ids[0].tolist()], atol=1e-5)
        assert ids[0, 1:].tolist() == row.topk(k).indices.tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_row_is_reported_and_does_not_affect_others(bad):
    rows, slots = (
        [{}, {"logprobs": 1}, {"temperature": 0.0}, {"logprobs": 1, "top_k": 3}],
        np.arange(4),
    )
    logits = make_logits(4)
    clean = Sampler(OPS)(logits, make_batch(*rows), slots)
    logits[1, 17] = bad
    output = Sampler(OPS)(logits, make_batch(*rows), slots)
    assert clean.errors == {} and list(output.errors) == [1] and "not finite" in output.errors[1]
    assert output.token_ids[[0, 2, 3]].tolist() == clean.token_ids[[0, 2, 3]].tolist()
    assert output.logprobs == clean.logprobs[1:]


def test_logprobs_of_the_whole_vocabulary():
    logits = make_logits(3)
    expected = logits.log_softmax(-1)
    output = Sampler(OPS)(
        logits.clone(),
        make_batch({"logprobs": -1}, {"logprobs": 1}, {"logprobs": VOCAB_SIZE + 5}),
        np.arange(3),
    )
    for entry, k in zip(output.logprobs, (VOCAB_SIZE, 1, VOCAB_SIZE)):
        ids, values = to_numpy(entry.token_ids)[0], to_numpy(entry.logprobs)[0]
        assert ids.shape == (k + 1,) and (
            k == 1 or sorted(ids[1:].tolist()) == list(range(VOCAB_SIZE))
        )
        np.testing.assert_allclose(values, expected[entry.slot][ids.tolist()], atol=1e-5)


def test_a_rows_logprobs_do_not_depend_on_the_k_of_other_rows():
    """This includes tokens of equal probability, where the operation may choose."""
    logits = torch.zeros(2, VOCAB_SIZE)
    alone = Sampler(OPS)(logits[:1].clone(), make_batch({"logprobs": 3}), np.arange(1)).logprobs[0]
    beside = Sampler(OPS)(
        logits, make_batch({"logprobs": 3}, {"logprobs": -1}), np.arange(2)
    ).logprobs[0]
    assert alone == beside


def test_logprobs_are_computed_before_the_stages():
    rows = [
        {"logprobs": 2, "logit_bias": {5: 50.0}},
        {"logprobs": 2, "allowed_token_ids": [7]},
        {"logprobs": 2},
    ]
    logits = make_logits(3)
    expected = logits.log_softmax(-1)
    batch = make_batch(*rows, stages=make_stages(OPS, VOCAB_SIZE, 8, 64))
    output = Sampler(OPS)(logits, batch, np.arange(3))
    assert output.token_ids[:2].tolist() == [5, 7]
    for row, entry in enumerate(output.logprobs):
        ids, values = to_numpy(entry.token_ids)[0].tolist(), to_numpy(entry.logprobs)[0]
        assert ids[0] == output.token_ids[row] and ids[1:] == expected[row].topk(2).indices.tolist()
        np.testing.assert_allclose(values, expected[row][ids], atol=1e-5)
        assert to_numpy(entry.ranks)[0] == 1 + int((expected[row] > expected[row, ids[0]]).sum())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_row_is_detected_whatever_the_stages_do(bad):
    """A mask would hide NaN logits if they were checked after the stages."""
    logits = make_logits(2)
    logits[0, 17] = bad
    batch = make_batch(
        {"allowed_token_ids": [3, 4]},
        {"allowed_token_ids": [3]},
        stages=make_stages(OPS, VOCAB_SIZE, 8, 64),
    )
    output = Sampler(OPS)(logits, batch, np.arange(2))
    assert (
        list(output.errors) == [0]
        and output.errors[0].startswith("the model's logits")
        and output.token_ids[1] == 3
    )
