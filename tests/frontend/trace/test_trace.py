"""Traces of a running engine through every client, and as files."""

import json
from pathlib import Path

import pytest
from quire import LLM, InvalidParameterError, SamplingParams
from quire.frontend.trace.trace import Trace
from quire.tests.client_forms import BLOCKING, DEFAULTS, blocking_engine
from quire.tests.frontend.trace.made import made

GOLDEN = Path(__file__).with_name("trace.json")
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)


def test_the_form_of_the_json():
    assert json.loads(made().to_json()) == json.loads(GOLDEN.read_text())


def test_a_file_gives_the_same_trace():
    trace = made()
    again = Trace.from_json(trace.to_json())
    assert again.recorded == trace.recorded and again.received == trace.received
    assert again.tree() == trace.tree()
    with pytest.raises(InvalidParameterError, match="a.json: is not a trace of Quire"):
        Trace.from_json(b'{"steps": 3}', "a.json")


@pytest.mark.sampled(step=4)
@pytest.mark.parametrize("client", BLOCKING)
def test_a_trace_through_each_client(client, tmp_path):
    with blocking_engine(client, tmp_path) as engine:
        with engine.trace(2) as trace:
            engine.add_request("r", "Once upon a time", PARAMS)
            while engine.has_unfinished_requests():
                engine.step()
    assert len(trace.steps) == 2
    assert [row.num_tokens for step in trace.steps for row in step.rows][1] == 1
    assert all(step.ranks[0].kernels for step in trace.steps)
    assert "".join(text for one in trace.received for text in one.texts.values())
    assert "layers[i].mlp.down_proj" in trace.tree()
    check_hops(trace, crosses_processes=client in ("process", "daemon"))


def check_hops(trace: Trace, crosses_processes: bool) -> None:
    """Each part of a hop follows the one before; in one process there is none."""
    hops = trace.recorded.hops
    assert trace.recorded.coded == []
    if not crosses_processes:
        assert not hops and "hop of" not in trace.tree()
        return
    [request, *outputs] = hops
    assert request.request_id.startswith("r") and not any(one.request_id for one in outputs)
    assert len(outputs) >= 2
    for hop in hops:
        encoded_s = hop.encode_begin_s + hop.encode_s
        decoded_s = hop.decode_begin_s + hop.decode_s
        assert hop.num_bytes > 50 and min(hop.encode_s, hop.decode_s) > 0
        assert hop.handed_s <= hop.encode_begin_s < encoded_s <= hop.decode_begin_s
        assert decoded_s <= hop.taken_s
    assert request.taken_s <= trace.steps[0].begin_s <= outputs[0].handed_s
    assert trace.tree().count("hop of outputs to the frontend") == len(trace.steps)


def test_llm_traces_and_tokens_do_not_change():
    with LLM(engine="inproc", **DEFAULTS) as llm:
        plain = llm.generate("Once upon", PARAMS, use_tqdm=False)[0].outputs[0]
        with llm.trace(steps=4) as trace:
            with pytest.raises(RuntimeError, match="complete when its context ends"):
                trace.tree()
            traced = llm.generate("Once upon", PARAMS, use_tqdm=False)[0].outputs[0]
        assert (traced.token_ids, traced.logprobs) == (plain.token_ids, plain.logprobs)
        assert trace.kernels() and 0 < len(trace.steps) <= 4
        with pytest.raises(InvalidParameterError, match="steps: must be between 1 and 64, got 0"):
            with llm.trace(steps=0):
                pass


def test_an_exception_in_the_context_ends_the_trace():
    with LLM(engine="inproc", **DEFAULTS) as llm:
        with pytest.raises(KeyError):
            with llm.trace():
                raise KeyError("x")
        assert not llm.session.is_recording
        with llm.trace() as trace:
            pass
        assert trace.steps == []
