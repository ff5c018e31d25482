"""RequestSession, the common part of the blocking and the asyncio engine."""

from __future__ import annotations

import pytest
from quire import SamplingParams
from quire.frontend.session import RequestSession, find_eos_ids
from quire.ipc.errors import EngineDeadError, InvalidParameterError
from quire.tests.frontend.scripted_client import ScriptedClient
from quire.tests.frontend.tiny_tokenizers import text_config

PROMPT = {"prompt_token_ids": [5, 6, 7]}


def make_session(answer, **options) -> RequestSession:
    config = text_config()
    return RequestSession(config, ScriptedClient(config, answer, **options))


def submit(session: RequestSession, request_id: str = "r", **params) -> None:
    session.submit(session.process(request_id, PROMPT, SamplingParams(max_tokens=4, **params)))


def test_outputs_of_a_request() -> None:
    session = make_session(lambda request: [10, 11, 12, 13])
    submit(session)
    outputs = []
    while session.has_unfinished_requests():
        outputs += session.take(session.client.get_output())
    assert outputs[-1].finished and outputs[-1].outputs[0].token_ids == [10, 11, 12, 13]


def test_a_refused_request_is_counted_and_not_sent() -> None:
    session = make_session(lambda request: [10])
    with pytest.raises(InvalidParameterError, match="prompt_token_ids"):
        session.process("r", {"prompt_token_ids": [10**6]}, SamplingParams())
    assert session.telemetry.num_inputs_refused == 1
    assert session.client.requests == [] and not session.has_unfinished_requests()


def test_a_request_that_cannot_be_sent_leaks_nothing() -> None:
    session = make_session(lambda request: [10], dies_after=0)
    request = session.process("r", PROMPT, SamplingParams())
    with pytest.raises(EngineDeadError):
        session.submit(request)
    assert not session.has_unfinished_requests()


def test_a_stop_string_ends_the_request_in_the_engine() -> None:
    session = make_session(lambda request: [10] * 4)
    assert session.tokenizer is not None
    submit(session, stop=[session.tokenizer.decode([10])])
    [output] = session.take(session.client.get_output())
    assert output.finished and output.outputs[0].finish_reason == "stop"
    assert session.client.aborted == [session.client.requests[0].request_id]


@pytest.mark.parametrize("act", ["take", "abort"])
def test_the_engines_death_loses_no_output(act: str) -> None:
    """Received outputs are returned although the dead engine cannot be told to abort."""
    session = make_session(lambda request: [10] * 4, dies_after=1)
    assert session.tokenizer is not None
    submit(session, stop=[session.tokenizer.decode([10])] if act == "take" else None)
    outputs = session.client.get_output()
    with pytest.raises(EngineDeadError):
        session.client.get_output()
    [output] = session.take(outputs) if act == "take" else session.abort(["r"])
    assert output.finished
    assert output.outputs[0].finish_reason == ("stop" if act == "take" else "abort")


def test_the_tokenizers_end_token_has_precedence() -> None:
    """Another end token of generation_config.json is a stop_reason, as in vLLM."""
    config = text_config(override_generation_config={"eos_token_id": [8, 7, 6]})
    assert find_eos_ids(config.model_config, 7) == [7, 8, 6]
    assert find_eos_ids(config.model_config, None) == [8, 7, 6]
