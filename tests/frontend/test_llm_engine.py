"""LLMEngine over a scripted client, and over a real engine core with a fake executor."""

from __future__ import annotations

import json
import logging
import random
import threading
from pathlib import Path

import pytest
from quire import (
    EngineArgs,
    EngineDeadError,
    InvalidParameterError,
    LLMEngine,
    ModelLoadError,
    SamplingParams,
)
from quire.frontend.clients import connect
from quire.frontend.clients.blocking_client import BlockingClient
from quire.frontend.clients.inproc_client import InprocClient
from quire.frontend.text.tokenizer import Tokenizer
from quire.tests.fakes import FakeExecutor, expected_output
from quire.tests.frontend.scripted_client import ScriptedClient
from quire.tests.frontend.tiny_tokenizers import (
    text_config,
    tiny_tokenizer,
    tiny_tokenizer_directory,
)
from quire.tests.round_trip import RoundTripClient

TEXT = tiny_tokenizer().encode("the end of it")


def make_engine(answer=lambda request: TEXT, **options) -> LLMEngine:
    config = text_config()
    return LLMEngine(config, ScriptedClient(config, answer, **options))


def run(engine: LLMEngine) -> dict:
    """Step until all requests finish. Return the last output of each, by id."""
    last = {}
    while engine.has_unfinished_requests():
        last.update({output.request_id: output for output in engine.step()})
    return last


def test_add_step_until_finished() -> None:
    engine = make_engine()
    engine.add_request("a", "prompt", SamplingParams(max_tokens=4))
    engine.add_request("b", [1, 2], SamplingParams(), priority=3)
    assert engine.get_num_unfinished_requests() == 2
    last = run(engine)
    assert (
        last["a"].outputs[0].token_ids == TEXT[:4]
        and last["a"].outputs[0].finish_reason == "length"
    )
    assert last["b"].outputs[0].text == "the end of it"
    assert engine.client.requests[1].priority == 3
    assert engine.step() == [] and engine.stats is not None


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
def test_stop_strings_abort_in_the_engine(tokens_per_step) -> None:
    engine = make_engine(tokens_per_step=tokens_per_step)
    engine.add_request("a", "prompt", SamplingParams(stop="end", max_tokens=None))
    assert run(engine)["a"].outputs[0].text == "the "
    assert engine.client.aborted == (
        [engine.client.requests[0].request_id] if tokens_per_step < 100 else []
    )


def test_a_refused_request_is_never_sent() -> None:
    engine = make_engine()
    engine.add_request("a", "prompt", SamplingParams())
    for prompt, params in (
        ("", SamplingParams()),
        ("x", SamplingParams(n=2, temperature=0)),
        ("y" * 100, SamplingParams()),
    ):
        with pytest.raises(InvalidParameterError):
            engine.add_request("b", prompt, params)
    with pytest.raises(InvalidParameterError, match="request_id"):
        engine.add_request("a", "x", SamplingParams())
    assert len(engine.client.requests) == 1 and engine.get_num_unfinished_requests() == 1


def test_abort_request() -> None:
    engine = make_engine()
    for request_id in "abc":
        engine.add_request(request_id, "prompt", SamplingParams())
    engine.step()
    [output] = engine.abort_request("a")
    assert output.outputs[0].finish_reason == "abort" and output.outputs[0].token_ids == TEXT[:1]
    assert [o.request_id for o in engine.abort_request(["b", "unknown"])] == ["b"]
    assert list(run(engine)) == ["c"]
    assert engine.client.aborted == [request.request_id for request in engine.client.requests[:2]]


def test_a_failure_inside_the_engine_fails_one_request() -> None:
    engine = make_engine(lambda request: "out of luck" if request.priority else TEXT)
    engine.add_request("bad", "prompt", SamplingParams(), priority=1)
    engine.add_request("good", "prompt", SamplingParams())
    last = run(engine)
    assert (last["bad"].outputs[0].finish_reason, last["bad"].error) == ("error", "out of luck")
    assert last["good"].outputs[0].text == "the end of it" and last["good"].error is None


def test_a_dead_engine_raises_and_adds_nothing() -> None:
    engine = make_engine(dies_after=1)
    engine.add_request("a", "prompt", SamplingParams())
    engine.step()
    with pytest.raises(EngineDeadError):
        engine.step()
    with pytest.raises(EngineDeadError):
        engine.add_request("b", "prompt", SamplingParams())
    assert engine.get_num_unfinished_requests() == 1
    engine.abort_all_requests()
    assert not engine.has_unfinished_requests()


def test_utilities_reach_the_client() -> None:
    engine = make_engine()
    engine.reset_prefix_cache()
    engine.get_metrics()
    engine.call_utility("ping", 1)
    assert engine.client.calls == [("reset_prefix_cache", False), ("get_metrics",), ("ping", 1)]
    engine.shutdown()
    assert engine.client.num_shutdowns == 1


@pytest.fixture
def model(tmp_path) -> str:
    for path in tiny_tokenizer_directory().iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(
        json.dumps({"max_position_embeddings": 64, "vocab_size": 320, "eos_token_id": 300})
    )
    return str(tmp_path)


