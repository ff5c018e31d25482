"""One step and many: chunked equals whole, batches equal single requests, slots and blocks are
reused, a bad row fails alone.
"""

from __future__ import annotations

import random

import pytest
import torch
from quire.executor.runner.special_rows import insert_forced
from quire.executor.worker import Worker
from quire.ipc.params import SamplingParams
from quire.ipc.step_messages import SchedulerOutput
from quire.tests.executor.driver import Driver, generate, greedy, start_executor
from quire.tests.executor.on_device import use_forward

NAN_TOKEN = 311  # not in any prompt or output of these tests


@pytest.fixture(scope="module")
def executor(tiny) -> Worker:
    return start_executor(tiny("qwen2"), max_model_len=512, max_num_seqs=8)


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(200), k=length) for length in lengths]


def outputs(rows) -> list[list[int]]:
    assert all(row.error is None for row in rows)
    return [row.output for row in rows]


@pytest.mark.parametrize("chunk", [1, 5, 16, 17, 50, 199])
def test_chunked_prefill_equals_whole(executor, chunk):
    prompts = random_prompts(1, 33, 200)
    whole = generate(executor, prompts, 8, greedy(logprobs=2))
    chunked = generate(executor, prompts, 8, greedy(logprobs=2), chunk=lambda row: chunk)
    assert outputs(chunked) == outputs(whole)
    for a, b in zip(whole, chunked):
        for (ids_a, logprobs_a, _), (ids_b, logprobs_b, _) in zip(a.logprobs, b.logprobs):
            assert ids_a.tolist() == ids_b.tolist()
            assert abs(logprobs_a - logprobs_b).max() < 1e-4


def test_several_tokens_in_one_step_equal_those_of_several_steps(executor):
    """The rows have different numbers of tokens. One prompt is unfinished, and one row decodes no
    more tokens.
    """
    params = [
        greedy(logprobs=2),
        SamplingParams(temperature=0.9, top_p=0.9, seed=5, logprobs=0),
        SamplingParams(
            temperature=0.8,
            seed=6,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=0.2,
            min_tokens=6,
            stop_token_ids=[7],
        ),
        greedy(),
    ]
    prompts = random_prompts(20, 3, 33, 60, seed=3)
    one_by_one = [generate(executor, [prompt], 9, p)[0] for prompt, p in zip(prompts, params)]
    driver = Driver(executor)
    rows = [driver.add(str(i), prompt, p) for i, (prompt, p) in enumerate(zip(prompts, params))]
    driver.step({"0": 20, "1": 3, "2": 33, "3": 40})
    driver.step({"0": 1, "1": 1, "2": 1, "3": 20}, lookahead={"0": 4, "2": 1, "3": 3})
    driver.step({"0": 1, "1": 1, "2": 1, "3": 1}, lookahead={"1": 6, "0": 2})
    executor.execute_model(
        SchedulerOutput(0, [], [], [], [], freed_slots=[row.slot for row in rows])
    )
    assert [len(row.output) for row in rows] == [9, 9, 4, 5]
    for row, expected in zip(rows, one_by_one):
        assert row.output == expected.output[: len(row.output)]
        for (ids, logprobs, rank), (other_ids, other_logprobs, other_rank) in zip(
            row.logprobs, expected.logprobs
        ):
            assert (
                ids.tolist() == other_ids.tolist()
                and rank == other_rank
                and abs(logprobs - other_logprobs).max() < 1e-4
            )
    assert len(rows[0].logprobs) == len(rows[1].logprobs) == 9


def test_a_row_that_fails_in_the_lookahead_keeps_its_earlier_tokens(executor, monkeypatch):
    driver = Driver(executor)
    rows = [driver.add(str(i), prompt) for i, prompt in enumerate(random_prompts(9, 12))]
    driver.step({"0": 9, "1": 12})
    logits, passes = executor.model.compute_logits, []

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        passes.append(len(hidden))
        values = logits(hidden)
        return values.index_fill(0, torch.tensor([1]), float("nan")) if len(passes) == 2 else values

    monkeypatch.setattr(executor.model, "compute_logits", poisoned)
    use_forward(executor, None)  # a recorded step would not call it, and neither would a burst
    result = driver.step({"0": 1, "1": 1}, lookahead={"0": 3, "1": 3})
    executor.execute_model(
        SchedulerOutput(0, [], [], [], [], freed_slots=[row.slot for row in rows])
    )
    assert (
        passes == [2, 2, 1, 1]
        and result.num_sampled == [4, 1]
        and list(result.errors) == [rows[1].slot]
    )


def test_random_chunk_boundaries(executor):
    prompts, rng = random_prompts(310, 97, 18, 2, seed=1), random.Random(4)
    assert outputs(generate(executor, prompts, 6, chunk=lambda row: rng.randint(1, 60))) == outputs(
        generate(executor, prompts, 6)
    )


