"""The process that checks grammars: what it accepts, what kills it, and that its death fails only
one grammar.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from quire.executor.sampling import grammar_check, grammar_compiler
from quire.executor.sampling.grammar_check import (
    MAX_TRIES,
    CheckFailedError,
    CompilerSettings,
    GrammarCheck,
    Problem,
    serve,
)
from quire.executor.sampling.grammar_compiler import GrammarCompiler
from quire.ipc.errors import InvalidParameterError
from quire.ipc.params import StructuredOutputsParams
from quire.tests.fake_engine import stop
from quire.tests.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, save_tiny_tokenizer

FINE = StructuredOutputsParams(choice=["yes", "no"])
ENDLESS = StructuredOutputsParams(
    grammar="start: T\nT: " + " & ".join(f"/.*a{i}.*/" for i in range(200))
)
CHAIN = {
    f"a{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{i + 1}"}], "minItems": 1}
    for i in range(5000)
}
DEEP = StructuredOutputsParams(
    json=json.dumps({"$ref": "#/$defs/a0", "$defs": CHAIN | {"a5000": {"type": "null"}}})
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> CompilerSettings:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(directory)
    return CompilerSettings(str(directory), VOCAB_SIZE, EOS_TOKEN_ID)


@pytest.fixture
def check(settings):
    check = GrammarCheck(settings)
    yield check
    check.close()
    check.end()


def pid_of(check: GrammarCheck) -> int:
    return check._child.pid


def test_the_process_starts_with_the_first_grammar_and_stays(check):
    before = psutil.Process().children()
    assert check._child is None
    check.check(FINE)
    pid = pid_of(check)
    with pytest.raises(InvalidParameterError, match="structured_outputs: cannot be compiled"):
        check.check(StructuredOutputsParams(regex="a("))
    check.check(FINE)
    assert pid_of(check) == pid
    assert check.end() == -signal.SIGKILL and psutil.Process().children() == before


def test_the_engine_does_not_rewrite_a_schema_again(check, settings, monkeypatch):
    params = StructuredOutputsParams(json='{"not": {"type": "string"}}')
    said = check.check(params)
    assert '"not"' not in said.json and check.check(FINE) is FINE
    monkeypatch.setattr(grammar_compiler, "in_ways", None)
    compiler = GrammarCompiler(*msgspec.structs.astuple(settings))
    assert compiler.compile_said(said)[1].params is said
    with pytest.raises(InvalidParameterError, match="Unimplemented keys"):
        compiler.compile(params)  # which needs it


def test_a_schema_in_fewer_ways_than_it_allows_is_logged_once(check, caplog):
    parts = {f"p{i}": {"type": "string"} for i in range(70)}  # any of which may be another type
    schema = {"oneOf": [{"type": "object", "required": ["a"]}, {"properties": parts}]}
    with caplog.at_level(logging.INFO):
        check.check(StructuredOutputsParams(json=json.dumps(schema)))
        del parts["p69"], parts["p68"], parts["p67"], parts["p66"], parts["p65"], parts["p64"]
        check.check(StructuredOutputsParams(json=json.dumps(schema)))
    assert [r.getMessage() for r in caplog.records if "narrower" in r.getMessage()] == [
        "a schema is narrower than the request's: of the ways in which a branch of oneOf can "
        "exclude the others, at most 64 are kept"
    ]


def test_an_idle_process_uses_no_cpu(check):
    check.check(FINE)
    process = psutil.Process(pid_of(check))
    before = process.cpu_times()
    time.sleep(0.5)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.1


def test_a_grammar_that_compiles_forever_is_refused_and_the_next_is_checked(check, monkeypatch):
    monkeypatch.setattr(grammar_check, "TIME_LIMIT_S", 0.5)
    check.check(FINE)
    pid = pid_of(check)
    with pytest.raises(InvalidParameterError, match="takes longer than 0.5 s to compile"):
        check.check(ENDLESS)
    assert not psutil.pid_exists(pid)
    check.check(FINE)


def test_a_grammar_that_overflows_the_stack_ends_only_the_process(check):
    with pytest.raises(
        InvalidParameterError,
        match="ended the process that tried to compile it .exit code -11.: .* nests too deeply",
    ):
        check.check(DEEP)
    check.check(FINE)


def test_a_process_that_died_between_two_checks_refuses_nothing(check):
    check.check(FINE)
    psutil.Process(pid_of(check)).kill()
    check._child.wait()
    check.check(FINE)


def run_python(code: str, settings: CompilerSettings) -> subprocess.CompletedProcess[bytes]:
    """Run `code` in a process of its own that reads the settings from its input."""
    return subprocess.run(
        [sys.executable, "-c", code],
        input=msgspec.msgpack.encode(settings),
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_memory_is_limited(settings, monkeypatch):
    """Runs in a child process, since the limit applies to the process."""
    code = (
        "import threading, io, resource; from quire.executor.sampling import grammar_check as g\n"
        "g.MEMORY_LIMIT_BYTES = 0\n"
        "class Stop(Exception): pass\n"
        "class Requests(io.BytesIO):\n"
        "    def read(self, n):\n"
        "        data = super().read(n)\n"
        "        if not data: raise Stop\n"
        "        return data\n"
        "import msgspec, sys\n"
        "out = io.BytesIO(); settings = io.BytesIO(); g._write(settings, sys.stdin.buffer.read())\n"
        "try: g.serve(Requests(settings.getvalue()), out)\n"
        "except Stop: pass\n"
        "assert resource.getrlimit(resource.RLIMIT_AS)[0] < 2**40\n"
        "try: bytearray(2**28)\n"
        "except MemoryError: print('limited')\n"
    )
    done = run_python(code, settings)
    assert done.stdout == b"limited\n", done.stderr.decode()


def test_closing_ends_a_running_check(check, monkeypatch):
    monkeypatch.setattr(grammar_check, "TIME_LIMIT_S", 60.0)
    check.check(FINE)
    threading.Timer(0.2, check.close).start()
    with pytest.raises(CheckFailedError, match="ended during a check"):
        check.check(ENDLESS)
    with pytest.raises(CheckFailedError, match="the engine is leaving"):
        check.check(FINE)


def test_the_message_of_an_unusable_tokenizer(tmp_path):
    check = GrammarCheck(CompilerSettings(str(tmp_path), 10, None))
    with pytest.raises(InvalidParameterError, match="is not possible with this model's tokenizer"):
        check.check(FINE)
    assert check._child is None


def test_a_process_that_does_not_start_refuses_nothing(settings, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(grammar_check, "RETRY_DELAY_S", 0.01)
    with pytest.raises(CheckFailedError, match="did not start .* exit code 1"):
        GrammarCheck(settings).check(FINE)
    monkeypatch.setattr(sys, "executable", "/no such file")
    with pytest.raises(CheckFailedError, match="did not start .* No such file"):
        GrammarCheck(settings).check(FINE)


class Started(list[subprocess.Popen]):
    """The children so far. Each of the first gets one of the signals as soon as it runs."""

    signals: list[signal.Signals] = []


@pytest.fixture
def started(monkeypatch) -> Iterator[Started]:
    children, spawn = Started(), GrammarCheck._spawn

    def spawn_and_signal(check: GrammarCheck) -> subprocess.Popen:
        children.append(spawn(check))
        if len(children) <= len(children.signals):
            children[-1].send_signal(children.signals[len(children) - 1])
        return children[-1]

    monkeypatch.setattr(GrammarCheck, "_spawn", spawn_and_signal)
    monkeypatch.setattr(grammar_check, "RETRY_DELAY_S", 0.01)
    yield children
    assert all(child.poll() is not None for child in children[:-1]), "a child lives on"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_while_it_starts_is_started_again(
    check, started, number
):
    started.signals = [number] * 2
    check.check(FINE)
    assert len(started) == 3
    check.check(FINE)
    assert len(started) == 3


def test_a_process_that_is_killed_at_each_start_is_no_fault_of_the_grammar(check, started):
    started.signals = [signal.SIGKILL] * MAX_TRIES
    with pytest.raises(CheckFailedError, match="did not start .EOFError, exit code -9") as raised:
        check.check(FINE)
    assert len(started) == MAX_TRIES and not isinstance(raised.value, InvalidParameterError)
    check.check(FINE)


@pytest.mark.sampled
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("size", [1, 200_000], ids=["small", "larger than a pipe"])
def test_a_process_that_is_killed_or_stopped_during_a_check_checks_again(
    check, started, number, size
):
    check.check(FINE)
    if number == signal.SIGKILL:  # so that the check finds it alive and then gone
        started[0].kill()
        check._child = Alive(check._child)
    else:
        stop(started[0].pid)
    schema = {"type": "boolean", "description": "a" * size}
    check.check(StructuredOutputsParams(json=json.dumps(schema)))
    assert len(started) == 2


class Alive:
    """A child whose death has not been seen yet."""

    def __init__(self, child: subprocess.Popen):
        self.child = child

    def poll(self) -> int | None:
        return None

    def __getattr__(self, name: str):
        return getattr(self.child, name)


def test_time_in_which_the_process_gets_no_cpu_does_not_count():
    command = ["sh", "-c", r"sleep 0.6; printf '\0\0\0\0'; read x"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert grammar_check._ask(child, FINE, limit_s=0.2) == b""
        child.kill()


def test_a_tokenizer_that_cannot_be_read_for_now_is_no_fault_of_the_grammar(settings, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    compiler = GrammarCompiler(*msgspec.structs.astuple(settings))
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(OSError, match="Too many open files"):
        compiler.compile(FINE)
    monkeypatch.undo()
    compiler.compile(FINE)


def test_the_process_ends_with_its_parent(settings):
    code = (
        "import sys, os, msgspec; from quire.executor.sampling.grammar_check import *\n"
        "check = GrammarCheck(msgspec.msgpack.decode(sys.stdin.buffer.read(), "
        "type=CompilerSettings))\n"
        "check.check(StructuredOutputsParams(choice=['a']))\n"
        "print(check._child.pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    done = run_python(code, settings)
    pid = int(done.stdout)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.01)


def test_the_child_answers_each_grammar_and_ends_at_end_of_input(settings, monkeypatch):
    # this process keeps its own limit
    monkeypatch.setattr(grammar_check.resource, "setrlimit", lambda *_: None)
    requests, answers = io.BytesIO(), io.BytesIO()
    for message in (settings, FINE, StructuredOutputsParams(regex="a(")):
        grammar_check._write(requests, msgspec.msgpack.encode(message))
    requests.seek(0)
    with pytest.raises(EOFError):
        serve(requests, answers)
    answers.seek(0)
    ready, fine, bad = (grammar_check._read(answers) for _ in range(3))
    assert (ready, fine) == (b"", b"")
    assert "unclosed group" in msgspec.msgpack.decode(bad, type=Problem).problem
