"""ServerConfig: the options of `quire serve` besides the engine's configuration.

Must not know: how a value is used. It stays in the server process: keys are never sent to an
engine.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from ...ipc.config import (
    SECRET,
    ConfigField,
    NonNegativeInt,
    PositiveInt,
    Section,
    aliases,
    section_fields,
)
from ...ipc.own_files import user_state

Seconds = Annotated[float, Meta(gt=0)]
SPARE_CONNECTIONS = 256  # at most; see `most_connections`
OTHER_FILES = 128  # files and sockets of an engine that a process has besides its connections


class ServerConfig(Section, frozen=True):
    """Field names are unique across this class and EngineConfig: together they are the flags of
    `quire serve`.
    """

    host: Annotated[str, "Address to listen on. 0.0.0.0: all network interfaces."] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535), "Port to listen on; 0: any free one, printed at start."
    ] = 8000
    uds: Annotated[
        str | None,
        "Path of a Unix socket to listen on, in place of host and port. Processes that may write "
        "to the file may connect.",
    ] = None
    api_server_count: Annotated[
        PositiveInt,
        aliases("-asc"),
        "Server processes that share the port and one engine. More than one: for more requests or "
        "longer texts than one process can read and write.",
    ] = 1
    root_path: Annotated[
        str,
        Meta(pattern="^(/[^?#]*[^?#/])?$"),
        "Path below which a reverse proxy serves this server, such as /llm. Requests are answered "
        "with and without it.",
    ] = ""
    api_key: Annotated[
        list[str],
        SECRET,
        "A key that clients must send; may be repeated. None given: no key is asked for.",
    ] = []
    api_key_file: Annotated[
        str | None,
        "File with one key per line, and weight=NUMBER after a key that shall have more or less "
        "of the engine than others; # begins a comment. SIGHUP reads it again.",
    ] = None
    allowed_hosts: Annotated[
        list[str],
        "Names that a request's Host header may have, such as llm.example or *.example; * for "
        "all. Default: over loopback without keys this machine's own, else all.",
    ] = []
    allowed_origins: Annotated[
        list[str],
        "Origins whose web pages may call from a browser (CORS), such as https://app.example; * "
        "for all.",
    ] = []
    ssl_certfile: Annotated[str | None, "Certificate for HTTPS, in PEM."] = None
    ssl_keyfile: Annotated[str | None, "Private key of the certificate, in PEM."] = None
    ssl_ca_certs: Annotated[
        str | None, "Authorities that clients' certificates are checked against, in PEM."
    ] = None
    ssl_cert_reqs: Annotated[
        Literal[0, 1, 2], "Client certificates. 0: not requested; 1: optional; 2: required."
    ] = 0
    page: Annotated[bool, "Serve the page at / that shows the state of the engine."] = True
    admin: Annotated[
        bool, "Serve the routes that change the engine: pause, resume, sleep, wake, LoRA."
    ] = False
    allow_model_changes: Annotated[
        bool,
        "Let clients download models from the hub (Ollama's /api/pull) and delete what they have "
        "pulled (/api/delete). The server then is one with several models.",
    ] = False
    lora_modules: Annotated[
        list[str],
        "LoRA adapters that are loaded at start, as NAME=PATH each; a request's `model` selects "
        "one. They set --enable-lora.",
    ] = []
    vllm_metrics: Annotated[
        bool, "Add vLLM's names (vllm:...) to /metrics, besides Quire's (quire:...)."
    ] = False
    log_format: Annotated[
        Literal["text", "json"], "Format of the log on stderr, for server and engine."
    ] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        aliases("--uvicorn-log-level"),
        "Least level of the lines in the log, for server and engine. debug: also the kernels of "
        "each operation.",
    ] = "info"
    access_log: Annotated[bool, "Log one line per request, with the client's address."] = True
    access_log_polls: Annotated[
        bool, "Also log probes, scrapes and the requests that the page polls."
    ] = False
    model_aliases: Annotated[
        list[str],
        "Further names of the model in requests and lists, as several words after "
        "--served-model-name give them.",
    ] = []
    unknown_model: Annotated[
        Literal["error", "default"],
        "Requests for a model that this server does not have. error: 404; default: the default "
        "model answers them, which suits agents with fixed names (claude-*, gpt-*).",
    ] = "error"
    unknown_params: Annotated[
        Literal["warn", "error", "allow"],
        "Unknown fields of a body. warn: the header x-unknown-params lists them; error: 400; "
        "allow: ignored.",
    ] = "warn"

    chat_template: Annotated[
        str | None,
        "File with a Jinja chat template, or the name of one of the model's. Default: the model's "
        "own.",
    ] = None
    tool_call_parser: Annotated[
        str,
        "Format of the model's tool calls. auto: detected from its chat template; none: disabled.",
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        "Format of the model's reasoning. auto: detected from its chat template; none: disabled.",
    ] = "auto"
    chat_template_kwargs: Annotated[
        dict[str, Any],
        aliases("--default-chat-template-kwargs"),
        "Variables that every chat template receives.",
    ] = {}
    disable_any_whitespace: Annotated[
        bool,
        "JSON in structured outputs has no whitespace, unless a request sets "
        "disable_any_whitespace or a whitespace pattern. Default: at most one space, or one line "
        "break and an indentation, between two tokens of JSON.",
    ] = False
    disable_additional_properties: Annotated[
        bool,
        "Objects of a JSON schema and of a tool's parameters have only the properties that are "
        "listed, unless the schema states additionalProperties or a request sets "
        "disable_additional_properties. Otherwise models invent properties.",
    ] = True

    max_concurrent_requests: Annotated[
        PositiveInt | None,
        "Maximum completions in the engine at once; more wait here. Default: twice max_num_seqs, "
        "times data_parallel_size.",
    ] = None
    max_queued_requests: Annotated[
        NonNegativeInt, "Maximum requests that wait for the engine; further ones receive 429."
    ] = 1024
    max_queued_tokens: Annotated[
        PositiveInt, "Maximum prompt tokens that wait; requests beyond it receive 429."
    ] = 4_000_000
    max_queued_tokens_per_key: Annotated[
        PositiveInt | None, "Maximum prompt tokens of one API key that wait. Default: no own limit."
    ] = None
    max_body_bytes: Annotated[PositiveInt, "Maximum size of a request's body, in bytes."] = (
        32 * 2**20
    )
    max_header_bytes: Annotated[PositiveInt, "Maximum size of a request's head, in bytes."] = (
        64 * 2**10
    )
    max_connections: Annotated[
        PositiveInt, "Maximum open connections; further ones receive 503."
    ] = 4096
    max_prompts_per_request: Annotated[PositiveInt, "Maximum prompts in one request."] = 2048
    max_n: Annotated[PositiveInt, "Maximum completions per prompt."] = 128
    header_timeout_s: Annotated[Seconds, "Time for a client to send its headers."] = 10.0
    body_timeout_s: Annotated[Seconds, "Time for a client to send a body."] = 30.0
    keep_alive_timeout_s: Annotated[
        Seconds, "Time for which a connection may be idle between two requests."
    ] = 75.0
    write_timeout_s: Annotated[
        Seconds,
        "Time for which a client may leave a response unread before its request is aborted.",
    ] = 60.0
    sse_keep_alive_s: Annotated[Seconds, "Silence in a stream after which a comment is sent."] = (
        15.0
    )
    default_model: Annotated[
        str | None,
        aliases("--default"),
        "With several models: the one that is loaded at start and answers requests that name "
        "none. Default: the first.",
    ] = None
    model_options: Annotated[
        str | None, "With several models: YAML, TOML or JSON file with engine settings of each."
    ] = None
    memory_limit: Annotated[
        str | None,
        "With several models: memory for all engines together, such as 24GiB. Default: what is "
        "free at start.",
    ] = None
    keep_alive: Annotated[
        str | None,
        "With several models: idle time after which a model leaves memory, such as 5m. 0: at "
        "once; -1: never. Default: 5m.",
    ] = None
    sleep_after: Annotated[
        str | None,
        "With several models: idle time after which a model's engine frees weights and cache, and "
        "its process stays. -1: never. Default: half of keep_alive.",
    ] = None
    model_wait_s: Annotated[
        Seconds,
        "With several models: longest time for which a request waits until its model is loaded.",
    ] = 600.0
    drain_timeout_s: Annotated[
        Seconds, aliases("--shutdown-timeout"), "Time for active requests to finish after SIGTERM."
    ] = 30.0
    salt_per_key: Annotated[bool, "Share the prefix cache only between requests of one key."] = (
        False
    )
    max_chunks_per_s: Annotated[
        NonNegativeInt,
        "Approximate number of chunks per second of all streams together; beyond it, chunks hold "
        "several tokens. First tokens and ends are never delayed, others (and stop strings) by "
        "about 50 ms at most. 0: one chunk per token, regardless of the number of streams.",
    ] = 1250
    max_stored_responses: Annotated[
        NonNegativeInt,
        "Maximum stored responses of /v1/responses; the oldest are evicted first, those of keys "
        "above an equal share before others.",
    ] = 1024
    batch_dir: Annotated[
        str | None,
        "Folder of files and batches (/v1/files, /v1/batches, /v1/messages/batches). Default: one "
        "for this port in the user's state directory.",
    ] = None
    max_file_bytes: Annotated[PositiveInt, "Maximum size of an uploaded file, in bytes."] = (
        200 * 2**20
    )
    max_stored_file_bytes: Annotated[
        NonNegativeInt,
        "Maximum size of all files and batches on disk, in bytes; beyond it uploads receive 507 "
        "and batches wait. 0: there are no files and batches.",
    ] = 10 * 2**30
    max_batch_requests: Annotated[
        PositiveInt | None,
        "Maximum lines of batches that are answered at once while no other request runs; while "
        "others run, one is. Default: as many as the engine computes at once.",
    ] = None

    def share(self, limit: int) -> int:
        """Returns the part of a limit of the whole server that one of its processes enforces."""
        return -(-limit // self.api_server_count)


def batch_folder(config: ServerConfig) -> Path:
    """Returns the folder of the server's files and batches. A server that is started again on the
    same port or socket finds it again.
    """
    if config.batch_dir is not None:
        return Path(config.batch_dir).expanduser()
    name = f"port-{config.port}"
    if config.uds is not None:
        path = str(Path(config.uds).absolute())
        name = f"socket-{blake2b(path.encode(), digest_size=8).hexdigest()}"
    return user_state() / "batches" / name


def server_fields() -> dict[str, ConfigField]:
    """Returns every setting of the server by name."""
    return section_fields(ServerConfig)


def most_connections(max_connections: int) -> int:
    """Returns the limit of all open connections, with those that only receive an error since
    `max_connections` others are open.
    """
    return max_connections + min(SPARE_CONNECTIONS, max_connections // 3 + 1)


def most_files(max_connections: int) -> int:
    """Returns the descriptors of a server with so many connections."""
    return most_connections(max_connections) + OTHER_FILES


def connections_within(max_connections: int, num_files: int) -> int:
    """Returns how many of `max_connections` a process may have that opens at most `num_files`
    files.
    """
    if most_files(max_connections) <= num_files:
        return max_connections
    num_left = num_files - min(OTHER_FILES, num_files // 2)
    return min(max_connections, max(1, num_left - min(SPARE_CONNECTIONS, num_left // 4 + 1)))
