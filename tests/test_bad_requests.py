"""A bad request fails alone, with an error that names the parameter. Concurrent requests are not
affected.
"""

from __future__ import annotations

import math

import msgspec
import pytest
from quire import EngineArgs, InvalidParameterError, LLMEngine, PoolingParams, SamplingParams
from quire.ipc.messages import EngineCoreRequest, FinishReason
from quire.tests.round_trip import RoundTripClient

GOOD = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
PROMPTS = ["Once upon a time", "One day, a little fox", "The owl"]
BAD_IN_THE_FRONTEND = {  # user error -> the parameter that the error must name
    "temperature": lambda engine: engine.add_request(
        "bad", "Hi", SamplingParams(temperature=math.nan)
    ),
    "top_p": lambda engine: engine.add_request("bad", "Hi", SamplingParams(top_p=1.5)),
    "max_tokens": lambda engine: engine.add_request("bad", "Hi", SamplingParams(max_tokens=0)),
    "prompt": lambda engine: engine.add_request("bad", "word " * 1000, GOOD),
    "prompt_token_ids": lambda engine: engine.add_request(
        "bad", {"prompt_token_ids": [1, 10**6]}, GOOD
    ),
    "stop_token_ids": lambda engine: engine.add_request(
        "bad", "Hi", SamplingParams(stop_token_ids=[10**6])
    ),
    "n": lambda engine: engine.add_request("bad", "Hi", SamplingParams(n=2, temperature=0)),
    "promt": lambda engine: engine.add_request("bad", {"promt": "Hi"}, GOOD),
    "temprature": lambda engine: engine.add_request("bad", "Hi", SamplingParams(temprature=1.0)),
    "request_id": lambda engine: engine.add_request("good-0", "Hi", GOOD),
}
BAD_ON_THE_WIRE = {  # requests that an engine client could send past the frontend's checks
    "prompt_token_ids": EngineCoreRequest("bad", [1, 10**6], msgspec.structs.replace(GOOD)),
    "max_tokens": EngineCoreRequest("bad", [1], SamplingParams(seed=1, max_tokens=None)),
    "task": EngineCoreRequest("bad", [1], PoolingParams()),
    "resume_tokens": EngineCoreRequest("bad", [1], GOOD, resume_tokens=[2] * 24),
    "eos_token_ids": EngineCoreRequest("bad", [1], GOOD, eos_token_ids=[1.5]),
}


@pytest.fixture(scope="module", params=["inproc", "inproc with codec", "process"])
def engine(request):
    args = EngineArgs(max_model_len=256, dtype="float32", num_threads=1, num_scheduler_steps=1)
    if request.param == "inproc with codec":
        config = args.create_engine_config()
        made = LLMEngine(config, RoundTripClient(config))
    else:
        made = LLMEngine.from_engine_args(args, engine=request.param)
    yield made
    made.shutdown()


def run(engine: LLMEngine, disturb=lambda engine: None) -> dict[str, list[int]]:
    """Return the tokens of the good requests. `disturb` is called after a few steps, when all of
    them run.
    """
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(f"good-{i}", prompt, GOOD)
    tokens, step = {}, 0
    while engine.has_unfinished_requests():
        tokens |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
        step += 1
        if step == 4:
            disturb(engine)
    return tokens


@pytest.mark.parametrize("parameter", BAD_IN_THE_FRONTEND)
def test_user_errors(engine, parameter):
    def disturb(engine):
        with pytest.raises((InvalidParameterError, TypeError), match=parameter):
            BAD_IN_THE_FRONTEND[parameter](engine)

    assert run(engine, disturb) == run(engine)


@pytest.mark.parametrize("parameter", BAD_ON_THE_WIRE)
def test_requests_past_the_frontend(engine, parameter):
    expected = run(engine)
    refusals = []
    deliver = engine.client.get_output

    def get_output():
        outputs = deliver()
        refusals.extend(
            entry for entry in outputs.finished if outputs.request_ids[entry.row] == "bad"
        )
        return outputs

    engine.client.get_output = get_output
    try:
        assert (
            run(engine, lambda engine: engine.client.add_request(BAD_ON_THE_WIRE[parameter]))
            == expected
        )
        while not refusals:  # a fast engine may finish the others before it reads the bad one
            engine.client.get_output()
    finally:
        del engine.client.get_output
    assert [entry.reason for entry in refusals] == [FinishReason.ERROR]
    assert parameter in refusals[0].error
    assert engine.client.call_utility("check_integrity")
