"""The `quire` command as a user meets it: flags, messages, exit codes, streams, Ctrl-C, pipes."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from quire import (
    CompletionOutput,
    InvalidParameterError,
    Logprob,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.__main__ import COMMANDS, main
from quire.frontend.cli import chat, engine, generate
from quire.frontend.cli.flags import (
    NOT_SAMPLING_FLAGS,
    SAMPLING_HELP,
    engine_flags,
    given,
    sampling_flags,
)
from quire.frontend.cli.generate import read_prompts
from quire.frontend.cli.terminal import JsonWriter, TextWriter
from quire.ipc.config import config_fields

QUIRE = [sys.executable, "-m", "quire"]


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(
        [*QUIRE, *arguments], input=stdin, capture_output=True, text=True, timeout=60, check=False
    )


def call(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    """The command in this process: (exit code, stdout, stderr)."""
    try:
        code = main(list(arguments))
    except SystemExit as leaving:  # argparse
        code = leaving.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ---------------------------------------------------------------- flags and messages


def test_every_field_is_a_flag_with_a_description() -> None:
    assert [flag.name for flag in engine_flags()] == list(config_fields())
    assert set(SAMPLING_HELP) == set(SamplingParams.__struct_fields__) - NOT_SAMPLING_FLAGS
    assert [
        flag.name for flag in engine_flags() + sampling_flags() if not flag.help.endswith(".")
    ] == []


def test_flags_give_values_of_the_fields_types() -> None:
    words = "a --temperature 0 b --max-tokens none --stop x --stop y --stop-token-ids 1,2 --block-size 32 --no-enable-prefix-caching"
    json_words = ["--hf-overrides", '{"rope_theta": 1e4}', "--kernels", '{"rms_norm": "reference"}']
    args = generate.make_parser([]).parse([*words.split(), *json_words, "c", "--max-model-len=99"])
    assert args.prompts == ["a", "b", "c"]
    expected = {
        "temperature": 0.0,
        "max_tokens": None,
        "stop": ["x", "y"],
        "stop_token_ids": [1, 2],
    }
    assert given(args, sampling_flags()) == expected
    expected = {
        "block_size": 32,
        "enable_prefix_caching": False,
        "hf_overrides": {"rope_theta": 1e4},
        "kernels": {"rms_norm": "reference"},
        "max_model_len": 99,
    }
    assert given(args, engine_flags()) == expected
    words = [
        "--logit-bias",
        '{"5": 1.5}',
        "--allowed-token-ids",
        "5,6",
        "--bad-words",
        "the",
        "--extra-args",
        '{"a": [1]}',
        "--n",
        "3",
    ]
    words += ["--structured-outputs", '{"choice": ["yes", "no"]}', "--truncate-prompt-tokens", "-1"]
    assert given(generate.make_parser([]).parse(words), sampling_flags()) == {
        "logit_bias": {5: 1.5},
        "allowed_token_ids": [5, 6],
        "bad_words": ["the"],
        "extra_args": {"a": [1]},
        "n": 3,
        "structured_outputs": StructuredOutputsParams(choice=["yes", "no"]),
        "truncate_prompt_tokens": -1,
    }


@pytest.mark.parametrize("module", [generate, chat, engine])
def test_help_shows_the_most_used_flags_and_help_all_all_of_them(
    module, capsys: pytest.CaptureFixture
) -> None:
    name = module.__name__.rpartition(".")[2]
    _, short, _ = call(capsys, name, "--help")
    _, full, _ = call(capsys, name, "--help-all")
    assert "--num-gpu-blocks-override" in full and "--num-gpu-blocks-override" not in short
    flags = [
        word for line in short.splitlines() if (word := line.strip().split(" ")[0]).startswith("--")
    ]
    assert (
        len(
            [
                flag
                for flag in flags
                if flag not in ("--help", "--help-all", "--config", "--print-config")
            ]
        )
        <= 11
    )
    assert "\n  --dtype {auto,bfloat16,float32,float16}" in short
    if module is generate:
        missing = [
            flag.option for flag in engine_flags() + sampling_flags() if flag.option not in full
        ]
        assert missing == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "generate x --temprature 1",
            "quire generate: unknown flag --temprature; did you mean --temperature?",
        ),
        ("generate x --temp 1", "unknown flag --temp;"),
        (
            "generate x --frobnicate",
            "quire generate: unknown flag --frobnicate; see quire generate --help-all",
        ),
        ("generate x --temperature hot", "argument --temperature: must be a number, got 'hot'"),
        (
            "generate x --temperature nan",
            "argument --temperature: must be a finite number, got 'nan'",
        ),
        (
            "generate x --temperature -1",
            "quire: temperature: must be 0 (greedy) or greater, at most 1e38, got -1.0",
        ),
        ("generate x --top-p 1.5", "quire: top_p: must be greater than 0 and at most 1, got 1.5"),
        (
            "generate x --max-num-seqs 0",
            "argument --max-num-seqs: must be an integer, at least 1, got '0'",
        ),
        (
            "generate x --block-size 7",
            "argument --block-size: invalid choice: 7 (choose from 8, 16, 32, 64, 128)",
        ),
        ("generate x --dtype", "argument --dtype: expected one argument"),
        ("generate x --hf-overrides 3", "argument --hf-overrides: must be a JSON object, got '3'"),
        (
            "generate x --stop-token-ids a",
            "argument --stop-token-ids: must be integers separated by commas, got 'a'",
        ),
        ("generate x --logit-bias {", "argument --logit-bias: must be a JSON object, got '{'"),
        (
            "generate x --engine tcp://h:1",
            "argument --engine: must be inproc, process or an address ipc://PATH, got 'tcp://h:1'",
        ),
        (
            "generate x --model ./no/such/model",
            "quire: model './no/such/model': there is no such directory",
        ),
        (
            "generate x --file ./none.txt",
            "quire: --file: cannot read ./none.txt: No such file or directory",
        ),
        ("chat --n 2", "quire: n: a conversation has one answer per turn"),
        (
            "chat --skip-tokenizer-init",
            "quire: skip_tokenizer_init: a conversation needs the tokenizer",
        ),
        ("chat --sytem x", "unknown flag --sytem; did you mean --system?"),
        ("engine", "quire engine: the following arguments are required: --listen"),
        (
            "engine a b --listen ipc://x",
            "quire engine: unknown argument b; see quire engine --help-all",
        ),
        ("generat x", "quire: unknown command 'generat'; did you mean 'generate'?"),
        ("zzzzz", "quire: unknown command 'zzzzz'; the commands are serve, generate, "),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture
) -> None:
    code, out, err = call(capsys, *arguments.split())
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_an_unknown_flag_in_one_sentence(
    command: str, capsys: pytest.CaptureFixture
) -> None:
    words = ("bench", "serve") if command == "bench" else (command,)
    code, out, err = call(capsys, *words, "--frobnicate")
    assert (
        (code, out) == (2, "")
        and err
        == f"quire {' '.join(words)}: unknown flag --frobnicate; see quire {' '.join(words)} "
        f"--help-all\n"
    )


def test_an_address_where_nobody_listens_is_exit_code_1_and_what_to_do(
    capsys: pytest.CaptureFixture,
) -> None:
    code, out, err = call(capsys, "generate", "x", "--engine", "ipc://./none.sock")
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert "quire engine --listen ipc://./none.sock" in err


def test_version_and_help(capsys: pytest.CaptureFixture) -> None:
    code, out, _ = call(capsys, "--version")
    assert code == 0 and out.startswith("quire 0.")
    assert [call(capsys, command, "--version") for command in COMMANDS] == [(0, out, "")] * len(
        COMMANDS
    )
    code, out, _ = call(capsys, "--help")
    assert code == 0 and all(f"quire {name}" in out for name in COMMANDS)
    code, out, err = call(capsys)
    assert code == 2 and out == "" and "usage: quire" in err


# ---------------------------------------------------------------- where prompts come from


def prompts_of(*words: str, stdin: bytes = b"", monkeypatch: pytest.MonkeyPatch) -> list:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    return read_prompts(generate.make_parser([]).parse(list(words)))


def test_prompts_from_arguments_and_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prompts_of("a", "-", "b", stdin=b"two\nlines\n", monkeypatch=monkeypatch) == [
        ("a", {}),
        ("two\nlines", {}),
        ("b", {}),
    ]
    assert prompts_of(stdin="grüße".encode(), monkeypatch=monkeypatch) == [("grüße", {})]
    with pytest.raises(InvalidParameterError, match="standard input is empty"):
        prompts_of(stdin=b"\n", monkeypatch=monkeypatch)
    with pytest.raises(InvalidParameterError, match="standard input is not UTF-8"):
        prompts_of(stdin=b"\xff\xfe", monkeypatch=monkeypatch)


def test_prompts_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("first\n\n  second\n")
    assert prompts_of("zero", "--file", str(lines), monkeypatch=monkeypatch) == [
        ("zero", {}),
        ("first", {}),
        ("  second", {}),
    ]
    records = tmp_path / "prompts.jsonl"
    records.write_text('{"prompt": "a", "max_tokens": 3}\n{"prompt_token_ids": [1, 2]}\n')
    expected = [("a", {"max_tokens": 3}), ({"prompt_token_ids": [1, 2]}, {})]
    special = tmp_path / "special.jsonl"
    special.write_text(
        '{"prompt": "a", "logit_bias": {"5": 1}, "structured_outputs": {"regex": "x+"}}\n'
    )
    wanted = {"logit_bias": {5: 1.0}, "structured_outputs": StructuredOutputsParams(regex="x+")}
    assert prompts_of("--file", str(special), monkeypatch=monkeypatch) == [("a", wanted)]
    assert prompts_of("--file", str(records), monkeypatch=monkeypatch) == expected
    assert (
        prompts_of("--file", "-", stdin=records.read_bytes(), monkeypatch=monkeypatch) == expected
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", 'must be an object with "prompt"'),
        ('{"text": "a"}', 'must be an object with "prompt"'),
        ('{"prompt": "a", "prompt_token_ids": [1]}', 'must be an object with "prompt"'),
        ('{"prompt": "a", "temprature": 1}', "unknown key 'temprature'"),
        ('{"prompt": "a", "max_tokens": "many"}', "max_tokens: Expected `int"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias: Expected `int"),
        (
            '{"prompt": "a", "structured_outputs": {"regexp": "x"}}',
            "structured_outputs: has no 'regexp'; it has json, regex, ",
        ),
        (
            '{"prompt": "a", "structured_outputs": {}}',
            "structured_outputs: must give exactly one of",
        ),
        ('{"prompt": "a", "structured_outputs": "x"}', "structured_outputs: Expected `object"),
        ("", "holds no prompt"),
    ],
)
def test_a_bad_line_of_a_file_is_named(
    line: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tmp_path / "prompts.jsonl"
    records.write_text(line)
    with pytest.raises(InvalidParameterError) as caught:
        prompts_of("--file", str(records), monkeypatch=monkeypatch)
    assert problem in str(caught.value)


# ---------------------------------------------------------------- what is printed


def news(text: str, finish_reason: str | None = None, index: int = 0) -> RequestOutput:
    completion = CompletionOutput(
        index=index, text=text, token_ids=[1], finish_reason=finish_reason
    )
    return RequestOutput("0", "prompt", [1, 2], [completion], finish_reason is not None)


def test_text_streams_in_the_order_of_the_prompts() -> None:
    out = io.StringIO()
    writer = TextWriter(["A", "B", "C"], [1, 1, 1], echo=False, out=out)
    writer.write(1, news("b1 "))
    assert out.getvalue() == ""  # waits for its turn
    writer.write(0, news("a1 "))
    assert out.getvalue() == "== 1/3 ==\na1 "  # streams
    writer.refuse(2, "too long")
    writer.write(1, news("b2", "stop"))
    writer.write(0, news("a2\n", "length"))
    assert out.getvalue() == "== 1/3 ==\na1 a2\n== 2/3 ==\nb1 b2\n"


def test_text_of_one_prompt_is_the_completion_alone() -> None:
    out = io.StringIO()
    writer = TextWriter(["Once"], [1], echo=False, out=out)
    writer.write(0, news(" upon", "stop"))
    assert out.getvalue() == " upon\n"
    out = io.StringIO()
    writer = TextWriter(["Once"], [1], echo=True, out=out)
    writer.write(0, news(" upon"))
    writer.end()  # an interrupt: the shell's prompt must not stand behind the text
    assert out.getvalue() == "Once upon\n"


def test_several_completions_of_a_prompt_come_one_after_the_other() -> None:
    out = io.StringIO()
    writer = TextWriter(["A", "B"], [2, 1], echo=True, out=out)
    writer.write(0, news("two", "stop", index=1))
    writer.write(1, news("b", "stop"))
    writer.write(0, news("one", "stop"))
    assert out.getvalue() == "== 1/2, 1/2 ==\nAone\n== 1/2, 2/2 ==\nAtwo\n== 2/2 ==\nBb\n"
    writer = TextWriter(["A", "B"], [2, 1], echo=False, out=(out := io.StringIO()))
    writer.refuse(0, "n: too many")
    writer.write(1, news("b", "stop"))
    assert out.getvalue() == "== 2/2 ==\nb\n"


def test_json_lines() -> None:
    out = io.StringIO()
    output = news(" né", "stop")
    output.outputs[0].logprobs = [{7: Logprob(-2.0, 2, "x"), 1: Logprob(-0.5, 1, "y")}]
    output.outputs[0].cumulative_logprob = -0.5
    output.outputs.append(CompletionOutput(1, "b", [5], finish_reason="length"))
    output.prompt_logprobs = [None, {2: Logprob(-1.0, 1, "t")}]
    output.num_cached_tokens = 1
    writer = JsonWriter(out)
    writer.write(3, output)
    writer.refuse(4, "prompt: too long")
    first, beside, second = map(json.loads, out.getvalue().splitlines())
    assert (beside["index"], beside["completion"], beside["text"]) == (
        3,
        1,
        "b",
    ) and "prompt_logprobs" not in beside
    assert first["prompt_logprobs"] == [
        None,
        [{"token_id": 2, "logprob": -1.0, "rank": 1, "token": "t"}],
    ]
    assert first["cumulative_logprob"] == -0.5
    assert (
        first["index"] == 3
        and first["text"] == " né"
        and first["token_ids"] == [1]
        and first["finish_reason"] == "stop"
    )
    assert first["usage"] == {"prompt_tokens": 2, "completion_tokens": 1, "cached_tokens": 1}
    assert [entry["token_id"] for entry in first["logprobs"][0]] == [1, 7]
    assert second == {"index": 4, "error": "prompt: too long"}


# ---------------------------------------------------------------- with an engine

STORY = "Once upon a time"
# on a busy machine two threads of so small a model mostly wait for each other
ONE_THREAD = ("--num-threads", "1")
LONG = ("--max-tokens", "1500", "--ignore-eos")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon on the bundled model for all tests below; it must leave in order when it is told
    to.
    """
    path = tmp_path_factory.mktemp("daemon") / "engine.sock"
    with subprocess.Popen(
        [*QUIRE, "engine", "--listen", f"ipc://{path}", *ONE_THREAD],
        stderr=subprocess.PIPE,
        text=True,
    ) as daemon:
        while not path.exists():
            assert daemon.poll() is None, daemon.stderr.read()
            time.sleep(0.05)
        yield f"ipc://{path}"
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=10) == 0
        assert not path.exists()
        assert "Traceback" not in daemon.stderr.read()