def test_batch_equals_single_requests(executor):
    prompts = random_prompts(40, 3, 16, 120, 1, seed=2)
    sampled = SamplingParams(temperature=0.9, top_p=0.9, seed=11)
    for params in (greedy(), sampled):
        alone = [outputs(generate(executor, [prompt], 10, params))[0] for prompt in prompts]
        assert outputs(generate(executor, prompts, 10, params)) == alone
    assert outputs(generate(executor, prompts[:1], 10, sampled)) != outputs(
        generate(executor, prompts[:1], 10, SamplingParams(temperature=0.9, seed=12))
    )


def test_results_are_in_the_schedulers_order(executor):
    """A step in the order prefill, decode, unfinished chunk, decode. The runner sorts decodes
    first, but returns the caller's order.
    """
    prompts = random_prompts(30, 10, 60, 20, seed=3)
    expected = outputs(generate(executor, prompts, 3))
    driver = Driver(executor)
    late, early_a, chunk, early_b = (
        driver.add(name, prompt) for name, prompt in zip("abcd", prompts)
    )
    result = driver.step({"d": 20, "b": 10})
    assert result.num_sampled == [1, 1] and result.token_ids == [expected[3][0], expected[1][0]]
    result = driver.step({"a": 30, "b": 1, "c": 59, "d": 1})
    assert result.num_sampled == [1, 1, 0, 1]
    assert result.token_ids == [expected[0][0], expected[1][1], expected[3][1]]
    result = driver.step({"d": 1, "c": 1, "a": 1})
    assert result.token_ids == [expected[3][2], expected[2][0], expected[0][1]]
    for row in (late, early_a, chunk, early_b):
        driver.free(row)
    driver.step({})


def test_a_failure_in_the_lookahead_keeps_earlier_tokens(tiny):
    """The third token could only be one that completes a bad word."""
    executor = start_executor(tiny("qwen2"))
    driver = Driver(executor)
    bad = driver.add(
        "bad", [1, 2, 3], greedy(allowed_token_ids=[5], bad_words_token_ids=[[5, 5, 5]], logprobs=1)
    )
    good = driver.add("good", [4, 5, 6], greedy(logprobs=1))
    result = driver.step({"bad": 3, "good": 3}, {"bad": 4, "good": 4})
    assert (
        result.num_sampled == [2, 5] and list(result.errors) == [bad.slot] and bad.output == [5, 5]
    )
    assert [entry.token_ids.shape[0] for entry in result.logprobs] == [2, 5]
    assert [good.output] == outputs(generate(start_executor(tiny("qwen2")), [[4, 5, 6]], 5))


def test_a_step_without_requests_only_frees(executor):
    result = executor.execute_model(SchedulerOutput(0, [], [], [], [], freed_slots=[0, 1]))
    assert (result.num_sampled, result.token_ids, result.errors) == ([], [], {})


def test_slots_and_blocks_are_reused_at_once(executor):
    """A request leaves and another takes its slot and blocks in the same step. A third request runs
    beside them.
    """
    prompts = random_prompts(50, 20, 35, seed=5)
    expected = outputs(generate(executor, prompts, 8))
    driver = Driver(executor)
    staying, leaving = (
        driver.add("stay", prompts[0]),
        driver.add("leave", prompts[1], SamplingParams(seed=3, logprobs=1)),
    )
    driver.step({"stay": 50, "leave": 20})
    driver.free(leaving)
    entering = driver.add("enter", prompts[2])
    assert entering.slot == leaving.slot
    driver.run(8)
    assert set(entering.block_ids) & set(leaving.block_ids)
    assert [staying.output, entering.output] == [expected[0], expected[2]]
    driver.free(staying)
    driver.free(entering)
    driver.step({})


def test_preempted_and_recomputed_in_another_slot(executor):
    (prompt,) = random_prompts(70, seed=6)
    for params in (greedy(), SamplingParams(temperature=1.0, seed=5)):
        expected = outputs(generate(executor, [prompt], 12, params))
        driver = Driver(executor)
        row = driver.add("r", prompt, params)
        driver.run(5)
        slot = row.slot
        driver.preempt(row)
        assert row.slot != slot
        driver.run(12, chunk=lambda row: 31)
        assert [row.output] == expected
        driver.free(row)
        driver.step({})


def test_shared_prefix_blocks_are_read_not_recomputed(executor):
    """As with a prefix-cache hit, the second request's table starts with blocks of the first, and
    its computed count includes them.
    """
    prefix, tail = random_prompts(32, 9, seed=7)
    expected = outputs(generate(executor, [prefix + tail], 6))
    driver = Driver(executor)
    first = driver.add("first", prefix + [1])
    driver.run(1)
    second = driver.add("second", prefix + tail, cached_blocks=first.block_ids[:2])
    assert driver.step({"second": 9}).num_sampled == [1]
    driver.run(6)
    assert [second.output] == expected
    executor.execute_model(
        SchedulerOutput(0, [], [], [], [], freed_slots=[first.slot, second.slot])
    )


