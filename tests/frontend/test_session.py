"""RequestSession, the common part of the blocking and the asyncio engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import quire
from quire import LLM, EngineUsageError, SamplingParams
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
    assert session.num_inputs_refused == 1
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


@pytest.mark.parametrize(
    ("form", "name_of_client"), [("inproc", "InprocClient"), ("process", "BlockingClient")]
)
def test_names_that_readers_of_vllm_type(
    form: str, name_of_client: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(engine=form, max_num_seqs=1, num_threads=1) as llm:
        engine = llm.llm_engine
        assert type(engine.engine_core).__name__ == name_of_client
        assert isinstance(engine.engine_core, quire.EngineClient)
        assert engine.output_processor is engine.session.output_processor
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        llm.pause("keep")
        ids = llm.enqueue(["Once", "One day"], params)
        [scheduler] = engine.scheduler
        assert [waiting.split("-")[0] for waiting in scheduler.waiting] == ids
        assert scheduler.get_num_unfinished_requests() == len(ids) == 2
        with pytest.raises(AttributeError):
            scheduler.waiting = []
        with pytest.raises(InvalidParameterError, match="start_profile first"):
            llm.stop_profile()
        llm.start_profile(str(tmp_path / "run"))
        llm.resume()
        outputs = llm.wait_for_completion(use_tqdm=False)
        trace = llm.stop_profile()
        assert [output.request_id for output in outputs] == ids and len(trace.steps) >= 2
        assert json.loads((tmp_path / "run.json").read_text())["traceEvents"]
        assert not scheduler.has_unfinished_requests() and scheduler.running == []
        with caplog.at_level("INFO"):
            llm.do_log_stats()
        assert "generation throughput" in caplog.text
        if form == "inproc":
            [name] = llm.apply_model(lambda model: type(model).__name__)
            assert name == "Decoder"
        else:
            with pytest.raises(EngineUsageError, match='needs engine="inproc"'):
                llm.apply_model(type)


def test_every_name_of_the_package_is_there() -> None:
    assert [name for name in quire.__all__ if getattr(quire, name, None) is None] == []
    assert quire.AsyncLLMEngine is quire.AsyncLLM and issubclass(quire.MPClient, quire.EngineClient)
