"""EngineCoreProc: an EngineCore in its own process, a child of one program or a daemon for several.

Must not know: torch, text, or what a step does.

Run as `python -m quire.core.engine_proc`.

    input thread ── events, aborts ──▶ main thread: take events, step, deliver rows
                                       ── messages ──▶ output thread
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import math
import os
import queue
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import zmq

from ..ipc import engine_input as events
from ..ipc import platform_tuning
from ..ipc.codec import make_codec
from ..ipc.config import DeviceConfig, EngineConfig, ServiceConfig
from ..ipc.counters import TransportStats
from ..ipc.engine_input import EngineInput
from ..ipc.engine_output import MAX_BACKLOG_BYTES, EngineOutput
from ..ipc.errors import EngineDeadError, InvalidParameterError, QuireError
from ..ipc.failures import pack_exception
from ..ipc.hops import MessageTimer
from ..ipc.listener import bind_listener, listener_pid, read_token, taken_over
from ..ipc.log_format import FORMATS, configure_logging
from ..ipc.machine import raise_descriptor_limit, use_cores, visible_gpus
from ..ipc.messages import (
    AbortRequests,
    ClientMessage,
    Config,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineMessage,
    Finished,
    FinishReason,
    PaceOutputs,
    Progress,
    Ready,
    Shutdown,
    StartWave,
    UtilityCall,
    UtilityResult,
)
from ..ipc.process import LEAVE_SIGNAL, STACKS_SIGNAL, SignalPipe, die_with_parent, read_key
from ..ipc.sockets import KEY_BYTES, MAX_DAEMON_SOCKETS, Wire, ipc_path, make_context
from ..ipc.systemd import NUM_BLOCKS, Notifier
from .executor_import import begin_import

if TYPE_CHECKING:
    from .engine_core import EngineCore

GROUP_S = 1.0  # between the Shutdowns of engines that leave together
PROGRESS_S = 0.02  # between two reports of one stage of the start
UNMAP_DELAY_S = 1.0  # from the start until pages of libraries may be unmapped, which takes 30 ms
LEAVE_DELAY_S = 1.0  # see EngineCoreProc.delays_leaving
# A client of a daemon without requests that sends nothing for so long makes room for another.
IDLE_S = 60.0
FLUSH_TIMEOUT_S = 2.0  # how long an exiting engine waits for its clients to read their outputs
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"

logger = logging.getLogger("quire.engine")


class LeaveEarly(Exception):
    """Asked to exit while the model was loading."""


class EngineCoreProc:
    """The main thread. It owns the core, the list of clients, and the decision to exit."""

    def __init__(
        self,
        input_: EngineInput,
        output: EngineOutput,
        make_executor: Callable[[EngineConfig], Any] | None = None,
        *,
        imports_for: str | None = None,
        on_ready: Callable[[Ready], None] = lambda ready: None,
        epoch: int = 0,
    ):
        """input_, output: as of make_threads. imports_for: see engine_command. epoch: of a daemon;
        a child receives its own.
        """
        self.imports_for = imports_for
        self.input = input_
        self.output = output
        self.make_executor = make_executor
        self.config: EngineConfig | None = None
        self.epoch, self.engine_index = epoch, 0
        self.core: EngineCore | None = None
        self.clients: set[int] = set()
        self.num_open_calls: Counter[int] = Counter()  # utilities not yet answered, by client
        # the process exits when it has no requests and all rows are delivered
        self.is_draining = False
        self.must_leave = False
        self.is_daemon = False
        # A child leaves at a signal when it has had no request for LEAVE_DELAY_S: its parent may
        # have got the signal too, drain, and have more of them.
        self.delays_leaving = False
        self.idle_since: float | None = None  # while it could leave
        self.unmap_at = math.inf
        self._reported = ("", 0.0)  # the stage, and when by time.monotonic()
        self.notifier = Notifier()
        self.num_overflowed_clients = 0
        self.on_ready = on_ready

    def run(self, config: EngineConfig | None = None) -> int:
        """Serves until asked to exit; returns the exit code.

        `config` is a daemon's own; a child receives its parent's. Raises what prevented the start
        (after telling the clients); later errors end in EngineDead and exit code 1.
        """
        self.config, self.is_daemon = config, config is not None
        if config is not None:
            self.engine_index = config.device_config.data_parallel_rank
        self.output.start()
        self.input.start()
        try:
            self._start()
            self._loop()
        except LeaveEarly:
            pass
        except Exception as error:
            if self.core is None:
                self._send_to_all(pack_exception(error))
                raise
            if self._leaves_with_its_group(error):
                return 0
            logger.error("the engine failed\n%s", traceback.format_exc())
            self._deliver(self.core.take_rows())
            self._send_to_all(EngineDead(f"the engine failed: {type(error).__name__}: {error}"))
            return 1
        finally:
            self.input.close()
            self.output.close(0 if self.must_leave else FLUSH_TIMEOUT_S)
            self.input.close_connections()
            if self.core is not None:
                self.core.shutdown()
        return 0

    def _leaves_with_its_group(self, error: Exception) -> bool:
        """Whether an engine's pass with others that share experts broke because all were asked to
        leave, and one has left first. This one is asked at the same time.
        """
        core = self.core
        if core is None or core.waves is None or not isinstance(error, EngineDeadError):
            return False
        until = time.monotonic() + GROUP_S
        while not self.must_leave and time.monotonic() < until:
            self._take_events(block=True, until=until)
        return self.must_leave

    def _start(self) -> None:
        imported = None if self.imports_for is None else begin_import(self.imports_for)
        from .engine_core import EngineCore, Host  # while that thread loads torch's libraries

        while self.config is None:
            self._take_events(block=True)
            self._check_early()
        executor = self.make_executor(self.config) if self.make_executor is not None else None
        put = self.input.events.put
        host = Host(
            deliver=self._deliver,
            wake=lambda: put(events.Wake()),
            count_transport=self._count_transport,
            message_timer=MessageTimer(self.input.codec),
            report_wave=self._send_to_all,
            is_full=lambda: self.output.is_full,
        )
        core = EngineCore(
            self.config,
            executor,
            self._report,
            host=host,
            epoch=self.epoch,
            engine_index=self.engine_index,
            is_alone=True,
            imported=imported,
        )
        self._take_events(block=False)
        platform_tuning.end_start()
        self.core = core
        core.executor.watch(lambda cause: put(events.Fatal(RuntimeError(cause), "a rank failed")))
        self._send_to_all(core.ready)
        self.on_ready(core.ready)
        self.notifier.ready(**{NUM_BLOCKS: core.ready.num_blocks})
        self.unmap_at = time.monotonic() + UNMAP_DELAY_S

    def _count_transport(self) -> dict[str, int]:
        stats = TransportStats(
            self.input.num_bad_frames, self.output.num_lost_outputs, self.num_overflowed_clients
        )
        return msgspec.structs.asdict(stats)

    def _report(self, stage: str, fraction: float) -> None:
        self._take_events(block=False)
        self._check_early()
        # hundreds of weights may be loaded in a moment
        last, at = self._reported
        now = time.monotonic()
        if stage != last or fraction in (0.0, 1.0) or now - at >= PROGRESS_S:
            self._reported = stage, now
            self._send_to_all(Progress(stage, fraction))

    def _check_early(self) -> None:
        if self.must_leave or self.is_draining:
            raise LeaveEarly

    # ------------------------------------------------------------ the loop

    def _loop(self) -> None:
        core = self.core
        assert core is not None  # it is loaded before the loop starts
        while not self.must_leave and not self._may_leave(core):
            until = min(core.next_deadline or math.inf, self.notifier.due)
            if self.idle_since is not None:
                until = min(until, self.idle_since + LEAVE_DELAY_S)
            until = min(until, self.unmap_at)
            self._take_events(block=not self._can_step(core), until=until)
            self.notifier.works()
            if self._can_step(core):
                self._step(core)
            elif time.monotonic() >= self.unmap_at:
                # in this thread, since none may load a library meanwhile
                self.unmap_at = math.inf
                platform_tuning.unmap_unchanged()
        if not self.must_leave:
            self._send_to_all(EngineDead("the engine was asked to leave"))

    def _may_leave(self, core: EngineCore) -> bool:
        if not self.is_draining or not core.is_idle():
            self.idle_since = None
            return False
        if not self.delays_leaving:
            return True
        self.idle_since = self.idle_since or time.monotonic()
        return time.monotonic() - self.idle_since >= LEAVE_DELAY_S

    def _can_step(self, core: EngineCore) -> bool:
        is_free = not self.output.is_full or core.is_in_wave
        return core.has_work() and is_free and not self.must_leave

    def _step(self, core: EngineCore) -> None:
        outputs, model_executed = core.step_fn()
        self._deliver(outputs)
        core.post_step(model_executed)

    def _deliver(self, outputs: dict[int, EngineCoreOutputs] | None) -> None:
        for client_index, rows in (outputs or {}).items():
            self.output.send(client_index, rows)

    def _take_events(self, block: bool, until: float = math.inf) -> None:
        """Applies everything that has arrived, aborts first. `block`: waits until something has,
        or for `until`, by time.monotonic().
        """
        while True:
            while self.input.aborts:
                client_index, request_ids = self.input.aborts.popleft()
                if self.core is not None:
                    self.core.abort_requests(request_ids, client_index)
            try:
                timeout_s = None if until == math.inf else max(0.0, until - time.monotonic())
                event = self.input.events.get(block, timeout_s)
            except queue.Empty:
                return
            self._on_event(event)
            block = False

    def _on_event(self, event: events.Event) -> None:
        if isinstance(event, events.FromClient):
            if event.client_index in self.clients:
                self._on_message(event.client_index, event.message)
        elif isinstance(event, events.Refused):
            self._refuse(event.client_index, event.identity, event.error)
        elif isinstance(event, events.ClientJoined):
            self.clients.add(event.client_index)
            self.output.connect(event.client_index, event.wire)
            if self.core is not None:
                self.output.send(event.client_index, self.core.ready)
        elif isinstance(event, (events.ClientLeft, events.ClientOverflowed)):
            self.clients.discard(event.client_index)
            self.num_open_calls.pop(event.client_index, None)
            self.num_overflowed_clients += isinstance(event, events.ClientOverflowed)
            if self.core is not None:
                self.core.drop_client(event.client_index)
            if isinstance(event, events.ClientLeft):
                self.output.disconnect(event.client_index)
        elif isinstance(event, events.ClientBeyondLimit):
            self._make_room(event)
        elif isinstance(event, events.LeaveSignal):
            self.is_draining, self.delays_leaving = True, not self.is_daemon
        elif isinstance(event, events.Fatal):
            raise EngineDeadError(f"{event.what}: {event.error}") from event.error

    def _make_room(self, beyond_limit: events.ClientBeyondLimit) -> None:
        """Releases the client that has been idle for the longest time, if any is."""
        found: list[int] = []
        self.input.call(lambda: found.extend(self.input.idle_clients(IDLE_S)))
        idle = next((one for one in found if self._is_idle(one)), None)
        if idle is not None:
            logger.info("client %d was idle and makes room for another", idle)
        self.input.call(lambda: self.input.admit(beyond_limit, idle, IDLE_S))

    def _is_idle(self, client_index: int) -> bool:
        return not self.num_open_calls[client_index] and (
            self.core is None or not self.core.is_used_by(client_index)
        )

    # ------------------------------------------------------------ messages

    def _on_message(self, client_index: int, message: Any) -> None:
        if isinstance(message, EngineCoreRequest):
            if self.core is None:
                self._refuse(client_index, message.request_id, "the engine is not ready")
            elif not (self.is_draining and self.is_daemon):
                self.core.add_request(message, client_index)
            # else its client submits it to the next daemon when this one is gone
        elif isinstance(message, AbortRequests) and self.core is not None:
            self.core.abort_requests(message.request_ids, client_index)
        elif isinstance(message, PaceOutputs) and self.core is not None:
            self.core.pace_outputs(message.rows_per_s, client_index)
        elif isinstance(message, StartWave) and self.core and self.core.waves is not None:
            self.core.waves.start(message.number)
        elif isinstance(message, UtilityCall):
            self._call_utility(message, client_index)
        elif isinstance(message, Shutdown):
            self.is_draining, self.delays_leaving = True, False
            self.must_leave = not message.drain
        elif isinstance(message, Config) and self.config is None:
            take_share(message.config.device_config)
            self.config, self.epoch, self.engine_index = msgspec.structs.astuple(message)

    def _call_utility(self, call: UtilityCall, client_index: int) -> None:
        """Sends the answer when it is available, now or after a later step.

        If the engine exits first, clients learn that instead.
        """
        if self.core is None:
            failure = pack_exception(QuireError("the engine is not ready"))
            return self.output.send(client_index, UtilityResult(call.call_id, failure=failure))

        def answer(result: UtilityResult) -> None:
            self.num_open_calls[client_index] -= 1
            self.output.send(client_index, result)

        self.num_open_calls[client_index] += 1
        self.core.answer_utility(call, client_index, answer)

    def _refuse(self, client_index: int, identity: str | int, error: str) -> None:
        """Answers a request (its id is a string) or a utility call (an integer) that never
        reached the core.
        """
        if isinstance(identity, int):
            answer = UtilityResult(
                identity, failure=pack_exception(InvalidParameterError("args", error))
            )
        else:
            finished = [Finished(0, FinishReason.ERROR, error=error)]
            answer = EngineCoreOutputs(
                self.epoch, [identity], [0], [0], [], finished, engine_index=self.engine_index
            )
        self.output.send(client_index, answer)

    def _send_to_all(self, message: EngineMessage) -> None:
        for client_index in self.clients:
            self.output.send(client_index, message)


# ---------------------------------------------------------------- the program


def make_threads(
    context: zmq.Context,
    max_message_bytes: int,
    signals: SignalPipe,
    *,
    drops_slow_clients: bool = False,
    max_backlog_bytes: int = MAX_BACKLOG_BYTES,
) -> tuple[EngineInput, EngineOutput]:
    """The two threads of an EngineCoreProc, not started, which report to one queue of events.
    drops_slow_clients: as a daemon does, see engine_output.py.
    """
    found: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
    put = found.put
    codec = make_codec(ClientMessage, max_message_bytes)
    output = EngineOutput(
        context,
        codec,
        max_backlog_bytes=max_backlog_bytes,
        on_drained=lambda: put(events.Wake()),
        on_overflow=(lambda client_index: put(events.ClientOverflowed(client_index)))
        if drops_slow_clients
        else None,
        on_fatal=lambda error: put(events.Fatal(error)),
        on_lost=lambda client_index, request_ids: put(
            events.FromClient(client_index, AbortRequests(request_ids))
        ),
    )
    return EngineInput(context, codec, signals, found, output.send), output


def take_share(device: DeviceConfig) -> None:
    """Binds this process to the engine's cores and GPUs, before CUDA is initialised.

    Raises InvalidParameterError if there are too few GPUs.
    """
    if device.cores:
        use_cores(device.cores)
    if device.device == "cuda" and device.data_parallel_size > 1:
        number = device.tensor_parallel_size * device.pipeline_parallel_size
        try:
            own = visible_gpus(device.data_parallel_rank, number, os.environ.get(VISIBLE_GPUS))
        except ValueError as error:
            raise InvalidParameterError("data_parallel_size", str(error)) from None
        os.environ[VISIBLE_GPUS] = own


def run_child(
    wire: Wire,
    max_message_bytes: int,
    make_executor=None,
    *,
    imports_for: str | None = None,
) -> int:
    """Serves the parent that started this process."""
    signals = SignalPipe(signal.SIGTERM, signal.SIGINT)
    context = make_context()
    input_, output = make_threads(context, max_message_bytes, signals)
    input_.serve_parent(wire)
    try:
        return EngineCoreProc(input_, output, make_executor, imports_for=imports_for).run()
    except Exception as error:  # the parent has received it, and raises it
        logger.debug("start-up failed", exc_info=error)
        return 1
    finally:
        context.term()


def daemon_signals(*, is_owned: bool) -> SignalPipe:
    """The signals at which a daemon leaves. is_owned: it belongs to its parent."""
    if not is_owned:
        return SignalPipe(signal.SIGTERM, signal.SIGINT)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return SignalPipe(LEAVE_SIGNAL)


def run_daemon(
    address: str,
    config: EngineConfig,
    make_executor=None,
    *,
    replaces: bool = False,
    listener_fd: int | None = None,
    epoch: int = 0,
) -> int:
    """Serves programs that attach at `address` ("ipc://PATH") until SIGTERM, then finishes running
    requests. `replaces`: when it is ready, it takes the address over from the daemon there.

    listener_fd: a listener at this address that the parent has bound. Such a daemon belongs to its
    parent, so it ends at LEAVE_SIGNAL only.

    Main thread only. Returns the exit code: 0 asked to exit, 1 failed (traceback on stderr), 2
    invalid address or configuration (a message on stderr). The frontend, which does not import
    core, starts it through ipc.process.exec_daemon.
    """
    signals = daemon_signals(is_owned=listener_fd is not None)
    raise_descriptor_limit()
    context = make_context(MAX_DAEMON_SOCKETS)
    max_message_bytes = config.service_config.max_message_bytes
    try:
        take_share(config.device_config)
        token_file = config.service_config.token_file
        token = None if token_file is None else read_token(token_file)
        input_, output = make_threads(context, max_message_bytes, signals, drops_slow_clients=True)

        def listen() -> None:
            listener = bind_listener(address, is_for_all_users=token is not None)
            input_.serve_listener(listener, address, token)

        path = ipc_path(address, "listen")
        must_take_over = replaces and listener_pid(path) is not None
        if listener_fd is not None:
            input_.serve_listener(socket.socket(fileno=listener_fd), None, token)
        elif not must_take_over:
            listen()

        def on_ready(ready: Ready) -> None:
            if must_take_over:
                with taken_over(path):
                    input_.call(listen)
            print(
                f"quire engine: ready at {address}, {ready.num_blocks} KV-cache blocks",
                file=sys.stderr,
                flush=True,
            )

        process = EngineCoreProc(input_, output, make_executor, on_ready=on_ready, epoch=epoch)
        return process.run(config)
    except QuireError as error:
        print(f"quire engine: {error}", file=sys.stderr)
        return 2
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        context.term()


def main(
    argv: list[str] | None = None, *, make_executor: Callable[[EngineConfig], Any] | None = None
) -> int:
    """The program.

    `make_executor(config)` replaces the real executor: a program that calls main with one is an
    engine that MPClient(command=[...]) can start, as tests do.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.parent_pid is not None:  # a daemon has none, unless it belongs to a group
        die_with_parent(args.parent_pid)
    configure_logging(args.log_level, args.log_format, args.log_model)
    # the stacks of all threads on stderr, also of a thread that holds the GIL
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    # a server's threads give way to its engine (SCHED_BATCH), and an engine started later is their
    # child
    platform_tuning.stop_giving_way()
    platform_tuning.begin_start()
    if args.connect is not None:
        return run_child(
            Wire(args.connect, read_key(args.key_fd, KEY_BYTES)),
            args.max_message_bytes,
            make_executor,
            imports_for=args.import_early,
        )
    if args.listen is None:
        parser.error("one of --listen and --connect is needed")
    try:
        config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    except msgspec.MsgspecError as error:
        parser.error(f"stdin must hold the configuration as JSON: {error}")
    return run_daemon(
        args.listen,
        config,
        make_executor,
        replaces=args.replace,
        listener_fd=args.listener_fd,
        epoch=args.epoch,
    )


