"""The server process: opens the port, then starts the engine; handles signals and the shutdown.

Must not know: routes, requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, cast

import msgspec
import uvicorn

from ...ipc import platform_tuning
from ...ipc.config import EngineConfig, config_fields
from ...ipc.errors import EngineStartError, InvalidParameterError, QuireError
from ...ipc.log_format import announce, configure_logging, log_level_of
from ...ipc.machine import most_descriptors
from ...ipc.operating_system import is_bound
from ...ipc.process import INTERRUPTS_IGNORED, ignores_interrupts
from ...ipc.socket_files import SocketFile, directory_lock
from ..async_llm import AsyncLLM
from ..clients.replicas.start import daemon_configs
from ..engine_args import EngineArgs
from .app import App, make_app
from .batch_runner import BatchRunner
from .config import ServerConfig, connections_within, most_files
from .group import ServerGroup, config_of_members
from .http.acceptor import AcceptingServer
from .http.auth import ApiKeys
from .http.errors import ENDS, ApiError
from .http.protocol import Protocol
from .http.write_batch import WriteBatch
from .models import Models
from .served_models import ServedModel, make_models
from .state import ServerState

logger = logging.getLogger(__name__)
tell = functools.partial(announce, logger, "quire serve")
BACKLOG = 2048  # connections that wait to be accepted
PUBLISH_TICKS = 10  # uvicorn's, of 0.1 s, between two looks of other processes at the counts


def serve(
    config: ServerConfig,
    args: EngineArgs | list[ServedModel],
    engine: str,
    common: Mapping[str, Any] = {},
) -> int:
    """Runs until a signal, or until the engine cannot be loaded or dies. Returns the exit code.

    With a list of models, each has an engine that comes and goes (models.py), and the server
    outlives them; `common` has the engine settings of models that clients pull.
    """
    configure_logging(log_level_of(config.log_level), config.log_format)
    check_certificate(config)
    config = msgspec.structs.replace(config, max_connections=allowed_connections(config))
    listener = open_port(config)
    config = with_port(config, listener)
    socket_file = None if config.uds is None else SocketFile(Path(config.uds))
    # This module logs the start and the end.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    if isinstance(args, list):
        state, loading = ServerState(config, ""), ", ".join(model.name for model in args)
        models = make_models(
            args, config, on_loaded=platform_tuning.prepare_for_streams, common=common
        )
        server = EngineServer(config, state, models, engine)
        tell(
            f"{shown_address(config, listener)} (models: {loading}; default: {models.default.name})"
        )
    else:
        state = ServerState(config, args.served_model_name or args.model)
        server = EngineServer(config, state, args, engine)
        tell(f"{shown_address(config, listener)} (loading {args.model})")
    warn(config)
    try:
        server.run(sockets=[listener])
    finally:
        if socket_file is not None:
            socket_file.remove()
    if server.failure is not None:
        raise server.failure
    return 0


def serve_several(
    config: ServerConfig, args: EngineArgs, engine: str, given: Mapping[str, Any]
) -> int:
    """Does the same as `serve` with api_server_count processes. `given` are the server's settings
    that the user has chosen.
    """
    configure_logging(log_level_of(config.log_level), config.log_format)
    check_certificate(config)
    ApiKeys(config)  # each process reads the keys; a mistake is found before they start
    own = config_of_members(config, given)
    if engine == "inproc":
        raise InvalidParameterError("engine", "must be process or a daemon's address")
    if engine == "process" and args.standby:
        raise InvalidParameterError("standby", "needs api_server_count=1")
    listener = open_port(config)
    own = with_port(own, listener)
    socket_file = None if config.uds is None else SocketFile(Path(config.uds))
    name = args.served_model_name or args.model
    try:
        tell(f"{shown_address(config, listener)} (loading {args.model})")
        warn(config)
        engine_configs = group_engines(args) if engine == "process" else []
        arguments = {
            name: value
            for name, field in config_fields().items()
            if (field.is_of_frontend or engine != "process")
            and (value := getattr(args, name)) != field.default
        }
        ServerGroup(own, engine_configs, engine, arguments, listener, name).run(tell)
    finally:
        listener.close()
        if socket_file is not None:
            socket_file.remove()
    return 0


def group_engines(args: EngineArgs) -> list[EngineConfig]:
    """Returns the configuration of each engine of several server processes, which share its
    fairness between keys.
    """
    config = args.create_engine_config()
    scheduler = msgspec.structs.replace(config.scheduler_config, owners_by_name=True)
    return daemon_configs(msgspec.structs.replace(config, scheduler_config=scheduler))


def warn(config: ServerConfig) -> None:
    """Warns of an address without keys that other machines reach, and of a SIGINT that is
    ignored.
    """
    if (
        config.uds is None
        and config.host not in ("127.0.0.1", "localhost", "::1")
        and not (config.api_key or config.api_key_file)
    ):
        tell(
            f"warning: {config.host} accepts requests from every host that can reach this machine; "
            f"--api-key requires a key"
        )
    if ignores_interrupts():
        tell(INTERRUPTS_IGNORED)


def shown_address(config: ServerConfig, listener: socket.socket) -> str:
    scheme = "https" if config.ssl_certfile else "http"
    if config.uds is not None:
        return f"{scheme}+unix://{config.uds}"
    host, port, *_ = listener.getsockname()
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_certificate(config: ServerConfig) -> None:
    """Raises InvalidParameterError if HTTPS is requested and its files cannot be used."""
    if config.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(config, name):
                raise InvalidParameterError(name, "requires ssl_certfile")
        return
    if config.ssl_cert_reqs and config.ssl_ca_certs is None:
        raise InvalidParameterError("ssl_cert_reqs", "requires ssl_ca_certs")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    if config.ssl_ca_certs is not None:
        with usable("ssl_ca_certs", config.ssl_ca_certs):
            context.load_verify_locations(config.ssl_ca_certs)
    with usable("ssl_certfile", config.ssl_certfile, config.ssl_keyfile):
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)


@contextlib.contextmanager
def usable(name: str, *files: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # an SSLError is an OSError
        problem = f"{' and '.join(filter(None, files))} cannot be used: {error.strerror or error}"
        raise InvalidParameterError(name, problem) from None


def open_port(config: ServerConfig) -> socket.socket:
    """Opens the listening socket before the slow part of the start. Replaces a socket file on which
    no process listens any more.

    Raises InvalidParameterError if the address cannot be used.
    """
    path, host, port = config.uds, config.host, config.port
    try:
        if path is not None:
            listener = bind_socket_file(Path(path))
        else:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        is_unknown = isinstance(error, socket.gaierror)
        name = "uds" if path is not None else "host" if is_unknown else "port"
        where = f"{host}:{port}" if path is None else path
        problem = f"cannot listen on {where}: {error.strerror or error}"
        raise InvalidParameterError(name, problem) from None
    listener.setblocking(False)
    return listener


def with_port(config: ServerConfig, listener: socket.socket) -> ServerConfig:
    """Returns the settings with the port that the system has chosen for 0."""
    if config.uds is not None:
        return config
    return msgspec.structs.replace(config, port=listener.getsockname()[1])


def bind_socket_file(path: Path) -> socket.socket:
    """Listens before it lets go of the lock, so that another process sees it."""
    with directory_lock(path.absolute().parent):
        if path.is_socket() and not is_bound(path):
            path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    return listener


def allowed_connections(config: ServerConfig) -> int:
    """Raises the limit of open files to what `max_connections` needs. Returns the number of
    connections that the limit then allows, which may be smaller; the log says so.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = most_descriptors()
    most, wanted = config.max_connections, most_files(config.max_connections)
    if allowed is not None and wanted > allowed:
        most = connections_within(most, allowed)
        logger.warning(
            "at most %d connections: max_connections=%d needs %d open files, the system allows %d "
            "(ulimit -Hn)",
            most,
            config.max_connections,
            wanted,
            allowed,
        )
        wanted = allowed
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return most


