"""The bundled model behind every kind of client, with the same settings for all.

For tests whose results must not depend on the kind of client.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire import AsyncLLM, EngineArgs, LLMEngine
from quire.tests.round_trip import RoundTripClient

BLOCKING = ("inproc", "inproc with codec", "process", "daemon")
ASYNCIO = ("inproc async", "process async")
MANY_BLOCKS = 1600
# One thread: with several, tests of a tiny model on a busy machine spend their time waiting.
DEFAULTS = dict(
    dtype="float32",
    max_model_len=384,
    max_num_seqs=32,
    num_gpu_blocks_override=MANY_BLOCKS,
    max_num_batched_tokens=2048,
    num_threads=1,
)


def engine_args(**settings) -> EngineArgs:
    return EngineArgs(**{**DEFAULTS, **settings})


def make_engine(engine: str = "inproc", **settings) -> LLMEngine:
    return LLMEngine.from_engine_args(engine_args(**settings), engine=engine)


def make_async_engine(client: str, **settings) -> AsyncLLM:
    """Make an engine for `client`, one of ASYNCIO."""
    return AsyncLLM.from_engine_args(engine_args(**settings), engine=client.removesuffix(" async"))


@contextmanager
def blocking_engine(client: str, directory: Path, **settings) -> Iterator[LLMEngine]:
    """Make an engine for `client`, one of BLOCKING. A daemon creates its socket in `directory`."""
    if client == "daemon":
        with (
            daemon(directory, **settings) as address,
            closing(make_engine(address, **settings)) as engine,
        ):
            yield engine
    elif client == "inproc with codec":
        config = engine_args(**settings).create_engine_config()
        with closing(LLMEngine(config, RoundTripClient(config))) as engine:
            yield engine
    else:
        with closing(make_engine(client, **settings)) as engine:
            yield engine


@contextmanager
def closing(engine: LLMEngine) -> Iterator[LLMEngine]:
    try:
        yield engine
    finally:
        engine.shutdown()


@contextmanager
def daemon(directory: Path, **settings) -> Iterator[str]:
    """Run `quire engine` with these settings and its socket in `directory`; end it with SIGTERM."""
    address = f"ipc://{directory / 'engine.sock'}"
    values = {**DEFAULTS, **settings}
    switches = {name for name, value in values.items() if value is True}
    flags = [f"--{name.replace('_', '-')}" for name in switches] + [
        f"--{name.replace('_', '-')}={item}"
        for name, value in values.items()
        if name not in switches
        for item in (value if isinstance(value, list) else [value])
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", "engine", "--listen", address, *flags], cwd=directory
    )
    try:
        while not (directory / "engine.sock").exists():
            assert process.poll() is None, "the daemon did not start"
            time.sleep(0.02)
        yield address
    finally:
        process.terminate()
        assert process.wait(60) == 0
