"""Compiles grammars in a separate process first, which may crash, hang or run out of memory.

Must not know: torch, slots, steps, requests.

    engine: GrammarCheck.check ── parameters ──▶ child: compile, walk a few tokens
            ◀── a Problem, a rewritten schema, or "" ──
            too much CPU time, or a death of the grammar's making: refused
            killed, stopped or not started: the same check in a new child, MAX_TRIES times

llguidance has limits of its own almost everywhere, but an intersection of a hundred regexes
compiles forever, and a chain of ten thousand $refs overflows the stack. The child has a smaller
stack than the engine's thread that compiles accepted grammars. A grammar is refused only for what
it does itself: everything else that can happen to the child is an error of the engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, BinaryIO

import msgspec

from ...ipc.errors import InvalidParameterError
from ...ipc.operating_system import SYSTEM
from ...ipc.params import StructuredOutputsParams
from ...ipc.process import die_with_parent, kill_at_end_of_file
from .grammar_compiler import GrammarCompiler, refusal

logger = logging.getLogger(__name__)

TIME_LIMIT_S = 1.5  # of CPU time, for one grammar; a usual one takes milliseconds
START_LIMIT_S = 60.0  # of CPU time, until it has read the tokenizer
WAIT_LIMIT_S = 60.0  # for an answer; more only where the machine is overloaded
LOOK_S = 0.25  # between two looks at its state while an answer is awaited
MAX_TRIES = 4  # of one check, where something other than the grammar ends it
RETRY_DELAY_S = 0.2  # after the second try; doubles
# signals that no grammar causes: its memory is limited by an error, not by a signal
FOREIGN_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
MEMORY_LIMIT_BYTES = 512 * 2**20  # beyond the child's memory after it has read the tokenizer
CHECK_STACK_BYTES = 8 * 2**20
# address space; a compilation that passes the check touches an eighth of it
COMPILE_STACK_BYTES = 64 * 2**20

_LENGTH = struct.Struct("<I")


class CompilerSettings(msgspec.Struct, array_like=True, frozen=True):
    """The child builds its GrammarCompiler from these."""

    tokenizer_directory: str
    vocab_size: int
    eos_token_id: int | None


class CheckFailedError(RuntimeError):
    """No child could check the grammar, for a reason that is not the grammar."""


class GrammarCheck:
    """One child process, started by the first check. Used by one thread at a time."""

    def __init__(self, settings: CompilerSettings):
        self.settings = settings
        self._child: subprocess.Popen | None = None
        self._leash_fd = -1  # a pipe whose end-of-file kills the child
        self._closed = threading.Event()
        self.spent_s = 0.0  # CPU time of all checks, without the starts of children

    def check(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """Checks normalized `params`, within about two seconds of CPU time. Returns them with the
        schema that llguidance has read, so that nobody needs to rewrite it again.

        Raises InvalidParameterError for a grammar that is invalid or exceeds a limit, and
        CheckFailedError if each of MAX_TRIES children was killed, was stopped or did not start.
        """
        for num_tries in range(1, MAX_TRIES + 1):
            try:
                return self._check_once(params)
            except CheckFailedError as error:
                if num_tries == MAX_TRIES or self._closed.is_set():
                    raise
                logger.warning("%s; it is started again", error)
            if num_tries > 1:
                self._closed.wait(RETRY_DELAY_S * 2 ** (num_tries - 2))
        raise AssertionError("the last try returns or raises")

    def _check_once(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        # it died between two checks
        if self._child is not None and self._child.poll() is not None:
            self.end()
        child = self._child or self._start()
        try:
            with self._timed(child):
                answer = _ask(child, params, TIME_LIMIT_S)
            if answer is None:
                raise refusal(f"takes longer than {TIME_LIMIT_S} s to compile")
        except (OSError, EOFError) as error:
            code = self.end()
            if isinstance(error, TimeoutError) or (code is not None and -code in FOREIGN_SIGNALS):
                raise CheckFailedError(_failure("ended during a check", error, code)) from None
            raise refusal(
                f"ended the process that tried to compile it (exit code {code}): it needs too much "
                f"memory or nests too deeply"
            ) from None
        except BaseException:
            self.end()
            raise
        if not answer:
            return params
        found = msgspec.msgpack.decode(answer, type=Problem | Rewritten)
        if isinstance(found, Problem):
            raise found.error()
        if found.max_ways is not None:
            logger.info(
                "a schema is narrower than the request's: of the ways in which a branch of oneOf "
                "can exclude the others, at most %d are kept",
                found.max_ways,
            )
        return msgspec.structs.replace(
            params, json=found.schema, disable_additional_properties=False
        )

    @contextlib.contextmanager
    def _timed(self, child: subprocess.Popen) -> Iterator[None]:
        start = SYSTEM.process_state(child.pid).cpu_s
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # it may have died
                self.spent_s += SYSTEM.process_state(child.pid).cpu_s - start

    def close(self) -> None:
        """Makes a check that waits for the child fail, and prevents further ones from starting.

        Any thread may call it; call `end` when no check runs.
        """
        self._closed.set()
        child = self._child
        if child is not None:
            child.kill()

    def _start(self) -> subprocess.Popen:
        if self._closed.is_set():
            raise CheckFailedError("the engine is leaving")
        try:
            child = self._spawn()
            problem = _ask(child, self.settings, START_LIMIT_S)
            if problem is None:
                raise TimeoutError
        except (OSError, EOFError) as error:
            raise CheckFailedError(_failure("did not start", error, self.end())) from None
        except BaseException:
            self.end()
            raise
        if problem:
            self.end()
            raise msgspec.msgpack.decode(problem, type=Problem).error()
        return child

    def _spawn(self) -> subprocess.Popen:
        module = "quire.executor.sampling.grammar_check"
        # Its stderr is not needed: the exit code tells how it died, and llguidance returns the text
        # of its panics.
        read_fd, self._leash_fd = os.pipe()
        try:
            self._child = child = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(os.getpid())],
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(read_fd,),
            )
            kill_at_end_of_file(read_fd, child.pid)
        except BaseException:
            if self._child is None:
                os.close(self._leash_fd)
            raise
        finally:
            os.close(read_fd)
        if self._closed.is_set():  # `close` may have come before there was a child to kill
            child.kill()
        return child

    def end(self) -> int | None:
        """Ends the child and returns its exit code, if there was a child."""
        child, self._child = self._child, None
        if child is None:
            return None
        child.kill()
        os.close(self._leash_fd)
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(OSError):  # unread output
                if pipe is not None:
                    pipe.close()
        return child.wait()

    def __del__(self) -> None:
        self.end()


class Rewritten(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The schema that llguidance has read, where it is not the request's."""

    schema: str
    max_ways: int | None  # as in grammar_compiler.Said


