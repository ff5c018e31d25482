"""The `quire` command: flags, help, messages, exit codes."""

import subprocess
import sys

import pytest
from quire import SamplingParams, StructuredOutputsParams
from quire.__main__ import COMMANDS
from quire.frontend.cli import chat, engine, generate
from quire.frontend.cli.flags import (
    NOT_SAMPLING_FLAGS,
    SAMPLING_HELP,
    engine_flags,
    given,
    sampling_flags,
)
from quire.frontend.cli.launch import AFTER_DASHES
from quire.ipc.config import config_fields
from quire.tests.frontend.cli.command import QUIRE, call


def test_every_field_is_a_flag_with_a_description() -> None:
    assert [flag.name for flag in engine_flags()] == list(config_fields())
    assert set(SAMPLING_HELP) == set(SamplingParams.__struct_fields__) - NOT_SAMPLING_FLAGS
    assert [
        flag.name for flag in engine_flags() + sampling_flags() if not flag.help.endswith(".")
    ] == []


def test_flags_give_values_of_the_fields_types() -> None:
    words = (
        "a --temperature 0 b --max-tokens none --stop x --stop y --stop-token-ids 1,2 "
        "--block-size 32 --no-enable-prefix-caching"
    )
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
        <= 14
    )
    assert "\n  --quantization" in short and "\n  --num-threads" in short
    topics = ("model", "load", "cache", "scheduler", "lora", "device", "service")
    headings = [f"\nengine: {topic}:\n" for topic in topics]
    assert [heading for heading in headings if heading not in full] == []
    assert "\nengine:\n" in short and "\nengine: " not in short
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
        ("generate x --temp 1", "unknown flag --temp; use --temperature"),
        # one dash is no abbreviation of -tp, -cc and -h
        ("generate x -t 2", "quire generate: unknown flag -t; use --num-threads"),
        ("serve -c 4096", "quire serve: unknown flag -c; use --max-model-len"),
        ("serve --ctx-size=4096", "unknown flag --ctx-size; use --max-model-len"),
        ("serve -ngl 99", "unknown flag -ngl; use --device"),
        ("chat -hf org/name", "unknown flag -hf; the model is an argument without a flag"),
        ("serve -m x.gguf", "unknown flag -m; the model is an argument without a flag"),
        ("serve -n 5", "unknown flag -n; use --max-tokens, which quire serve has not"),
        ("engine -d x --listen ipc://x", "unknown flag -d; see quire engine --help-all"),
        ("bench serve -n 5", "unknown flag -n; use --max-tokens, which quire bench serve has not"),
        ("run llama3", "quire: unknown command 'run'; use quire chat MODEL, or quire generate"),
        ("list", "quire: unknown command 'list'; use quire models"),
        ("ps", "quire: unknown command 'ps'; use quire top URL"),
        ("rm x", "quire: unknown command 'rm'; use quire models remove MODEL"),
        ("help generat", "quire: unknown command 'generat'; did you mean 'generate'?"),
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
        # suggestions must be close
        ("load", "quire: unknown command 'load'; the commands are serve, generate, "),
        ("render", "quire: unknown command 'render'; the commands are serve, generate, "),
        ("generate x --batch 7", "unknown flag --batch; see quire generate --help-all"),
        ("generate x --foo", "unknown flag --foo; see quire generate --help-all"),
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
        f"--help-all{AFTER_DASHES if command == 'launch' else ''}\n"
    )


def test_an_address_without_a_listener_is_exit_code_1_with_a_fix(
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
    for words in (("serve",), ("bench", "serve")):
        code, out, _ = call(capsys, "help", *words)
        assert code == 0 and (0, out) == call(capsys, *words, "--help")[:2]
        assert out.startswith(f"usage: quire {' '.join(words)}")
    code, out, err = call(capsys)
    assert code == 2 and out == "" and "usage: quire" in err


@pytest.mark.parametrize(
    "arguments", ["--help", "--version", "generate --help", "generate --help-all", "plan"]
)
def test_output_that_cannot_be_written_is_one_sentence(arguments: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*QUIRE, *arguments.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "quire: No space left on device\n")


def test_errors_that_cannot_be_written_leave_the_exit_code() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*QUIRE, "zzzzz"], stderr=full, timeout=60, check=False)
    assert done.returncode == 2


def test_what_an_interrupt_leaves_half_made_prints_nothing() -> None:
    """As asyncio's event loop does, whose finalizer fails if its constructor was interrupted."""
    half_made = """
import sys
from quire import __main__ as program

class HalfMade:
    def __del__(self):
        self.missing

def run(argv):
    part = HalfMade()
    raise KeyboardInterrupt

program.run = run
sys.exit(program.main([]))
"""
    done = subprocess.run(
        [sys.executable, "-c", half_made], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