def json_lines(done: subprocess.CompletedProcess) -> list[dict]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_text_and_json_tell_the_same(address: str) -> None:
    flags = ("--engine", address, "--temperature", "0", "--max-tokens", "8", "--ignore-eos")
    text = run("generate", STORY, *flags)
    assert (text.returncode, text.stderr) == (0, "")
    (line,) = json_lines(run("generate", STORY, "--json", *flags))
    assert text.stdout.removesuffix("\n") == line["text"].removesuffix("\n")
    assert (
        line["prompt"] == STORY
        and line["finish_reason"] == "length"
        and len(line["token_ids"]) == 8
    )
    assert line["usage"]["completion_tokens"] == 8 and line["usage"]["prompt_tokens"] > 1


def test_several_completions_are_all_printed(address: str) -> None:
    flags = ("--engine", address, "--seed", "3", "--n", "3", "--max-tokens", "8", "--ignore-eos")
    text = run("generate", STORY, *flags)
    assert (text.returncode, text.stderr) == (0, "")
    lines = json_lines(run("generate", STORY, "--json", *flags))
    assert [line["completion"] for line in lines] == [0, 1, 2] and len(
        {line["text"] for line in lines}
    ) == 3
    printed = "".join(
        f"== 1/1, {k + 1}/3 ==\n{line['text']}" + "\n" * (not line["text"].endswith("\n"))
        for k, line in enumerate(lines)
    )
    assert text.stdout == printed