class Problem(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """An InvalidParameterError on the wire."""

    parameter: str
    problem: str

    def error(self) -> InvalidParameterError:
        return InvalidParameterError(self.parameter, self.problem)


def _failure(what: str, error: Exception, code: int | None) -> str:
    ended = f"exit code {code}" if code is not None else str(error)
    return f"the process that checks grammars {what} ({type(error).__name__}, {ended})"


def _ask(child: subprocess.Popen[bytes], message: object, limit_s: float) -> bytes | None:
    """Sends `message` and returns the answer, or None where the child spends more than `limit_s` of
    CPU time on it.

    Raises TimeoutError when the child is stopped or gets no CPU time, and OSError or EOFError when
    it is gone.
    """
    assert child.stdin is not None and child.stdout is not None  # both are pipes
    deadline = time.monotonic() + WAIT_LIMIT_S
    limit_s += SYSTEM.process_state(child.pid).cpu_s
    unsent = memoryview(_framed(msgspec.msgpack.encode(message)))
    os.set_blocking(child.stdin.fileno(), False)  # a stopped child reads nothing
    while True:
        poller = select.poll()  # select.select refuses the numbers of a daemon with many clients
        poller.register(child.stdout, select.POLLIN)
        if unsent:
            poller.register(child.stdin, select.POLLOUT)
        ready = dict(poller.poll(1000 * LOOK_S))
        if child.stdout.fileno() in ready:
            return _read(child.stdout)
        if child.stdin.fileno() in ready:
            unsent = unsent[os.write(child.stdin.fileno(), unsent) :]
        elif (state := SYSTEM.process_state(child.pid)).cpu_s >= limit_s:
            return None
        elif state.is_stopped or time.monotonic() >= deadline:  # it is stopped
            raise TimeoutError


def _framed(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def _write(pipe: IO[bytes], payload: bytes) -> None:
    pipe.write(_framed(payload))
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    """Raises EOFError when the other end is gone."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    payload = pipe.read(_LENGTH.unpack(head)[0])
    if len(payload) < _LENGTH.unpack(head)[0]:
        raise EOFError
    return payload


# ---------------------------------------------------------------- the child


def answer(compiler: GrammarCompiler, params: StructuredOutputsParams) -> bytes:
    """Empty if the grammar can be used as it is, else a Problem or a Rewritten."""
    try:
        matcher, (said, max_ways) = compiler.compile_said(params)
        compiler.try_out(matcher)
    except InvalidParameterError as error:
        return msgspec.msgpack.encode(Problem(error.parameter, error.problem))
    except Exception as error:
        return msgspec.msgpack.encode(
            Problem("structured_outputs", f"cannot be compiled: {type(error).__name__}")
        )
    if said is params:
        return b""
    assert isinstance(said.json, str)  # it is normalized
    return msgspec.msgpack.encode(Rewritten(said.json, max_ways))


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers until the engine closes the pipe."""
    compiler = GrammarCompiler(
        *msgspec.structs.astuple(msgspec.msgpack.decode(_read(requests), type=CompilerSettings))
    )
    try:
        # load it now: its time and memory do not count against a grammar
        compiler.tokenizer  # noqa: B018
    except InvalidParameterError as error:
        return _write(answers, msgspec.msgpack.encode(Problem(error.parameter, error.problem)))
    SYSTEM.limit_memory(MEMORY_LIMIT_BYTES, beyond_present=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _write(answers, b"")
    while True:
        _write(
            answers,
            answer(compiler, msgspec.msgpack.decode(_read(requests), type=StructuredOutputsParams)),
        )


def main(parent_pid: int) -> None:
    die_with_parent(parent_pid)
    threading.stack_size(CHECK_STACK_BYTES)
    thread = threading.Thread(target=_serve_pipes, daemon=True)
    thread.start()
    thread.join()


def _serve_pipes() -> None:
    with contextlib.suppress(EOFError, BrokenPipeError):
        serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main(int(sys.argv[1]))