def test_from_engine_args_makes_the_client(model, monkeypatch) -> None:
    made = []

    async def start_client(config, engine, on_progress):
        made.append((config, engine, ScriptedClient(config, lambda request: TEXT)))
        return made[0][2]

    monkeypatch.setattr(connect, "start_client", start_client)
    engine = LLMEngine.from_engine_args(EngineArgs(model), engine="process")
    [(config, name, client)] = made
    assert (config.model_config.max_model_len, name) == (64, "process")
    assert isinstance(engine.client, BlockingClient) and engine.client.client is client
    engine.add_request("a", "prompt", SamplingParams())
    # the tokenizer's and config.json's
    assert client.requests[0].eos_token_ids == [302, 300]
    assert engine.tokenizer is engine.get_tokenizer()


def test_the_tokenizer_is_read_while_the_engine_loads(model, monkeypatch) -> None:
    """It is read once the engine's configuration is sent, and only once."""
    read, when = [], {}

    def load_tokenizer(model_config):
        read.append(threading.current_thread() is threading.main_thread())
        return Tokenizer(model_config.model)

    async def start_client(config, engine, on_progress):
        for stage, fraction in (
            ("start", 0.0),
            ("start", 1.0),
            ("import", 0.0),
            ("load weights", 0.5),
            ("load weights", 1.0),
        ):
            on_progress(stage, fraction)
            when[stage, fraction] = len(read)
        return ScriptedClient(config, lambda request: TEXT)

    monkeypatch.setattr(connect, "load_tokenizer", load_tokenizer)
    monkeypatch.setattr(connect, "start_client", start_client)
    engine = LLMEngine.from_engine_args(EngineArgs(model))
    assert read == [False] and when["start", 0.0] == 0
    assert engine.get_tokenizer().eos_token_id == 302


def test_an_unreadable_tokenizer_is_the_callers_error(model, monkeypatch) -> None:
    async def start_client(config, engine, on_progress):
        on_progress("import", 0.0)
        return ScriptedClient(config, lambda request: TEXT)

    (Path(model) / "tokenizer.json").write_text("{")
    monkeypatch.setattr(connect, "start_client", start_client)
    with pytest.raises(ModelLoadError, match="tokenizer.json"):
        LLMEngine.from_engine_args(EngineArgs(model))


def test_attaching_uses_the_engines_configuration(model, monkeypatch) -> None:
    theirs = EngineArgs(model, max_model_len=32).create_engine_config()
    clients = []

    async def start_client(config, engine, on_progress):
        clients.append(ScriptedClient(theirs, lambda request: TEXT))
        return clients[-1]

    monkeypatch.setattr(connect, "start_client", start_client)
    engine = LLMEngine.from_engine_args(EngineArgs(), engine="ipc://somewhere")
    assert engine.config == theirs and engine.tokenizer.encode("x") == tiny_tokenizer().encode("x")
    with pytest.raises(InvalidParameterError, match="max_model_len"):
        LLMEngine.from_engine_args(EngineArgs(max_model_len=16), engine="ipc://somewhere")
    assert [client.num_shutdowns for client in clients] == [0, 1]


def test_a_model_without_tokenizer_ends_the_engine(tmp_path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"max_position_embeddings": 64, "vocab_size": 320})
    )
    started = []

    async def start_client(config, engine, on_progress):
        started.append(ScriptedClient(config, lambda request: TEXT))
        return started[-1]

    monkeypatch.setattr(connect, "start_client", start_client)
    with pytest.raises(ModelLoadError, match="tokenizer.json"):
        LLMEngine.from_engine_args(EngineArgs(str(tmp_path)))
    assert [client.num_shutdowns for client in started] == [1]
    engine = LLMEngine.from_engine_args(EngineArgs(str(tmp_path), skip_tokenizer_init=True))
    assert engine.get_tokenizer() is None