def test_engine_in_this_process_gives_the_daemons_tokens(
    address: str, capsys: pytest.CaptureFixture
) -> None:
    flags = ["generate", STORY, "--json", "--seed", "7", "--max-tokens", "12", "--engine"]
    code, out, _ = call(capsys, *flags, "inproc", *ONE_THREAD)
    (line,) = json_lines(run(*flags, address))
    assert code == 0 and json.loads(out)["token_ids"] == line["token_ids"]


def test_prompts_of_a_file_run_together_and_a_refused_one_is_alone(
    address: str, tmp_path: Path
) -> None:
    records = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": STORY, "max_tokens": 3},
        {"prompt": "word " * 9000},
        {"prompt": "x", "top_p": 3},
        {"prompt_token_ids": [300, 301]},
    ]
    records.write_text("\n".join(map(json.dumps, lines)))
    done = run(
        "generate",
        "--file",
        str(records),
        "--engine",
        address,
        "--json",
        "--max-tokens",
        "5",
        "--ignore-eos",
    )
    assert done.returncode == 2
    by_index = {line["index"]: line for line in json_lines(done)}
    assert len(by_index[0]["token_ids"]) == 3 and len(by_index[3]["token_ids"]) == 5
    assert by_index[1]["error"].startswith("prompt") and by_index[2]["error"].startswith("top_p")
    assert (
        "quire: prompt 2: " in done.stderr
        and "quire: prompt 3: top_p: must be" in done.stderr
        and done.stderr.count("\n") == 2
    )


