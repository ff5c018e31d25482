"""The flags that the modes of `quire bench` share."""

from quire.frontend.cli.bench_flags import (
    Adder,
    add_sampling,
    add_workload,
    settings_of,
    workload_options,
)
from quire.frontend.cli.parser import Parser


def parse(*argv: str):
    parser = Parser("quire bench x", "usage", "what")
    add_workload(parser, num_prompts=7, tokenizer=False)
    add_sampling(Adder(parser, "sampling"), ignore_eos=True)
    return parser.parse_args(argv)


def test_defaults_and_what_is_given_reach_the_workload() -> None:
    options = workload_options(parse("--dataset-name", "prefix", "--prefix-len", "9"), seed=3)
    assert (options.dataset_name, options.prefix_len, options.num_prompts, options.seed) == (
        "prefix",
        9,
        7,
        3,
    )


def test_settings_are_what_json_can_hold_without_the_key() -> None:
    args = parse("--no-ignore-eos")
    args.api_key, args.request_rate = "secret", float("inf")
    settings = settings_of(args)
    assert (
        "api_key" not in settings
        and settings["request_rate"] == "inf"
        and settings["ignore_eos"] is False
    )
