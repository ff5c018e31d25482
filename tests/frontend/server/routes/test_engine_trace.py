"""POST /v1/engine/trace: with a prompt, without one, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2 as httpx
import pytest
from quire.frontend.cli.top import ServerError
from quire.frontend.cli.trace import main
from quire.frontend.trace.trace import Trace
from quire.ipc.errors import InvalidParameterError
from quire.tests.frontend.server.conftest import running_server

PATH = "/v1/engine/trace"
FLAGS = ("--kv-cache-memory-bytes", "24000000", "--num-threads", "1")


@pytest.fixture(scope="module")
def admin() -> Iterator[httpx.Client]:
    with running_server(*FLAGS, "--admin") as client:
        yield client


def test_the_steps_of_a_prompt(admin):
    answer = admin.post(PATH, json={"steps": 2, "prompt": "Once upon a time"})
    assert answer.status_code == 200
    trace = Trace.from_json(answer.content)
    first, second = trace.steps
    assert first.rows[0].num_tokens == 4 and second.rows[0].num_tokens == 1
    assert first.ranks[0].kernels and trace.received
    assert "layers[i].mlp.down_proj" in trace.tree()
    # the way of a server's requests, which is not LLM's
    assert list(trace.places)[:5] == [
        "request_body.read_body",
        "chat_turn.prepare_chat",
        "admission.wait",
        "generation.run",
        "AsyncLLM.generate",
    ]
    assert trace.places["generation.run"].startswith("frontend/server/turns/generation.py:")
    assert "AsyncLLM._read_outputs  frontend/async_llm.py:" in trace.tree()
    assert "LLM.generate " not in trace.tree().replace("AsyncLLM.generate ", "")
    assert "hop of outputs to the frontend" in trace.tree()
    # the completion has ended with the trace
    again = admin.post(PATH, json={"steps": 1, "timeout_s": 0.2})
    assert again.status_code == 200 and Trace.from_json(again.content).steps == []


def test_a_profile_is_the_trace_between_two_calls(admin):
    refused = admin.post("/stop_profile")
    assert refused.status_code == 400 and "start_profile first" in refused.text
    assert admin.post("/start_profile").json() == {"status": "profiling"}
    assert admin.post("/start_profile").status_code == 400
    body = {"prompt": "Once upon a time", "max_tokens": 3, "ignore_eos": True}
    assert admin.post("/v1/completions", json=body).status_code == 200
    answer = admin.post("/stop_profile")
    assert answer.headers["content-type"] == "application/json"
    trace = Trace.from_json(answer.content)
    assert trace.steps[0].rows[0].num_tokens == 4 and trace.received
    assert admin.post("/stop_profile").status_code == 400


def test_quire_trace_asks_a_server(admin, capsys):
    assert main([str(admin.base_url), "--steps", "1", "--prompt", "One day"]) == 0
    out = capsys.readouterr().out
    assert "Scheduler.schedule" in out and out.count("most time: ") == 1
    with pytest.raises(InvalidParameterError, match="--dtype: does not apply to a server"):
        main([str(admin.base_url), "--dtype", "float32"])
    with pytest.raises(ServerError, match="model 'other' does not exist"):
        main([str(admin.base_url), "--model", "other"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"steps": 0}, "steps"),
        ({"steps": 65}, "steps"),
        ({"steps": "x"}, "steps"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": 61}, "timeout_s"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "word " * 5000}, "prompt"),
    ],
)
def test_bad_bodies_are_refused(admin, body, param):
    answer = admin.post(PATH, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    # and no trace was left open
    assert admin.post(PATH, json={"steps": 1, "timeout_s": 0.1}).status_code == 200


@pytest.mark.slow
def test_without_admin_it_is_refused():
    with running_server(*FLAGS) as client:
        answer = client.post(PATH, json={"steps": 1})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "admin_disabled"
