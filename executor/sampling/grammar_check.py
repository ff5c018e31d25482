"""Compiles grammars in a separate process first, which may crash, hang or run out of memory.

Must not know: torch, slots, steps, requests.

    engine: GrammarCheck.check ── parameters ──▶ child: compile, walk a few tokens
            ◀── a Problem, or "" ──
            no answer in time, or the child's death: refused; the next check starts a new child

llguidance has limits of its own almost everywhere, but an intersection of a hundred regexes
compiles forever, and a chain of ten thousand $refs overflows the stack. The child has a smaller
stack than the engine's thread that compiles accepted grammars.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import struct
import subprocess
import sys
import threading
from typing import IO, BinaryIO

import msgspec
import psutil

from ...ipc.errors import InvalidParameterError
from ...ipc.params import StructuredOutputsParams
from ...ipc.process import die_with_parent, kill_at_end_of_file
from .grammar_compiler import GrammarCompiler, refusal

# for one grammar; a usual one takes milliseconds, so a busy machine still passes
TIME_LIMIT_S = 1.5
START_LIMIT_S = 60.0  # until it has read the tokenizer
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


class GrammarCheck:
    """One child process, started by the first check. Used by one thread at a time."""

    def __init__(self, settings: CompilerSettings):
        self.settings = settings
        self._child: subprocess.Popen | None = None
        self._leash_fd = -1  # a pipe whose end-of-file kills the child
        self._is_closed = False

    def check(self, params: StructuredOutputsParams) -> None:
        """Checks normalized `params` within about two seconds.

        Raises InvalidParameterError for a grammar that is invalid or exceeds a limit.
        """
        # it died between two checks
        if self._child is not None and self._child.poll() is not None:
            self.end()
        child = self._child or self._start()
        try:
            problem = _ask(child, params, TIME_LIMIT_S)
            if problem is None:
                raise refusal(f"takes longer than {TIME_LIMIT_S} s to compile")
        except (OSError, EOFError):
            code = self.end()
            raise refusal(
                f"ended the process that tried to compile it (exit code {code}): it needs too much "
                f"memory or nests too deeply"
            ) from None
        except BaseException:
            self.end()
            raise
        if problem:
            raise msgspec.msgpack.decode(problem, type=Problem).error()

    def close(self) -> None:
        """Makes a check that waits for the child fail, and prevents further ones from starting.

        Any thread may call it; call `end` when no check runs.
        """
        self._is_closed = True
        child = self._child
        if child is not None:
            child.kill()

    def _start(self) -> subprocess.Popen:
        if self._is_closed:
            raise refusal("cannot be checked: the engine is leaving")
        command = [
            sys.executable,
            "-P",
            "-m",
            "quire.executor.sampling.grammar_check",
            str(os.getpid()),
        ]
        # Its stderr is not needed: the exit code tells how it died, and llguidance returns the text
        # of its panics.
        read_fd, self._leash_fd = os.pipe()
        try:
            self._child = child = subprocess.Popen(
                command,
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
        try:
            problem = _ask(child, self.settings, START_LIMIT_S)
            if problem is None:
                raise TimeoutError
        except (OSError, EOFError) as error:
            code = self.end()
            raise RuntimeError(
                f"the process that checks grammars did not start ({type(error).__name__}, exit "
                f"code {code})"
            ) from None
        if problem:
            self.end()
            raise msgspec.msgpack.decode(problem, type=Problem).error()
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


class Problem(msgspec.Struct, array_like=True, frozen=True):
    """An InvalidParameterError on the wire."""

    parameter: str
    problem: str

    def error(self) -> InvalidParameterError:
        return InvalidParameterError(self.parameter, self.problem)


def _ask(child: subprocess.Popen[bytes], message: object, timeout_s: float) -> bytes | None:
    """Sends `message` and returns the answer, or None where there is none within `timeout_s`.

    Raises OSError or EOFError when the child is gone.
    """
    assert child.stdin is not None and child.stdout is not None  # both are pipes
    _write(child.stdin, msgspec.msgpack.encode(message))
    if not select.select([child.stdout], [], [], timeout_s)[0]:
        return None
    return _read(child.stdout)


def _write(pipe: IO[bytes], payload: bytes) -> None:
    pipe.write(_LENGTH.pack(len(payload)) + payload)
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
    """Empty if the grammar can be used, else a Problem."""
    try:
        compiler.try_out(compiler.compile(params))
    except InvalidParameterError as error:
        return msgspec.msgpack.encode(Problem(error.parameter, error.problem))
    except Exception as error:
        return msgspec.msgpack.encode(
            Problem("structured_outputs", f"cannot be compiled: {type(error).__name__}")
        )
    return b""


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
    limit = psutil.Process().memory_info().vms + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
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
