"""A process that starts before its configuration: taken once by the next start, ended otherwise."""

from __future__ import annotations

import os

import psutil
import pytest
from quire.frontend.clients.mp_client import MPClient
from quire.frontend.engine_args import EngineArgs
from quire.ipc.early_engine import early_engine, take_early_engine
from quire.tests.fake_engine import open_blocking, wait_until


def children() -> list[psutil.Process]:
    return psutil.Process().children()


def test_the_next_start_takes_it():
    before = children()
    with early_engine("process", {"max_message_bytes": 2**24}):
        (process,) = [child for child in children() if child not in before]
        wait_until(process.cmdline)  # while a process starts, the kernel shows nothing
        assert "--import-early" in process.cmdline()
        config = EngineArgs(max_message_bytes=2**24).create_engine_config()
        client = open_blocking(MPClient.start(config))
        assert [child for child in children() if child not in before] == [process]
        assert take_early_engine() is None
    assert client.call_utility("scheduler_state")["running"] == []
    client.shutdown()
    assert children() == before


def test_it_ends_with_the_context():
    before, files = children(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="no model"), early_engine("process", {"device": "cpu"}):
        assert len(children()) == len(before) + 1
        raise ValueError("no model")
    assert children() == before and take_early_engine() is None
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [
        ("inproc", {}),
        ("ipc:///tmp/x", {}),
        ("process", {"device": "cuda"}),
        ("process", {"logits_processors": ["some.package:factory"]}),
    ],
)
def test_other_engines_do_not_start_early(engine, arguments):
    before = children()
    with early_engine(engine, arguments):
        assert children() == before and take_early_engine() is None
