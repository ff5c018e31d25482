"""Flags override the environment, which overrides a file, which overrides defaults. Every value has
its source. Unknown keys raise errors.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from quire import InvalidParameterError, StructuredOutputsParams
from quire.__main__ import main
from quire.frontend.cli.flags import ENGINE, engine_flags, given, sampling_flags, server_flags
from quire.frontend.cli.parser import Parser
from quire.frontend.cli.session import request_flags, session_flags
from quire.frontend.cli.sources import Setting, render
from quire.frontend.server.config import ServerConfig

GROUPS = {
    "server": server_flags(),
    "engine": [flag for flag in engine_flags() if flag.name != "model"] + [ENGINE],
}


def parser() -> Parser:
    """Return the parser of `quire serve`."""
    made = Parser("serve", "[MODEL]", "Serves.", [])
    made.add_model()
    for title, flags in GROUPS.items():
        made.add_flags(title, flags, ())
    return made


def parse(*argv: str) -> dict[str, Any]:
    args = parser().parse(list(argv))
    assert all(getattr(args, name) == setting.value for name, setting in args.settings.items())
    return args.settings


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.chdir(tmp_path)
    return monkeypatch


# ---------------------------------------------------------------- precedence and sources


def test_precedence(environment: pytest.MonkeyPatch) -> None:
    Path("q.yaml").write_text("port: 1\nhost: a\ndtype: float32\nmax-num-seqs: 7\n")
    environment.setenv("QUIRE_PORT", "2")
    environment.setenv("QUIRE_HOST", "b")
    assert parse("--config", "q.yaml", "--port", "3") == {
        "port": Setting(3, "flag --port"),
        "host": Setting("b", "environment QUIRE_HOST"),
        "dtype": Setting("float32", "file q.yaml"),
        "max_num_seqs": Setting(7, "file q.yaml"),
    }


def test_the_model_from_every_source(environment: pytest.MonkeyPatch) -> None:
    assert "model" not in parse()
    Path("q.toml").write_text('model = "in-the-file"\n')
    assert parse("--config", "q.toml")["model"].value == "in-the-file"
    environment.setenv("QUIRE_MODEL", "in-the-environment")
    assert parse("--config", "q.toml")["model"].value == "in-the-environment"
    assert parse("on-the-line", "--config", "q.toml")["model"] == Setting(
        "on-the-line", "the command line"
    )


def test_a_file_in_the_environment(environment: pytest.MonkeyPatch) -> None:
    Path("q.yml").write_text("port: 1")
    Path("other.json").write_text('{"port": 2}')
    environment.setenv("QUIRE_CONFIG", "q.yml")
    assert parse()["port"].value == 1
    assert parse("--config", "other.json")["port"].value == 2


@pytest.mark.parametrize("name", ["q.toml", "q.yaml", "q.json"])
def test_every_kind_of_value_in_a_file(name: str) -> None:
    texts = {
        "q.toml": 'api_key = ["a", "b"]\nkernels = {rms_norm = "reference"}\nswap_space = 1\npage '
        '= false\nmax_body_bytes = "1MiB"\n',
        "q.yaml": "api_key: [a, b]\nkernels: {rms_norm: reference}\nswap_space: 1\npage: "
        "off\nmax_body_bytes: 1MiB\n",
    }
    texts["q.json"] = json.dumps(yaml.safe_load(texts["q.yaml"]), indent="\t")
    Path(name).write_text(texts[name])
    args = parser().parse(["--config", name])
    assert given(args, server_flags()) == {
        "api_key": ["a", "b"],
        "page": False,
        "max_body_bytes": 2**20,
    }
    assert given(args, engine_flags()) == {"kernels": {"rms_norm": "reference"}, "swap_space": 1.0}


def test_a_list_of_names_is_a_name_and_aliases(environment: pytest.MonkeyPatch) -> None:
    """As in vLLM, in whose files served_model_name may be a list."""
    Path("q.yaml").write_text("served-model-name: [a, b, c]\n")
    settings = parse("--config", "q.yaml")
    assert settings["served_model_name"] == Setting("a", "file q.yaml")
    assert settings["model_aliases"] == Setting(["b", "c"], "file q.yaml")
    Path("q.yaml").write_text("served_model_name: []\n")
    with pytest.raises(InvalidParameterError, match="served_model_name must be a string"):
        parse("--config", "q.yaml")


def test_an_empty_file_and_empty_variables_set_nothing(environment: pytest.MonkeyPatch) -> None:
    Path("q.yaml").write_text("# nothing\n")
    environment.setenv("QUIRE_PORT", "")
    assert parse("--config", "q.yaml") == {}


# ---------------------------------------------------------------- unknown or invalid settings


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("prot: 1", "there is no setting 'prot'; did you mean port?"),
        ("zzzzz: 1", "there is no setting 'zzzzz'; quire serve --help-all lists all"),
        ("3: 1", "there is no setting 3; quire serve --help-all lists all"),
        ("temperature: 1", "temperature is not a setting of quire serve"),
        ("port: 99999", "port must be an integer, at least 0, at most 65535, got 99999"),
        ("port: 1\nport: 2", "is not YAML: port occurs twice (line 1)"),
        ("max_num_seqs: 1\nmax-num-seqs: 2", "max_num_seqs occurs twice"),
        ("- port", "must contain names and values (dtype: float32), not a list"),
        ("port", "must contain names and values (dtype: float32), not a str"),
        ("port: [", "is not YAML: "),
        (
            "port: !!python/object/apply:os.getpid []",
            "is not YAML: could not determine a constructor for the tag",
        ),
        ("host: 2026-99-99", "is not YAML: month must be in 1..12"),
        ("api_key: 3", "api_key must be a list of strings"),
    ],
)
def test_a_bad_file_is_named_with_its_key(text: str, sentence: str) -> None:
    Path("q.yaml").write_text(text)
    with pytest.raises(InvalidParameterError) as caught:
        parse("--config", "q.yaml")
    assert (
        caught.value.parameter == "--config"
        and "q.yaml" in caught.value.problem
        and sentence in caught.value.problem
    )
    assert "\n" not in str(caught.value)


def test_files_that_are_not_a_mapping() -> None:
    Path("q.toml").write_text("port = ")
    Path("q.json").write_text('{"port": 1, "port": 2}')
    Path("q.ini").write_text("port = 1")
    Path("bytes.yaml").write_bytes(b"\xff")
    cases = {
        "q.toml": "is not TOML",
        "q.json": "is not JSON: port occurs twice",
        "q.ini": "must end in .yaml",
        "none.yaml": "cannot read",
        "bytes.yaml": "is not UTF-8",
    }
    for name, problem in cases.items():
        with pytest.raises(InvalidParameterError, match=problem):
            parse("--config", name)


def test_a_bad_variable_is_named(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("QUIRE_MAX_NUM_SEQS", "0")
    with pytest.raises(
        InvalidParameterError, match="^QUIRE_MAX_NUM_SEQS: must be an integer, at least 1, got '0'$"
    ):
        parse()


def test_only_an_unknown_variable_is_warned_about(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    variables = {
        # of another command, not read by this one
        "QUIRE_TRACEBACK": "1",
        "QUIRE_NATIVE": "0",
        "QUIRE_TEMPERATURE": "hot",
        "QUIRE_LISTEN": "x",
        "QUIRE_SERVICE_HOST": "10.0.0.1",
        "QUIRE_SERVICE_PORT_HTTP": "80",
        "QUIRE_PORT": "tcp://10.0.0.1:80",
        "QUIRE_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    for name, value in variables.items():
        environment.setenv(name, value)
    assert parse() == {} and capsys.readouterr().err == ""
    environment.setenv("QUIRE_MAX_MODLE_LEN", "1")
    environment.setenv("QUIRE_XXXXXXXX", "1")
    assert parse() == {}
    assert capsys.readouterr().err.splitlines() == [
        "quire: the variable QUIRE_MAX_MODLE_LEN matches no setting; did you mean "
        "QUIRE_MAX_MODEL_LEN?",
        "quire: the variable QUIRE_XXXXXXXX matches no setting; it is ignored",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "x"],
        ["chat"],
        ["engine", "--listen", "ipc://x"],
        ["plan"],
        ["serve", "--port", "0"],
    ],
)
def test_an_error_names_the_source_of_a_value_outside_the_command_line(
    arguments: list[str], environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    Path("q.yaml").write_text("max_model_len: 999999")
    environment.setenv("QUIRE_CONFIG", "q.yaml")
    assert main(arguments) == 2
    problem = "quire: max_model_len: must be at most 4096, the context of the model, got 999999"
    assert (
        f"{problem} (hf_overrides can change it) (from the file q.yaml)\n"
        in capsys.readouterr().err
    )
    assert main([*arguments, "--max-model-len", "9999"]) == 2
    assert "from the" not in capsys.readouterr().err


def test_an_error_of_a_sampling_parameter_names_its_variable(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    environment.setenv("QUIRE_TOP_P", "3")
    assert main(["generate", "x"]) == 2
    assert (
        capsys.readouterr().err
        == "quire: top_p: must be greater than 0 and at most 1, got 3.0 (from the environment "
        "QUIRE_TOP_P)\n"
    )


# ---------------------------------------------------------------- printing


def printed(capsys: pytest.CaptureFixture, *argv: str) -> str:
    with pytest.raises(SystemExit) as leaving:
        parse(*argv, "--print-config")
    assert not leaving.value.code
    return capsys.readouterr().out


def test_printed_settings_can_be_read_back(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    environment.setenv("QUIRE_HOST", "::1")
    Path("q.toml").write_text("swap_space = 0.5")
    text = printed(
        capsys,
        "a: model # here",
        "--config",
        "q.toml",
        "--hf-overrides",
        '{"x": 1e16, "none": null}',
        "--no-page",
    )
    lines = {line.split(":")[0]: line for line in text.splitlines()}
    assert lines["host"].endswith("# environment QUIRE_HOST") and lines["swap_space"].endswith(
        "# file q.toml"
    )
    assert lines["page"].split() == ["page:", "false", "#", "flag", "--page"] and lines[
        "port"
    ].split() == ["port:", "8000", "#", "default"]
    assert set(yaml.safe_load(text)) == {
        "model",
        *(flag.name for flags in GROUPS.values() for flag in flags),
    }
    environment.delenv("QUIRE_HOST")
    Path("back.yaml").write_text(text)
    again = parse("--config", "back.yaml")
    assert {setting.source for setting in again.values()} == {"file back.yaml"}
    values = {name: setting.value for name, setting in again.items()}
    given_before = {
        "model": "a: model # here",
        "host": "::1",
        "swap_space": 0.5,
        "page": False,
        "hf_overrides": {"x": 1e16, "none": None},
    }
    assert (
        values
        == {flag.name: flag.default for flags in GROUPS.values() for flag in flags} | given_before
    )
    assert ServerConfig(
        **{flag.name: values[flag.name] for flag in server_flags()}
    ) == ServerConfig(host="::1", page=False)


def test_keys_are_never_printed_and_their_omission_is_reported(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    environment.setenv("QUIRE_API_KEY", '["sk-secret", "sk-other"]')
    text = printed(capsys)
    assert (
        "sk-" not in text
        and "api_key: <hidden>" in text
        and "# 2 given, environment QUIRE_API_KEY; never printed" in text
    )
    Path("back.yaml").write_text(text)
    assert parse("--config", "back.yaml")["api_key"].value == ["sk-secret", "sk-other"]
    assert parse("--config", "back.yaml", "--api-key", "new")["api_key"].value == ["new"]
    environment.delenv("QUIRE_API_KEY")
    with pytest.raises(
        InvalidParameterError,
        match="api_key is not written there but <hidden>, .* give it by --api-key or QUIRE_API_KEY",
    ):
        parse("--config", "back.yaml")
    environment.setenv("QUIRE_API_KEY", "")
    with pytest.raises(InvalidParameterError, match="^QUIRE_API_KEY: must not hold an empty key$"):
        parse()
    environment.delenv("QUIRE_API_KEY")
    with pytest.raises(InvalidParameterError, match="^--api-key: must not hold an empty key$"):
        parse("--api-key", "a", "--api-key", "")


def test_defaults_that_are_resolved_later_are_not_printed() -> None:
    """These are generate's: the model recommends sampling parameters, and the seed is random.
    Reading printed values back would fix them.
    """
    groups = [("sampling", request_flags(max_tokens=256)), ("engine", session_flags())]
    assert set(yaml.safe_load(render(groups, {}, "quire generate"))) == {
        flag.name for flag in session_flags()
    } - {"seed"}
    params = StructuredOutputsParams(choice=["yes", "no"])
    text = render(
        groups,
        {"structured_outputs": Setting(params, "flag"), "stop": Setting(["# a"], "flag")},
        "quire generate",
    )
    assert yaml.safe_load(text)["structured_outputs"]["choice"] == ["yes", "no"] and yaml.safe_load(
        text
    )["stop"] == ["# a"]
    assert "# max_tokens: 256" in text and "# temperature: 1.0" in text


def test_every_command_takes_settings_from_everywhere() -> None:
    """One end-to-end run in a separate process: a file, a variable and a flag reach `quire
    generate`, with sampling parameters.
    """
    Path("q.yaml").write_text("dtype: float32\ntemperature: 0.25\n")
    command = [
        sys.executable,
        "-m",
        "quire",
        "generate",
        "x",
        "--config",
        "q.yaml",
        "--top-p",
        "0.5",
        "--print-config",
    ]
    done = subprocess.run(
        command,
        env={"QUIRE_MAX_TOKENS": "3", **_path()},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    stated = yaml.safe_load(done.stdout)
    assert (stated["dtype"], stated["temperature"], stated["top_p"], stated["max_tokens"]) == (
        "float32",
        0.25,
        0.5,
        3,
    )
    assert {flag.name for flag in sampling_flags()} - set(stated) and done.stderr == ""


def _path() -> dict[str, str]:
    import os

    return {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_a_servers_settings_work_with_plan_and_doctor(
    command: str, capsys: pytest.CaptureFixture
) -> None:
    for argv in (
        ["serve", "--port", "0", "--max-model-len", "512"],
        [command, "--config", "serve.yaml"],
    ):
        with pytest.raises(SystemExit) as leaving:
            main([*argv, "--print-config"])
        assert not leaving.value.code
        text = capsys.readouterr().out
        Path("serve.yaml").write_text(text)
    stated = yaml.safe_load(text)
    assert (stated["port"], stated["max_model_len"]) == (0, 512)