def test_several_prompts_in_order_and_one_from_standard_input(address: str) -> None:
    done = run(
        "generate",
        "one",
        "-",
        "--echo",
        "--engine",
        address,
        "--max-tokens",
        "4",
        "--ignore-eos",
        stdin="two",
    )
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if line.startswith("== ")] == [
        "== 1/2 ==",
        "== 2/2 ==",
    ]
    assert done.stdout.index("\none") < done.stdout.index("\ntwo")


def test_ctrl_c_ends_generate_with_130(address: str) -> None:
    with subprocess.Popen(
        [*QUIRE, "generate", *[STORY] * 8, *LONG, "--engine", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as program:
        assert program.stdout.read1(10)
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=20)
    assert (program.returncode, err) == (130, b"")
    assert b"== 8/8 ==" not in out and out.endswith(b"\n")


def test_a_reader_who_leaves_is_no_error(address: str) -> None:
    with subprocess.Popen(
        [*QUIRE, "generate", STORY, *LONG, "--engine", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as program:
        assert program.stdout.read1(10)
        program.stdout.close()
        assert program.wait(timeout=20) == 128 + signal.SIGPIPE
        assert program.stderr.read() == b""


def test_closed_streams_are_no_defect(address: str) -> None:
    for redirect, code in (("<&-", 0), (">&-", 0), ("2>&-", 0), (">/dev/full", 1)):
        command = (
            f"{sys.executable} -m quire generate x --max-tokens 1 --engine {address} {redirect}"
        )
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False
        )
        assert (
            done.returncode == code
            and "Traceback" not in done.stderr
            and "internal error" not in done.stderr
        ), redirect
    nothing = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m quire generate <&-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (nothing.returncode, nothing.stderr) == (2, "quire: prompt: standard input is empty\n")


def test_ctrl_c_while_the_engine_starts(tmp_path: Path) -> None:
    """The child must go too, and nothing be said."""
    with subprocess.Popen(
        [*QUIRE, "generate", STORY], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as program:
        while not (children := psutil.Process(program.pid).children()):
            assert program.poll() is None
            time.sleep(0.01)
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=20)
    assert (program.returncode, out, err) == (130, b"", b"")
    assert psutil.wait_procs(children, timeout=5)[1] == []


def test_an_engine_that_dies_is_exit_code_1_and_its_cause() -> None:
    with subprocess.Popen(
        [*QUIRE, "generate", *[STORY] * 8, *LONG, *ONE_THREAD],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout.read(10)
        (engine_process,) = psutil.Process(program.pid).children()
        engine_process.kill()
        _, err = program.communicate(timeout=20)
    assert program.returncode == 1
    assert "SIGKILL" in err and "Traceback" not in err


def test_chat_from_a_pipe_remembers_until_clear(address: str) -> None:
    flags = ("--engine", address, "--temperature", "0", "--max-tokens", "12", "--stop", "\n")
    done = run(
        "chat",
        *flags,
        stdin="What is 2 + 3?\n\nWhat is 2 + 3?\n/clear\nWhat is 2 + 3?\n/exit\nnever said\n",
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second, third = done.stdout.splitlines()
    assert first == third and second
    refused = run("chat", *flags, stdin="word " * 9000 + "\nWhat is 2 + 3?\n")
    assert refused.returncode == 2 and refused.stdout.splitlines() == [first]
    assert refused.stderr.startswith("quire: prompt") and refused.stderr.count("\n") == 1


class Terminal:
    """A program on a terminal of its own: what it shows, and keys."""

    def __init__(self, *arguments: str):
        pid, self.fd = pty.fork()
        if pid == 0:
            os.execv(sys.executable, [*QUIRE, *arguments])
        self.pid, self.shown = pid, ""

    def wait_for(self, text: str, timeout_s: float = 30.0) -> None:
        """Until `text` appears behind what was waited for before."""
        deadline = time.monotonic() + timeout_s
        while text not in self.shown:
            assert select.select([self.fd], [], [], deadline - time.monotonic())[0], (
                f"{text!r} not in {self.shown!r}"
            )
            self.shown += os.read(self.fd, 4096).decode(errors="replace")
        self.shown = self.shown.split(text, 1)[1]

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def exit_code(self) -> int:
        try:
            while os.read(self.fd, 4096):
                pass
        except OSError:
            # EIO: the program has closed its terminal. Closing ours first would kill it.
            os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_ctrl_c_stops_the_answer_and_not_the_chat(address: str) -> None:
    terminal = Terminal("chat", "--engine", address, *LONG)
    terminal.wait_for("> ")
    terminal.type("Tell me a story.\r")
    terminal.wait_for("\r\n")  # the echo of what was typed
    terminal.wait_for(" ")  # the answer has begun
    terminal.type("\x03")
    terminal.wait_for("\r\n> ")
    time.sleep(0.3)  # readline shows its prompt a moment before it listens for signals
    terminal.type("\x03")
    terminal.wait_for("(Ctrl-D leaves)")
    terminal.wait_for("> ")
    terminal.type("/clear\r")
    terminal.wait_for("a new conversation")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0