def test_a_full_context(executor):
    """max_model_len tokens in all: the last sampled token is the last that fits the tables."""
    (row,) = generate(executor, random_prompts(505, seed=9), 7)
    assert row.num_tokens == 512 and len(row.output) == 7


def test_dummy_batch_changes_nothing(executor):
    prompts = random_prompts(20, 30, seed=10)
    expected = outputs(generate(executor, prompts, 6))
    driver = Driver(executor)
    rows = [driver.add(name, prompt) for name, prompt in zip("ab", prompts)]
    cache = [(layer.key_cache, layer.value_cache) for layer in executor.model.attention_layers()]
    while len(rows[0].output) < 6:
        driver.step({row.request_id: row.num_tokens - row.num_computed for row in rows})
        before = [tensor.clone() for pair in cache for tensor in pair]
        executor.execute_dummy_batch()
        executor.runner.execute_dummy_batch(5, 3, is_sampled=True)
        assert all(
            torch.equal(a, b) for a, b in zip(before, (tensor for pair in cache for tensor in pair))
        )
    assert outputs(rows) == expected
    for row in rows:
        driver.free(row)
    driver.step({})


@pytest.fixture(scope="module")
def poisoned(tiny) -> Worker:
    """A model whose embedding of NAN_TOKEN is NaN. A request with that token has NaN in hidden
    states, keys, values and logits.
    """
    executor = start_executor(
        tiny("qwen2"), max_model_len=512, max_num_seqs=8, kv_cache_memory_bytes=2**21
    )
    executor.model.embed_tokens.weight[NAN_TOKEN] = float("nan")
    return executor


@pytest.mark.parametrize(
    "params",
    [greedy(), greedy(logprobs=2), SamplingParams(temperature=0.8, seed=4, logprobs=1)],
    ids=["greedy", "logprobs", "sampled"],
)
@pytest.mark.parametrize("chunk", [None, 7])
def test_nan_fails_only_its_own_request(executor, poisoned, params, chunk):
    prompts = random_prompts(40, 25, 3, seed=12)
    expected = outputs(generate(executor, prompts, 6, params))
    bad = prompts[1][:12] + [NAN_TOKEN] + prompts[1][12:]
    rows = generate(
        poisoned,
        [prompts[0], bad, prompts[1], [NAN_TOKEN], prompts[2]],
        6,
        params,
        chunk and (lambda row: chunk),
    )
    assert [row.output for row in rows] == [expected[0], [], expected[1], [], expected[2]]
    assert all(
        rows[i].error == "the model's logits for this request are not finite (NaN or infinity)"
        for i in (1, 3)
    )


def test_blocks_that_held_nan_serve_the_next_request(executor, poisoned):
    prompts = random_prompts(90, 33, seed=13)
    driver = Driver(poisoned)
    bad = driver.add("bad", [NAN_TOKEN] * 100)
    driver.step({"bad": 100})
    assert bad.error
    driver.free(bad)
    rows = [driver.add(name, prompt) for name, prompt in zip("ab", prompts)]
    driver.run(6)
    assert set(rows[0].block_ids) <= set(bad.block_ids)
    assert outputs(rows) == outputs(generate(executor, prompts, 6))


def test_nan_in_a_decode_step(executor, poisoned):
    """The token with the NaN is sampled in the middle of a batch of decodes."""
    prompts = random_prompts(10, 10, seed=14)
    expected = outputs(generate(executor, prompts, 6))
    driver = Driver(poisoned)
    good, bad = driver.add("good", prompts[0]), driver.add("bad", prompts[1])
    driver.step({"good": 10, "bad": 10})
    poisoned.runner.batch.token_ids[bad.slot, 10] = NAN_TOKEN
    driver.step({"good": 1, "bad": 1})
    assert bad.error and len(bad.output) == 1
    driver.run(6)
    assert good.output == expected[0]


def test_refused_parameters_fail_only_their_own_request(executor):
    prompts = random_prompts(12, 40, seed=15)
    expected = outputs(generate(executor, prompts[:1], 5))
    driver = Driver(executor)
    good, bad = (
        driver.add("good", prompts[0]),
        driver.add("bad", prompts[1], greedy(logit_bias={320: 5.0}, logprobs=1)),
    )
    error = driver.step({"good": 12, "bad": 10}).errors[bad.slot]
    assert str(error) == "logit_bias: must hold token ids from 0 to 319, got 320"
    result = driver.step({"good": 1, "bad": 30})
    assert (
        list(result.errors) == [bad.slot] and result.num_sampled == [1, 0] and not result.logprobs
    )
    driver.run(5)
    assert [good.output] == expected
    driver.free(good)
    driver.free(bad)
    driver.step({})


def test_forced_tokens_follow_the_row_of_their_request():
    columns = insert_forced(
        [5, 2, 7, 1], [1, 0, 1, 1], [10, 30, 40], {7: [31, 32], 1: [41], 3: [9]}
    )
    assert columns == ([1, 0, 3, 2], [10, 30, 31, 32, 40, 41])
