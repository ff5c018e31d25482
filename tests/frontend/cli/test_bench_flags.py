"""The flags and the file of results that the modes of `quire bench` share."""

import argparse
import json
from pathlib import Path

import pytest
from quire.frontend.bench.options import WorkloadOptions
from quire.frontend.cli.bench_flags import (
    add_ignore_eos,
    add_json,
    add_workload,
    options_of,
    settings_of,
    write_report,
)
from quire.frontend.cli.parser import Parser


def parse(*argv: str) -> argparse.Namespace:
    parser = Parser("bench x", "[flags]", "what", [])
    add_workload(parser, tokenizer=False)
    add = parser.group("run")
    add_ignore_eos(add, True)
    add_json(add)
    return parser.parse_args(argv)


def test_defaults_and_flags_reach_the_workload() -> None:
    options = options_of(
        WorkloadOptions, parse("--dataset-name", "prefix", "--prefix-len", "9"), seed=3
    )
    assert (options.dataset_name, options.prefix_len, options.num_prompts, options.seed) == (
        "prefix",
        9,
        200,
        3,
    )


def test_the_flags_of_a_workload_show_its_defaults() -> None:
    assert options_of(WorkloadOptions, parse()) == WorkloadOptions()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-prompts 1.5", "argument --num-prompts: invalid int value: '1.5'"),
        ("--range-ratio x", "argument --range-ratio: invalid float value: 'x'"),
    ],
)
def test_the_placeholder_decides_the_type(
    words: str, message: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        parse(*words.split())
    assert capsys.readouterr().err == f"quire bench x: {message}\n"


def test_settings_are_json_without_the_key() -> None:
    args = parse("--no-ignore-eos")
    args.api_key, args.request_rate = "secret", float("inf")
    settings = settings_of(args)
    assert (
        "api_key" not in settings
        and settings["request_rate"] == "inf"
        and settings["ignore_eos"] is False
    )


def test_a_report_holds_the_settings_and_the_results(tmp_path: Path) -> None:
    write_report(parse(), {"seconds": 1.0})  # without --json: no file
    path = tmp_path / "result.json"
    write_report(parse("--json", str(path), "--input-len", "7"), {"seconds": 1.0})
    found = json.loads(path.read_text())
    assert list(found) == ["date", "machine", "settings", "seconds"]
    assert found["settings"]["input_len"] == 7