def make_parser() -> argparse.ArgumentParser:
    """The program's arguments."""
    parser = argparse.ArgumentParser(
        prog="quire.core.engine_proc",
        description="Runs an engine. Started by MPClient, or by `quire engine`.",
    )
    parser.add_argument(
        "--listen",
        metavar="ipc://PATH",
        help="serve programs that attach here; the configuration comes as JSON on stdin",
    )
    parser.add_argument(
        "--replace", action="store_true", help="take the address over when the model is loaded"
    )
    parser.add_argument(
        "--connect", metavar="NAME", help="serve the parent, whose sockets have this name"
    )
    parser.add_argument("--listener-fd", type=int, help="a listener there, of the parent")
    parser.add_argument(
        "--epoch", type=int, default=0, help="of a daemon that takes another's place"
    )
    parser.add_argument("--parent-pid", type=int)
    parser.add_argument("--key-fd", type=int, help="a pipe from the parent, with its sockets' key")
    parser.add_argument(
        "--import-early",
        choices=("cpu", "cuda"),
        help="import what runs a model on this device while there is no configuration",
    )
    parser.add_argument("--max-message-bytes", type=int, default=ServiceConfig().max_message_bytes)
    parser.add_argument("--log-level", type=int, default=logging.WARNING)
    parser.add_argument("--log-format", choices=FORMATS, default="text")
    parser.add_argument("--log-model", default="", help="the model that lines of the log name")
    return parser


def leave(exit_code: int) -> NoReturn:
    """Exits without the interpreter's shutdown, which takes seconds with torch loaded."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    leave(main())