def test_default_sampling_params_are_those_of_the_model(model, tmp_path, caplog) -> None:
    recommended = {
        "temperature": 0.6,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "max_new_tokens": 7,
        "eos_token_id": [5],
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))

    def defaults(**arguments) -> SamplingParams:
        config = EngineArgs(model, **arguments).create_engine_config()
        engine = LLMEngine(config, ScriptedClient(config, lambda request: TEXT))
        engine.add_request("a", "prompt", SamplingParams())
        assert engine.client.requests[0].eos_token_ids == [
            302,
            *arguments.get("override_generation_config", {}).get("eos_token_id", [5]),
        ]
        return engine.get_default_sampling_params()

    with caplog.at_level(logging.INFO):
        assert defaults() == SamplingParams(
            temperature=0.6, top_k=20, repetition_penalty=1.1, max_tokens=7
        )
    assert (
        "default sampling parameters: temperature=0.6, top_k=20, repetition_penalty=1.1, "
        "max_tokens=7" in caplog.text
    )
    assert defaults(
        override_generation_config={"temperature": 0.5, "min_p": 0.1, "eos_token_id": [6]}
    ) == SamplingParams(temperature=0.5, top_k=20, repetition_penalty=1.1, max_tokens=7, min_p=0.1)
    # its EOS ids still apply
    assert (
        defaults(generation_config="none")
        == make_engine().get_default_sampling_params()
        == SamplingParams()
    )
    assert defaults(
        generation_config="none", override_generation_config={"top_p": 0.5}
    ) == SamplingParams(top_p=0.5)
    for overrides, words in (
        ({"temprature": 1}, "unknown key 'temprature'; the keys are temperature, "),
        ({"top_p": 2.0}, "top_p: must be"),
    ):
        with pytest.raises(InvalidParameterError, match=f"override_generation_config: .*{words}"):
            defaults(override_generation_config=overrides)
    (tmp_path / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(
        ModelLoadError,
        match=r'generation_config.json in .*: temperature: must be .*generation_config="none"',
    ):
        defaults()
    assert (
        defaults(override_generation_config={"temperature": 0.5, "eos_token_id": [5]}).temperature
        == 0.5
    )


# ---------------------------------------------------------------- over a real engine core


def inproc_engine(*, round_trip: bool, **arguments) -> LLMEngine:
    config = text_config(**arguments)
    return LLMEngine(
        config,
        (RoundTripClient if round_trip else InprocClient)(config, executor=FakeExecutor(config)),
    )


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.8]),
        max_tokens=rng.choice([1, 5, 30, None]),
        min_tokens=rng.choice([0, 0, 1]),
        stop_token_ids=rng.sample(range(320), 20) if rng.random() < 0.4 else None,
        stop=rng.choice([None, ["e"], ["th", "a b"]]),
        logprobs=rng.choice([None, 0, 3]),
        output_kind=rng.choice([0, 1, 2]),
    )


@pytest.mark.parametrize("round_trip", [False, True])
def test_a_random_workload_equals_the_oracle(round_trip) -> None:
    rng = random.Random(0)
    engine = inproc_engine(
        round_trip=round_trip, max_num_batched_tokens=48, num_gpu_blocks_override=17
    )
    waiting = [
        (str(n), [rng.randrange(320) for _ in range(rng.randint(0, 59))] + [64], random_params(rng))
        for n in range(60)
    ]
    sent, texts, last = {}, {}, {}
    while waiting or engine.has_unfinished_requests():
        for request_id, prompt, params in waiting[: rng.randint(0, 4)]:
            request = engine.session.process(request_id, prompt, params, priority=rng.randint(0, 2))
            sent[request_id] = request.core_request
            engine.session.submit(request)
            waiting.pop(0)
        for output in engine.step():
            new, old = output.outputs[0], texts.setdefault(output.request_id, ["", []])
            delta = sent[output.request_id].sampling_params.output_kind == 1
            texts[output.request_id] = (
                [old[0] + new.text, old[1] + new.token_ids] if delta else [new.text, new.token_ids]
            )
            last[output.request_id] = output
        engine.call_utility("check_integrity")
    assert last.keys() == sent.keys()
    for request_id, request in sent.items():
        check_against_oracle(request, *texts[request_id], last[request_id], engine)
    engine.shutdown()


def check_against_oracle(request, text, token_ids, output, engine: LLMEngine) -> None:
    params, completion = request.sampling_params, output.outputs[0]
    expected, reason, stop_reason = expected_output(
        request.prompt_token_ids, params, request.eos_token_ids, engine.config
    )
    assert output.finished and output.error is None and output.num_cached_tokens is not None
    assert token_ids == expected[: len(token_ids)]
    whole = engine.tokenizer.decode(
        expected[:-1] if str(reason) == "stop" else expected, skip_special_tokens=True
    )
    if isinstance(completion.stop_reason, str):
        assert (completion.finish_reason, text) == (
            "stop",
            whole[: whole.index(completion.stop_reason)],
        )
    else:
        assert (token_ids, completion.finish_reason, completion.stop_reason) == (
            expected,
            str(reason),
            stop_reason,
        )
        assert text == whole
        if not params.min_tokens:
            assert not any(stop in whole for stop in params.stop_list)
    assert (completion.logprobs is None) == (params.logprobs is None)


@pytest.mark.parametrize("round_trip", [False, True])
def test_an_error_in_the_executor_fails_one_request(round_trip) -> None:
    engine = inproc_engine(round_trip=round_trip)
    requests = [
        engine.session.process(name, [1, 2, 3], SamplingParams(temperature=0, ignore_eos=True))
        for name in ("bad", "good")
    ]
    engine.client._engine.core.executor.nan_rows.add((requests[0].core_request.request_id, 2))
    for request in requests:
        engine.session.submit(request)
    last = run(engine)
    assert (last["bad"].outputs[0].finish_reason, last["bad"].error) == (
        "error",
        FakeExecutor.NAN_ERROR,
    )
    assert len(last["bad"].outputs[0].token_ids) == 2
    assert last["good"].outputs[0].finish_reason == "length" and last["good"].error is None
    engine.shutdown()
