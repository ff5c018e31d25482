"""Starts an engine or attaches to one, and loads the tokenizer in parallel.

Must not know: requests, outputs, the use of the client.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

from ...ipc.config import EngineConfig, ModelConfig
from ...ipc.errors import InvalidParameterError
from ...ipc.handshake import Report, report_nothing
from ...ipc.models.ranks import num_ranks
from ...ipc.threads import in_thread, start_in_thread
from ..engine_args import EngineArgs
from ..telemetry.export import check_endpoint
from ..text.tokenizer import Tokenizer
from .client import EngineClient, replaces_engines


def load_tokenizer(model_config: ModelConfig) -> Tokenizer | None:
    return (
        None
        if model_config.skip_tokenizer_init
        else Tokenizer(model_config.tokenizer or model_config.model)
    )


class TokenizerLoad:
    """Loads the tokenizer in a thread while the engine loads.

    It waits until the configuration is sent, because the tokenizer library holds the GIL.

        this process    config ─▶ spawn ─▶ HELLO, CONFIG ─▶ tokenizer ───────────────────▶ result
        the engine                imports ─▶ HELLO ─▶ torch ─▶ weights ─▶ KV cache ─▶ READY
    """

    def __init__(self, config: EngineConfig, on_progress: Report = report_nothing):
        self._model_config = config.model_config
        self._on_progress = on_progress
        self._tokenizer: Future[Tokenizer | None] | None = None

    def on_progress(self, stage: str, fraction: float) -> None:
        """Records a stage of the engine's start. Its configuration is sent after the stage
        "start".
        """
        if self._tokenizer is None and (stage != "start" or fraction == 1.0):
            self._tokenizer = start_in_thread(lambda: load_tokenizer(self._model_config))
        self._on_progress(stage, fraction)

    def result(self) -> Tokenizer | None:
        return (
            load_tokenizer(self._model_config)
            if self._tokenizer is None
            else self._tokenizer.result()
        )


async def start_client(
    config: EngineConfig, engine: str = "process", on_progress: Report = report_nothing
) -> EngineClient:
    """Makes the client of an engine: "inproc" (this process), "process" (a child), or the address
    of a daemon, "ipc://...".

    `config` is resolved. With an address it is not used; `client.ready.config` is the daemon's
    configuration. The client of another process replaces an engine that dies (SupervisedClient),
    unless the configuration says otherwise. `on_progress` is called while the engine starts. With
    data_parallel_size, of `config` or of the daemon, there are several (replicas/client.py).
    """
    _check(config, engine)
    if engine == "inproc":
        from .inproc_client import InprocClient

        return await InprocClient.start(config, on_progress)
    if engine != "process":
        from .replicas.attach import attach

        return await attach(config, engine, on_progress)
    if config.device_config.data_parallel_size > 1:
        from .replicas.start import start_replicas

        return await start_replicas(config, on_progress)
    from .mp_client import MPClient

    client = await MPClient.start(config, on_progress=on_progress)
    if not replaces_engines(config):
        return client
    from ..supervision.supervised_client import SupervisedClient

    try:
        if config.service_config.standby:
            from ..supervision.standby import check_memory

            check_memory(client)
        return SupervisedClient(client, config)
    except BaseException:
        await client.shutdown_async()
        raise


def _check(config: EngineConfig, engine: str) -> None:
    """Raises InvalidParameterError for replicas or a standby that the configuration does not
    allow.
    """
    number = config.device_config.data_parallel_size
    if number > 1 and engine == "inproc":
        raise InvalidParameterError(
            "data_parallel_size",
            f"is for engines in other processes (engine='process', or a daemon), got {number}",
        )
    if number > 1 and config.service_config.standby:
        raise InvalidParameterError(
            "standby", "is for one engine: with data_parallel_size the others take its requests"
        )
    if not config.service_config.standby:
        return
    if engine != "process":
        raise InvalidParameterError("standby", "is for an engine in a child process")
    if config.device_config.device != "cpu" and num_ranks(config) > 1:
        raise InvalidParameterError(
            "standby",
            "is for one rank on a GPU: what it has ready there are imports, and each of several "
            "ranks imports in a process of its own when the engine starts",
        )
    if not replaces_engines(config):
        raise InvalidParameterError("standby", "needs on_engine_death='restart' and restarts")


Connected = tuple[EngineConfig, EngineClient, TokenizerLoad | None]


def _check_endpoints(args: EngineArgs) -> None:
    check_endpoint("traces", args.otlp_traces_endpoint)
    check_endpoint("metrics", args.otlp_metrics_endpoint)


def connect(args: EngineArgs, engine: str) -> Connected:
    """Starts the engine that `args` describe, or attaches to the daemon at the address `engine`.
    The client is for blocking code.

    Returns its configuration, its client, and the tokenizer being loaded, if any. When attaching,
    engine arguments that differ from their defaults must equal the daemon's (EngineArgs.attach_to).
    """
    if engine == "inproc":
        from .inproc_client import InprocClient

        _check_endpoints(args)
        config = args.create_engine_config()
        _check(config, engine)
        tokenizer_load = TokenizerLoad(config)
        return config, InprocClient(config), tokenizer_load
    from .blocking_client import BlockingClient
    from .own_loop import OwnLoop

    loop = OwnLoop()
    try:
        config, client, tokenizer_load = loop.run(connect_async(args, engine))
    except BaseException:
        loop.close()
        raise
    return config, BlockingClient(client, loop), tokenizer_load


async def connect_async(
    args: EngineArgs, engine: str, on_progress: Report = report_nothing
) -> Connected:
    """Works as connect, with a client for the running loop, which it does not block (see
    AsyncLLM.start).
    """
    _check_endpoints(args)
    if engine not in ("inproc", "process"):
        client = await start_client(args.tree(), engine, on_progress)
        try:
            attach = partial(args.attach_to, client.ready.config)
            return await in_thread(attach, may_abandon=True), client, None
        except BaseException:
            await client.shutdown_async()
            raise
    on_progress("model files", 0.0)
    config = await in_thread(args.create_engine_config, may_abandon=True)  # may download
    on_progress("model files", 1.0)
    tokenizer_load = TokenizerLoad(config, on_progress)
    client = await start_client(config, engine, tokenizer_load.on_progress)
    return config, client, tokenizer_load
