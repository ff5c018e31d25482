"""What is advised for the flags and commands of other engines exists, and stands for no own one."""

import shlex
from itertools import pairwise

import pytest
from quire.__main__ import COMMANDS as OWN
from quire.frontend.arguments.other_engines import COMMANDS, FLAGS
from quire.frontend.cli import chat, generate, serve


def options() -> set[str]:
    found: set[str] = set()
    for command in (chat, generate, serve):
        parser = command.make_parser([])
        parser._add_vllm_flags()
        found.update(parser._option_string_actions)
    return found


def test_every_flag_that_is_advised_exists_and_those_it_is_for_do_not() -> None:
    known = options()
    assert {to for to in FLAGS.values() if to.startswith("--")} - known == set()
    assert FLAGS.keys() & known == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_is_advised_exists(command: str) -> None:
    assert command not in OWN
    words = shlex.split(COMMANDS[command].replace(",", " "))
    named = {word for before, word in pairwise(words) if before == "quire"}
    assert named <= set(OWN) and (named or command == "stop")


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("-O3", "optimization_level", 3),
        ("-tp 2", "tensor_parallel_size", 2),
        ("-q int8", "quantization", "int8"),
        ("-qint8", "quantization", "int8"),
    ],
)
def test_short_flags_of_vllm_are_known_and_may_touch_their_value(
    words: str, name: str, value: object
) -> None:
    args = generate.make_parser([]).parse(["x", *words.split()])
    assert str(getattr(args, name)) == str(value)
