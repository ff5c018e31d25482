"""ServerState: its errors while nothing is loaded, after loading failed, and while draining."""

import asyncio

import pytest
from quire import EngineDeadError, InvalidParameterError
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.http.errors import ApiError
from quire.frontend.server.state import ServerState, read_template
from quire.tests.frontend.server.scripted import TOOL_TEMPLATE, ScriptedEngine


def refusal(state: ServerState) -> ApiError:
    with pytest.raises(ApiError) as caught:
        state.ready_engine()
    assert caught.value.status == 503
    return caught.value


def test_loading_reports_progress_and_a_retry_after() -> None:
    state = ServerState(ServerConfig(), "m")
    state.loading.began -= 10.0
    state.loading.report("load weights", 0.5)
    error = refusal(state)
    assert (
        error.code == "model_loading"
        and "load weights, 50%" in error.message
        and "s to go" in error.message
    )
    assert 8 <= int(error.headers()["retry-after"]) <= 12


def test_progress_never_decreases() -> None:
    state = ServerState(ServerConfig(), "m")
    for stage, fraction in (
        ("import", 1.0),
        ("load weights", 0.9),
        ("import", 0.2),
        ("an unknown stage", 0.5),
    ):
        before = state.loading.fraction
        state.loading.report(stage, fraction)
        assert state.loading.fraction >= before


def test_the_message_of_a_failure_is_only_logged() -> None:
    state = ServerState(ServerConfig(), "m")
    state.loading.error = "cannot read a secret path"
    error = refusal(state)
    assert (
        error.code == "model_load_failed"
        and "secret" not in error.message
        and error.headers() == {}
    )


def test_draining_refuses() -> None:
    state = ServerState(ServerConfig(), "m")
    state.is_draining = True
    assert refusal(state).code == "shutting_down"


def test_an_engine_that_dies_while_the_server_drains_is_the_reason() -> None:
    state = ServerState(ServerConfig(), "m")
    state.begin_drain()
    error = EngineDeadError("the engine process was killed by SIGKILL")
    assert state.explain(error, "POST /v1/completions", "r").code == "engine_dead"
    state.begin_end()
    assert state.explain(error, "POST /v1/completions", "r").code == "shutting_down"


def test_models_by_name() -> None:
    state = ServerState(ServerConfig(), "m")
    assert state.check_model(None) == state.check_model("m") == "m"
    with pytest.raises(ApiError, match="'gpt-4' does not exist") as caught:
        state.check_model("gpt-4")
    assert (caught.value.status, caught.value.code, caught.value.param) == (
        404,
        "model_not_found",
        "model",
    )


def test_the_model_has_aliases() -> None:
    state = ServerState(ServerConfig(model_aliases=["n", "m", "o"]), "m")
    assert state.model_names == ["m", "n", "o"] and state.check_model("o") == "o"
    with pytest.raises(ApiError, match="This server has 'm', 'n', 'o'"):
        state.check_model("gpt-4")


def test_unknown_models_are_answered_by_the_default_model_if_asked() -> None:
    state = ServerState(ServerConfig(unknown_model="default", model_aliases=["n"]), "m")
    assert state.check_model("claude-opus-9") == "m" and state.check_model("n") == "n"


def test_a_template_is_a_file_or_a_name(tmp_path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    assert read_template(str(tmp_path / "mine.jinja")) == "{{ messages }}"
    assert read_template("tool_use") == "tool_use" and read_template(None) is None
    text = "{{ messages }}" * 500
    assert read_template(text) == text


def test_the_start_says_what_a_model_without_a_chat_template_can_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def told(config: ServerConfig, is_base: bool) -> str:
        caplog.clear()
        engine = ScriptedEngine([""])
        if is_base:
            engine.tokenizer.chat_templates.clear()
        state = ServerState(config, "m")
        asyncio.run(state.adopt_engine(engine))
        assert state.engine is engine
        return caplog.text

    assert (
        told(ServerConfig(), False) == told(ServerConfig(chat_template=TOOL_TEMPLATE), True) == ""
    )
    words = told(ServerConfig(), True)
    for word in ("has no chat template", "base model", "/v1/completions", "--chat-template FILE"):
        assert word in words


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_before_a_model_is_loaded(name: str) -> None:
    with pytest.raises(InvalidParameterError) as raised:
        ServerState(ServerConfig(**{name: "hermess"}), "m")
    assert raised.value.parameter == name
