"""A configuration or request that the engine cannot serve raises an error that names the
parameter.
"""

import pytest
from quire.core.engine_core import EngineCore
from quire.ipc.errors import InvalidParameterError
from quire.ipc.messages import EngineCoreRequest, FinishReason
from quire.ipc.params import PoolingParams
from quire.tests.core.engine_loop import (
    assert_nothing_left,
    greedy,
    make_core,
    make_request,
    run,
)
from quire.tests.fakes import FakeExecutor, expected_output, make_config

REFUSED = [
    ("prompt_token_ids", make_request(prompt=[])),
    ("prompt_token_ids", make_request(prompt=[97])),
    ("prompt_token_ids", make_request(prompt=[-1])),
    ("prompt_token_ids", make_request(prompt=[1] * 256)),
    ("prompt_token_ids", make_request(prompt=["a"])),
    ("prompt_token_ids", make_request(prompt=[1.0])),
    ("prompt_token_ids", make_request(prompt="abc")),
    (
        "prompt_token_ids",
        make_request(prompt=[1] * 200, resume_tokens=[1] * 56, params=greedy(max_tokens=100)),
    ),
    ("resume_tokens", make_request(resume_tokens=[500])),
    ("resume_tokens", make_request(resume_tokens=[1] * 5)),
    ("eos_token_ids", make_request(eos_token_ids=[None])),
    ("params", EngineCoreRequest("r", [1], None)),
    ("params", EngineCoreRequest("r", [1], PoolingParams())),
    ("seed", make_request(params=greedy(seed=None))),
    ("max_tokens", make_request(params=greedy(max_tokens=None))),
    ("resume_tokens", make_request(resume_tokens=[1], params=greedy(n=2))),
    ("logprobs", make_request(params=greedy(logprobs=21))),
    ("prompt_logprobs", make_request(params=greedy(prompt_logprobs=-1))),
    ("stop_token_ids", make_request(params=greedy(stop_token_ids=[97]))),
    ("allowed_token_ids", make_request(params=greedy(allowed_token_ids=[97]))),
    ("logit_bias", make_request(params=greedy(logit_bias={97: 2.0}))),
    ("bad_words_token_ids", make_request(params=greedy(bad_words=["no"]))),
    (
        "bad_words_token_ids",
        make_request(params=greedy(bad_words=["no"], bad_words_token_ids=[[1, 97]])),
    ),
    ("priority", make_request(priority="high")),
    ("cache_salt", make_request(cache_salt=5)),
    ("owner", make_request(owner=5)),
    ("owner", make_request(owner="o" * 257)),
    ("owner_weight", make_request(owner_weight=0.0005)),
    ("owner_weight", make_request(owner_weight=False)),
    ("owner_weight", make_request(owner_weight=float("nan"))),
    ("request_id", make_request(request_id=["r"])),
]


@pytest.mark.parametrize(
    ("parameter", "bad"), REFUSED, ids=[f"{name}-{i}" for i, (name, _) in enumerate(REFUSED)]
)
def test_a_bad_request_fails_alone_and_names_the_parameter(parameter, bad):
    core = make_core()
    core.add_request(make_request("good"), client_index=1)
    core.add_request(bad, client_index=2)
    answers = run(core)
    ((refused_id, refusal),) = answers[2].items()
    assert refused_id == str(bad.request_id) and refusal.tokens == []
    assert refusal.reason is FinishReason.ERROR and refusal.error.startswith(f"{parameter}: "), (
        refusal.error
    )
    assert answers[1]["good"].tokens == expected_output([1, 2, 3], greedy(), [], core.config)[0]
    assert_nothing_left(core)


def test_more_logprobs_than_tokens_are_refused():
    core = make_core(vocab_size=10)
    core.add_request(make_request(params=greedy(logprobs=11)))
    assert (
        run(core)[0]["r"].error
        == "logprobs: must be at most 10 (max_logprobs=20, a vocabulary of 10), got 11"
    )


@pytest.mark.parametrize(
    ("parameter", "arguments"),
    [
        ("max_model_len", {"num_gpu_blocks_override": 16}),  # 15 blocks of 16 for 256 tokens
        ("max_model_len", {"max_model_len": None, "num_gpu_blocks_override": 16}),
        ("max_num_batched_tokens", {"max_num_batched_tokens": None}),
        (
            "max_num_batched_tokens",
            {"max_num_batched_tokens": 255, "enable_chunked_prefill": False},
        ),
    ],
)
def test_a_configuration_that_could_deadlock_is_refused(parameter, arguments):
    config = make_config(**arguments)
    with pytest.raises(InvalidParameterError) as error:
        EngineCore(config, FakeExecutor(config))
    assert error.value.parameter == parameter
