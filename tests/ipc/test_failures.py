"""Exceptions that cross the wire: the same type if it is safe, otherwise a stand-in that names the
type.
"""

import pytest
from quire.ipc.codec import MessageDecoder, MessageEncoder
from quire.ipc.errors import (
    EngineStartError,
    InvalidParameterError,
    ModelLoadError,
    RemoteTraceback,
)
from quire.ipc.failures import pack_exception, unpack_exception
from quire.ipc.messages import EngineMessage, Failed


def round_trip(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        failed = pack_exception(caught)
    return unpack_exception(
        MessageDecoder(EngineMessage, 2**20).decode(MessageEncoder(2**20).encode(failed)),
        EngineStartError,
    )


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        FileNotFoundError("no file"),
        MemoryError("full"),
        KeyError("key"),
        ModelLoadError("bad shard"),
        NotImplementedError("later"),
    ],
)
def test_known_types_round_trip(error):
    received = round_trip(error)
    assert type(received) is type(error) and str(received) == str(error)
    assert isinstance(received.__cause__, RemoteTraceback) and "test_failures.py" in str(
        received.__cause__
    )


def test_an_invalid_parameter_keeps_its_name():
    received = round_trip(InvalidParameterError("max_model_len", "must be at most 9"))
    assert isinstance(received, InvalidParameterError)
    assert (received.parameter, str(received)) == (
        "max_model_len",
        "max_model_len: must be at most 9",
    )


class OnlyHere(Exception):
    pass


@pytest.mark.parametrize("error", [OnlyHere("why"), UnicodeDecodeError("utf-8", b"x", 0, 1, "why")])
def test_other_types_are_named(error):
    received = round_trip(error)
    assert type(received) is EngineStartError
    assert str(received).startswith(f"{type(error).__name__}: ") and "why" in str(received)


@pytest.mark.parametrize(
    "name", ["SystemExit", "KeyboardInterrupt", "StopIteration", "eval", "__name__", ""]
)
def test_a_peer_cannot_choose_what_is_raised(name):
    assert type(unpack_exception(Failed(name, "x", ""), EngineStartError)) is EngineStartError


def test_text_that_is_not_unicode_round_trips():
    assert "udcff" in str(round_trip(FileNotFoundError("/tmp/\udcff")))
