"""The number of tokens that a step decodes if the scheduler chooses it (num_scheduler_steps=0)."""

import pytest
from quire.core.scheduling.step import MAX_BURST, MAX_BURST_BYTES
from quire.ipc.messages import EngineCoreRequest, FinishReason
from quire.ipc.params import SamplingParams, StructuredOutputsParams
from quire.tests.core.engine_loop import assert_nothing_left, make_core, run, step

SMALL = MAX_BURST_BYTES // 1000  # weights


def request(
    name: str = "r", num_prompt: int = 5, max_tokens: int = 30, structured_outputs=None, **fields
) -> EngineCoreRequest:
    params = SamplingParams(
        temperature=0.0, seed=0, max_tokens=max_tokens, structured_outputs=structured_outputs
    )
    return EngineCoreRequest(name, [1 + i % 90 for i in range(num_prompt)], params, **fields)


def lengths(core) -> list[list[int]]:
    """Return, for each step so far, the number of tokens that each row was to decode."""
    return [
        [1 + n for n in s.num_lookahead_tokens] or [1] * len(s.slots) for s in core.executor.steps
    ]


def test_the_first_token_is_a_step_alone_and_the_last_burst_is_shorter():
    core = make_core(SMALL)
    core.add_request(request(max_tokens=20))
    assert len(run(core)[0]["r"].tokens) == 20
    assert lengths(core) == [[1], [8], [8], [3]]
    assert_nothing_left(core)


@pytest.mark.parametrize(
    ("passes", "num_requests", "length"),
    [(8.5, 1, 8), (8.5, 2, 4), (8.5, 3, 2), (8.5, 5, 1), (2.5, 1, 2), (2.5, 2, 1), (0.5, 1, 1)],
)
def test_a_step_stays_within_its_time_limit(passes, num_requests, length):
    """`passes` of one request fit into the limit."""
    core = make_core(int(MAX_BURST_BYTES / passes))
    for i in range(num_requests):
        core.add_request(request(f"r{i}", max_tokens=1 + 2 * length))
    run(core)
    assert lengths(core) == [[1] * num_requests] + [[length] * num_requests] * 2
    assert max(lengths(core)[-1]) <= MAX_BURST


def test_all_rows_of_a_step_decode_equally_many_tokens():
    core = make_core(SMALL)
    core.add_request(request("short", max_tokens=4))
    core.add_request(request("long", max_tokens=20))
    answers = run(core)[0]
    assert [len(answers[name].tokens) for name in ("short", "long")] == [4, 20]
    assert lengths(core) == [[1, 1], [3, 3], [8], [8]]


def test_requests_in_the_background_do_not_shorten_steps_of_others():
    core = make_core(SMALL, max_num_seqs=6)
    for i in range(8):
        core.add_request(
            request(f"line{i}", num_prompt=90, max_tokens=30, owner="batch:", owner_weight=0.0)
        )
    for _ in range(17):  # no prompt is computed whole
        step(core)
    core.add_request(request("a", max_tokens=17, owner="a"))
    start = len(core.executor.steps)
    answers = run(core)[0]
    assert len(answers["a"].tokens) == 17 and len(answers) == 9
    assert [max(counts) for counts in lengths(core)[start : start + 3]] == [1, 8, 8]
    assert_nothing_left(core)


def test_no_lookahead_while_a_prompt_is_computed_or_a_request_waits():
    core = make_core(SMALL, max_num_batched_tokens=16, max_num_seqs=2)
    core.add_request(request("first", max_tokens=60))
    step(core)
    step(core)
    core.add_request(request("second", num_prompt=40, max_tokens=40))
    core.add_request(request("third", max_tokens=3))  # there is no free slot for it
    while core.scheduler.waiting:
        step(core)
        assert max(lengths(core)[-1]) == 1
    assert lengths(core)[1] == [8]
    while core.has_work():
        step(core)
    assert max(map(max, lengths(core)[-4:])) > 1


def test_no_lookahead_with_a_grammar():
    core = make_core(SMALL)
    core.add_request(request("free", max_tokens=30))
    core.add_request(
        request(
            "led",
            max_tokens=12,
            structured_outputs=StructuredOutputsParams(regex="a*"),
            eos_token_ids=[96],
        )
    )
    assert len(run(core)[0]["led"].tokens) == 12
    assert max(length for row in lengths(core) if len(row) == 2 for length in row) == 1
    assert [8] in lengths(core)


@pytest.mark.parametrize(
    "arguments", [{"num_scheduler_steps": 1}, {"async_scheduling": True}], ids=str
)
def test_an_explicit_number_of_steps_is_kept(arguments):
    core = make_core(SMALL, **arguments)
    core.add_request(request())
    run(core)
    assert max(map(max, lengths(core))) == 1


def test_an_executor_without_bursts():
    core = make_core(0)
    core.add_request(request())
    run(core)
    assert max(map(max, lengths(core))) == 1


def test_tokens_decoded_after_a_stop_are_dropped():
    core = make_core(SMALL)
    core.executor.tokens["r", 5] = 13
    core.add_request(request(eos_token_ids=[13]))
    core.add_request(request("other", num_prompt=9, max_tokens=40))
    answers = run(core)[0]
    assert (
        answers["r"].reason is FinishReason.STOP
        and len(answers["r"].tokens) == 6
        and len(answers["other"].tokens) == 40
    )
    assert_nothing_left(core)


def test_without_free_blocks_a_step_decodes_one_token():
    """Two requests that together need more blocks than there are. The free blocks go to the tokens
    that must be computed.
    """
    core = make_core(SMALL, num_gpu_blocks_override=17)
    for name in "ab":
        core.add_request(request(name, num_prompt=100, max_tokens=60))
    answers = run(core)[0]
    assert [len(answers[name].tokens) for name in "ab"] == [60, 60]
    assert_nothing_left(core)