def runner_of(app: App, models: Models | None) -> BatchRunner:
    """Returns what runs the batches of a server with one model, or with several."""
    state = app.state

    def states() -> list[ServerState]:
        return [state] if models is None else [slot.state for slot in models.slots.values()]

    def is_ready() -> bool:
        return models is not None or state.engine is not None

    check_model = state.check_model if models is None else models.find
    return BatchRunner(app, state.server_config, state.files, states, check_model, is_ready)


class EngineServer(AcceptingServer):
    """uvicorn with the lifecycle of the engine.

    `failure` says why there is no engine, or no longer one.
    """

    def __init__(
        self,
        config: ServerConfig,
        state: ServerState,
        args: EngineArgs | Models,
        engine: str,
        on_ready: Callable[[], None] | None = None,
    ):
        """`on_ready` is called when the engine is ready; by default the user is told."""
        models = args if isinstance(args, Models) else None
        app = make_app(state, models)
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                # The cast is needed: uvicorn calls `http` and accepts any number of seconds, but
                # its annotations are narrower.
                http=cast(
                    Any,
                    functools.partial(
                        Protocol,
                        limits=config,
                        batch=WriteBatch(),
                        on_refused=lambda code: state.meters.connections_refused.update([code]),
                    ),
                ),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,  # app.py logs one line when a request ends
                server_header=False,
                date_header=True,
                proxy_headers=False,
                timeout_keep_alive=cast(Any, config.keep_alive_timeout_s),
                timeout_graceful_shutdown=round(config.drain_timeout_s),
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                ssl_ca_certs=config.ssl_ca_certs,
                ssl_cert_reqs=config.ssl_cert_reqs,
            ),
            config,
        )
        self.state = state
        self.models = models
        self.failure: QuireError | None = None
        self._args = args
        self._engine = engine
        self._on_ready = on_ready
        self._ignores_interrupts = ignores_interrupts()
        self._batches = runner_of(app if isinstance(app, App) else cast(App, app.app), models)
        self._running_batches: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second one ends the process at once. uvicorn sets this
        handler for a SIGINT that was ignored, too.
        """
        if sig == signal.SIGINT and self._ignores_interrupts:
            return
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._set_draining(True)
        if sig == signal.SIGINT:
            self._captured_signals.append(sig)

    def _states(self) -> tuple[ServerState, ...]:
        slots = self.models.slots.values() if self.models is not None else ()
        return (self.state, *(slot.state for slot in slots))

    def _set_draining(self, is_draining: bool) -> None:
        for state in self._states():
            state.begin_drain(is_draining=is_draining)

    def _on_hangup(self) -> None:
        """Reads the key file again on SIGHUP. The signal never ends the server, also without a
        file.
        """
        if self.state.server_config.api_key_file is None:
            logger.warning("SIGHUP has no effect: there is no file of keys (--api-key-file)")
            return
        try:
            self.state.keys.read()
        except InvalidParameterError as error:
            logger.error("the keys are unchanged: %s", error)
        else:
            logger.info("the keys have been reloaded")

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_hangup)
        loading = asyncio.create_task(self._load())
        if self.state.server_config.max_stored_file_bytes:
            self._running_batches = asyncio.create_task(self._batches.run())
        try:
            await super().serve(sockets)
        finally:
            await self._end_batches()
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            self._note_death()
            await self._end_engine()

    async def _end_batches(self) -> None:
        """Ends the lines that are being answered; a later server answers them again."""
        if self._running_batches is not None:
            self._running_batches.cancel()
            await asyncio.gather(self._running_batches, return_exceptions=True)

    def _note_death(self) -> None:
        """Records the failure of an engine that was not shut down. One of several may fail."""
        if self.models is not None:
            return self.models.note_deaths()
        engine = self.state.engine
        if engine is not None and self.failure is None and not self.state.has_ended_engine:
            self.failure = engine.dead_error

    async def _end_engine(self) -> None:
        """Shuts the engine down. Its requests receive an error."""
        for state in self._states():
            state.begin_end()
        if self.models is not None:
            await self.models.shutdown()
        if self.state.engine is not None:
            await self.state.engine.shutdown_async()

    async def on_tick(self, counter: int) -> bool:
        """Ends the server when the engine has died, as vLLM does, since a supervisor can restart
        it. First every request receives its error, and /health reports the failure meanwhile.
        """
        self._note_death()
        if self.failure is not None:
            self.should_exit = True
        if counter % PUBLISH_TICKS == 0:
            self.state.publish_totals()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for active requests while the port still answers with 503 for new work, and for
        load balancers that poll /health/ready. Then uvicorn shuts down: it accepts no new
        connections, and closes open ones after their input has been read.
        """
        self._set_draining(self.failure is None)  # else its state says what is wrong
        await self._end_batches()
        if self.models is not None:
            await self.models.drain()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.state.server_config.drain_timeout_s
        running = set(self.server_state.tasks)
        if running:
            requests = "request may" if len(running) == 1 else "requests may"
            tell(f"{len(running)} active {requests} finish; a second signal aborts them")
        while running and not self.force_exit and loop.time() < deadline:
            _, running = await asyncio.wait(running, timeout=0.05)
        self._note_death()
        if running:
            logger.warning("%d unfinished requests are aborted", len(running))
            await self._end_engine()
        self.config.timeout_graceful_shutdown = (
            1 if running else max(1, round(deadline - loop.time()))
        )
        await super().shutdown(sockets)

    async def _load(self) -> None:
        try:
            await self._load_first()
        finally:
            gc.enable()  # see cli/serve.py

    async def _load_first(self) -> None:
        if self.models is not None:
            # A failure is logged, and the next request tries again.
            with contextlib.suppress(ApiError):
                await self.models.acquire(self.models.default)
                self.models.release(self.models.default)
            return
        assert isinstance(self._args, EngineArgs)
        engine = None
        try:
            engine = await AsyncLLM.start(self._args, self._engine, self.state.loading.report)
            await self.state.loras.load_modules(engine, self.state.server_config.lora_modules)
            # The call rejects templates and parsers that this model does not have.
            await self.state.adopt_engine(engine)
        except ENDS:
            raise
        except BaseException as error:
            self._fail_start(error)
            if engine is not None:
                await engine.shutdown_async()
            return
        platform_tuning.prepare_for_streams(gives_way=self._engine != "inproc")
        if self._on_ready is None:
            tell(f"ready: {self.state.model_name}")
        else:
            self._on_ready()

    def _fail_start(self, error: BaseException) -> None:
        """Ends the server with the cause, whatever its class."""
        if not isinstance(error, QuireError):
            logger.error("the start failed", exc_info=error)
            cause = f"the start failed: {type(error).__name__}: {error}"
            error = EngineStartError(cause).with_traceback(error.__traceback__)
        self.state.loading.error = str(error)
        self.failure = error
        self.should_exit = True
