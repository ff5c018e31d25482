"""A request's tokens, its end, and the chain of block hashes."""

import subprocess
import sys

import pytest
from quire.core.request import FINISHED_STATUS, Request, RequestStatus, hash_block, hash_root
from quire.ipc.messages import EngineCoreRequest, FinishReason
from quire.ipc.params import SamplingParams


def make_request(prompt=(1, 2, 3), max_model_len=100, **fields) -> Request:
    names = set(EngineCoreRequest.__struct_fields__)
    params = {
        "temperature": 0.0,
        "seed": 0,
        "max_tokens": 10,
        **{k: v for k, v in fields.items() if k not in names},
    }
    message = EngineCoreRequest(
        "r",
        list(prompt),
        SamplingParams(**params),
        **{k: v for k, v in fields.items() if k in names},
    )
    return Request(message, max_model_len=max_model_len)


def test_a_request_owns_its_tokens():
    message = EngineCoreRequest("r", [1, 2], SamplingParams(seed=0, max_tokens=5))
    request = Request(message, max_model_len=100)
    request.append_output_token(9)
    assert (
        request.token_ids == [1, 2, 9]
        and request.output_token_ids == [9]
        and request.num_output_tokens == 1
    )
    assert message.prompt_token_ids == [1, 2]  # the message is not changed


@pytest.mark.parametrize(("token_id", "stop_reason"), [(7, None), (8, 8), (5, 5), (9, 9)])
def test_the_models_end_token_has_no_stop_reason_but_stop_tokens_do(token_id, stop_reason):
    request = make_request(eos_token_ids=[7, 8, 9], stop_token_ids=[5, 7, 8])
    assert request.append_output_token(1) is None
    assert request.append_output_token(token_id) is FinishReason.STOP
    assert request.stop_reason == stop_reason


def test_min_tokens_delays_the_stop_tokens():
    request = make_request(eos_token_ids=[7], stop_token_ids=[5], min_tokens=3)
    assert [request.append_output_token(t) for t in (7, 5, 1)] == [None, None, None]
    assert request.append_output_token(7) is FinishReason.STOP


def test_min_tokens_counts_the_token_that_stops():
    request = make_request(eos_token_ids=[7], min_tokens=2)
    assert [request.append_output_token(t) for t in (7, 7)] == [None, FinishReason.STOP]


def test_length_ends_by_max_tokens_or_max_model_len():
    request = make_request(max_tokens=2)
    assert [request.append_output_token(1) for _ in range(2)] == [None, FinishReason.LENGTH]
    request = make_request(prompt=range(1, 8), max_model_len=9, max_tokens=50, min_tokens=50)
    assert [request.append_output_token(1) for _ in range(2)] == [None, FinishReason.LENGTH]


def test_a_stop_token_at_the_limit_is_a_stop():
    request = make_request(max_tokens=1, eos_token_ids=[7])
    assert request.append_output_token(7) is FinishReason.STOP


def test_resumed_tokens_count_as_output():
    request = make_request(resume_tokens=[4, 5], max_tokens=3)
    assert (
        request.num_prompt_tokens == 3
        and request.num_output_tokens == 2
        and request.num_tokens == 5
    )
    assert request.append_output_token(6) is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (FinishReason.STOP, RequestStatus.FINISHED_STOPPED),
        (FinishReason.LENGTH, RequestStatus.FINISHED_LENGTH),
        (FinishReason.ABORT, RequestStatus.FINISHED_ABORTED),
        (FinishReason.ERROR, RequestStatus.FINISHED_ERROR),
    ],
)
def test_every_reason_has_its_status(reason, status):
    request = make_request()
    assert not request.is_finished
    request.status = FINISHED_STATUS[reason]
    assert request.is_finished and request.status is status


def test_hashes_depend_on_the_tokens_and_not_on_how_they_are_added():
    whole = make_request(prompt=range(1, 41))
    grown = make_request(prompt=range(1, 18))
    assert len(grown.extend_block_hashes(16)) == 1
    for token_id in range(18, 41):
        grown.append_output_token(token_id)
        grown.extend_block_hashes(16)
    assert grown.extend_block_hashes(16) == whole.extend_block_hashes(16)
    assert len(whole.block_hashes) == 2  # 40 tokens: the third block is not full


def test_a_hash_covers_everything_before_it_and_the_salt():
    base = make_request(prompt=[1] * 32).extend_block_hashes(16)
    other_start = make_request(prompt=[2] + [1] * 31).extend_block_hashes(16)
    salted = make_request(prompt=[1] * 32, cache_salt="mine").extend_block_hashes(16)
    empty_salt = make_request(prompt=[1] * 32, cache_salt="").extend_block_hashes(16)
    assert len({*base, *other_start, *salted, *empty_salt}) == 8
    assert make_request(prompt=[1] * 32, cache_salt="mine").extend_block_hashes(16) == salted


def test_hashes_are_the_same_in_every_process():
    code = (
        "from quire.core.request import *; print(hash_block(hash_root('s'), [1, 2, 2**31]).hex())"
    )
    command = [sys.executable, "-c", code]
    runs = [
        subprocess.run(
            command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        for seed in "12"
    ]
    expected = hash_block(hash_root("s"), [1, 2, 2**31]).hex()
    assert [run.stdout.strip() for run in runs] == [expected, expected]
