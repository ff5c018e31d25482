"""An engine process with the fake executor: `python -P -m quire.tests.fake_engine`.

It starts like the real engine.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import msgspec
from quire.core import engine_proc
from quire.core.engine_core import EngineCore
from quire.core.engine_proc import leave, main
from quire.core.scheduling.scheduler import Scheduler
from quire.ipc import errors
from quire.ipc.codec import MessageDecoder, MessageEncoder
from quire.ipc.config import EngineConfig
from quire.ipc.messages import AbortRequests, EngineCoreOutputs, EngineMessage, PaceOutputs
from quire.ipc.params import StructuredOutputsParams
from quire.ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from quire.tests.fakes import FakeExecutor

COMMAND = [sys.executable, "-P", "-m", "quire.tests.fake_engine"]


class TroubledExecutor(FakeExecutor):
    """A fake executor with scripted failures, taken from hf_overrides.

    - "delay_s" and "raise_at_step": as in FakeExecutor.
    - "at_load": "fail" (ValueError), "die" (SIGKILL), "hang" or "exit".
    - "poison": {"token", "after", "signal"}: ends the process in the step that has given a request
      with this token in its prompt so many output tokens.
    - "loads": a path; who loads adds the id of its process to this file.
    - "lacks_memory": a path; who loads and finds this file removes it and raises
      NotEnoughMemoryError.
    - "hang_once": a path; a step from the 20th on that does not find this file makes it and does
      not end.
    - "hold": [path, num_steps]; see Hold.
    - "raise_once": [where, path]; the first step after the fifth that does not find this file makes
      it and raises, in the "scheduler" or the "model".
    - "slow_call_s": the duration of collective_rpc, in seconds.
    - "shutdown_s": the duration of the executor's shutdown, in seconds.
    - "grammar_delay_s": the duration of a grammar check, in seconds.
    - "idle_s": how long a client of a daemon must have been idle to be released.
    - "records": it computes nothing and keeps what it receives; see record_messages.
    """

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self.trouble = config.model_config.hf_overrides
        self.delay_s = self.trouble.get("delay_s", 0.0)
        self.raise_at_step = self.trouble.get("raise_at_step")
        engine_proc.IDLE_S = self.trouble.get("idle_s", engine_proc.IDLE_S)
        self.records = Records() if "records" in self.trouble else None

    def load_model(self, report) -> None:
        report("load weights", 0.5)
        trouble = self.trouble.get("at_load")
        if trouble == "fail":
            raise ValueError("these weights are made of cheese")
        if trouble == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if trouble == "hang":
            print("hanging", file=sys.stderr, flush=True)
            time.sleep(1000)
        if trouble == "exit":
            print("famous last words", file=sys.stderr, flush=True)
            os._exit(7)
        if path := self.trouble.get("loads"):
            with open(path, "a") as file:
                file.write(f"{os.getpid()}\n")
        if (path := self.trouble.get("lacks_memory")) and Path(path).exists():
            Path(path).unlink()
            raise errors.NotEnoughMemoryError("weights", "they do not fit")
        if "raise_once" in self.trouble:
            self.num_calls = 0
            owner, name = (Scheduler, "schedule"), (TroubledExecutor, "execute_model")
            raise_once(self, *(owner if self.trouble["raise_once"][0] == "scheduler" else name))
        super().load_model(report)

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if (path := self.trouble.get("hang_once")) and step.step >= 20 and not Path(path).exists():
            Path(path).touch()
            time.sleep(1000)
        if hold := self.trouble.get("hold"):
            while len(self.steps) >= hold[1] and Path(hold[0]).exists():
                Path(hold[0]).with_name("held").touch()
                time.sleep(0.005)
        output = super().execute_model(step)
        if poison := self.trouble.get("poison"):
            for slot in (self.slots[number] for number in step.slots):
                is_poison = poison["token"] in slot.token_ids[: slot.request.num_prompt_tokens]
                if is_poison and slot.num_output_tokens >= poison["after"]:
                    os.kill(os.getpid(), poison["signal"])
        return output

    def collective_rpc(self, method: str, *args) -> list:
        time.sleep(self.trouble.get("slow_call_s", 0.0))
        if self.records is not None and method in self.records.calls:
            return [self.records.calls[method](*args)]
        return super().collective_rpc(method, *args)

    def shutdown(self) -> None:
        time.sleep(self.trouble.get("shutdown_s", 0.0))
        super().shutdown()

    def check_grammar(
        self, params: StructuredOutputsParams, *, is_known: bool = False, owner: str = ""
    ) -> Future[None]:
        future: Future[None] = Future()
        threading.Timer(self.trouble.get("grammar_delay_s", 0.0), future.set_result, [None]).start()
        return future


class Hold:
    """Makes engines with the fake executor wait in the middle of their requests, so that what a
    test does there meets them, however late the test's process comes to it.

    Between `begin` and `end` an engine that has run `num_steps` steps waits in the next one.
    """

    def __init__(self, directory: Path, num_steps: int):
        self._file = directory / "hold"
        self.overrides = {"hold": [str(self._file), num_steps]}  # for hf_overrides

    def begin(self) -> None:
        self._file.touch()

    def is_reached(self) -> bool:
        """Whether an engine waits, or has waited."""
        return self._file.with_name("held").exists()

    def end(self) -> None:
        self._file.unlink(missing_ok=True)


def record_messages(set_attribute: Callable[[type, str, Callable], None] = setattr) -> None:
    """Makes every EngineCore of this process whose executor has "records" in hf_overrides keep the
    messages of its clients, instead of acting on them.
    """
    messages: dict[str, Callable] = {
        "add_request": lambda request: request,
        "abort_requests": AbortRequests,
        "pace_outputs": PaceOutputs,
    }
    for name, as_message in messages.items():
        set_attribute(EngineCore, name, _recording(getattr(EngineCore, name), as_message))


def _recording(act: Callable, as_message: Callable) -> Callable:
    def record(core: EngineCore, value, client_index: int = 0) -> None:
        records = core.executor.records
        if records is None:
            return act(core, value, client_index)
        [frame] = MessageEncoder(2**24).encode(as_message(value))  # its arrays are small
        records.messages.append(bytes(frame))
        records.deliver = lambda outputs: core.host.deliver({client_index: outputs})

    return record


class Records:
    """What an engine has received, and more methods of collective_rpc for tests of clients."""

    def __init__(self):
        self.messages: list[bytes] = []
        self.deliver: Callable[[EngineCoreOutputs], None] | None = None  # to the last sender
        self.calls = {"received": self.received, "send": self.send, "same": self.same}
        self.calls["refuse"] = self.refuse
        self._decoder = MessageDecoder(EngineMessage, 2**24)

    def received(self) -> list[bytes]:
        return self.messages

    def send(self, *frames: bytes) -> None:
        """Sends encoded EngineCoreOutputs to the client whose message came last, if any has."""
        if self.deliver is not None:
            self.deliver(self._decoder.decode(frames))

    def same(self, *args) -> list:
        return list(args)

    def refuse(self, error_type: str, *args) -> None:
        raise getattr(errors, error_type)(*args)


def raise_once(executor: TroubledExecutor, owner: type, name: str) -> None:
    """Makes a method raise if it is called often enough and the file is not there."""
    method, path = getattr(owner, name), Path(executor.trouble["raise_once"][1])

    def raising(self, *args):
        executor.num_calls += 1
        if executor.num_calls > 5 and not path.exists():
            path.touch()
            raise RuntimeError("scripted failure")
        return method(self, *args)

    setattr(owner, name, raising)


def open_blocking(starting):
    """The client that a coroutine makes, for blocking code."""
    from quire.frontend.clients.blocking_client import BlockingClient
    from quire.frontend.clients.own_loop import OwnLoop

    loop = OwnLoop()
    try:
        return BlockingClient(loop.run(starting), loop)
    except BaseException:
        loop.close()
        raise


@contextmanager
def daemon(directory: Path, config: EngineConfig):
    """Run a daemon with the fake executor that listens in `directory`; yield (address, Popen)."""
    address = f"ipc://{directory / 'engine.sock'}"
    process = subprocess.Popen(
        [*COMMAND, "--listen", address], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        process.stdin.write(msgspec.json.encode(config))
        process.stdin.close()
        is_up = (directory / "engine.sock").exists
        wait_until(lambda: is_up() or process.poll() is not None, timeout_s=60)  # on a busy machine
        yield address, process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def wait_until(holds, timeout_s: float = 60.0) -> float:
    """Wait until `holds()` is true and return the seconds waited; fail after `timeout_s`."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < timeout_s, "it did not come true in time"
        time.sleep(0.005)
    return time.monotonic() - begin


def is_gone(pid: int) -> bool:
    """Whether the process has ended; init may not have reaped it yet."""
    try:
        return state_of(Path(f"/proc/{pid}")) in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def stop(pid: int) -> None:
    """Stop a process and wait until each of its threads has: they stop one after the other."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(state_of(task) == "T" for task in Path(f"/proc/{pid}/task").iterdir()))


def state_of(process: Path) -> str:
    """The letter of a process' or a thread's state, from its directory in /proc."""
    return (process / "stat").read_text().rpartition(")")[2].split()[0]


if __name__ == "__main__":
    record_messages()
    leave(main(make_executor=TroubledExecutor))
