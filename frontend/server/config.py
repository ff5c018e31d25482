"""ServerConfig: what `quire serve` can be told beside the engine's own configuration.

Must not know: how a value is used. It stays in the server process: keys never travel to an engine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ...ipc.config import NonNegativeInt, PositiveInt, Section

Seconds = Annotated[float, Meta(gt=0)]


class ServerConfig(Section, frozen=True):
    """Field names are unique here and in EngineConfig: together they are the flags of `quire
    serve`.
    """

    host: Annotated[
        str,
        Meta(description="Address to listen on. 0.0.0.0: everybody who can reach this machine."),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(ge=0, le=65535, description="Port to listen on; 0: any free one, printed at start."),
    ] = 8000
    uds: Annotated[
        str | None,
        Meta(
            description="Path of a Unix socket to listen on, in place of host and port. Who may "
            "write to the file may call."
        ),
    ] = None
    root_path: Annotated[
        str,
        Meta(
            pattern="^(/[^?#]*[^?#/])?$",
            description="Path below which a reverse proxy serves this server, such as /llm. "
            "Requests are answered with and without it.",
        ),
    ] = ""
    api_key: Annotated[
        list[str],
        Meta(
            description="A key that clients must send; may be repeated. None given: no key is "
            "asked for."
        ),
    ] = []
    api_key_file: Annotated[
        str | None,
        Meta(description="File with one key per line; # begins a comment. SIGHUP reads it again."),
    ] = None
    allowed_hosts: Annotated[
        list[str],
        Meta(
            description="Names that a request's Host header may have, such as llm.example or "
            "*.example; * for all. Default: over loopback without keys this machine's own, else "
            "all."
        ),
    ] = []
    allowed_origins: Annotated[
        list[str],
        Meta(
            description="Origins whose web pages may call from a browser (CORS), such as "
            "https://app.example; * for all."
        ),
    ] = []
    ssl_certfile: Annotated[str | None, Meta(description="Certificate for HTTPS, in PEM.")] = None
    ssl_keyfile: Annotated[
        str | None, Meta(description="Private key of the certificate, in PEM.")
    ] = None
    ssl_ca_certs: Annotated[
        str | None,
        Meta(description="Authorities that clients' certificates are checked against, in PEM."),
    ] = None
    ssl_cert_reqs: Annotated[
        Literal[0, 1, 2],
        Meta(description="Client certificates. 0: not asked for; 1: optional; 2: required."),
    ] = 0
    page: Annotated[
        bool, Meta(description="Serve the page at / that shows the engine at work.")
    ] = True
    admin: Annotated[
        bool,
        Meta(
            description="Serve the routes that change the engine: pause, resume, sleep, wake, LoRA."
        ),
    ] = False
    vllm_metrics: Annotated[
        bool, Meta(description="Give /metrics vLLM's names (vllm:...) beside our own (quire:...).")
    ] = False
    log_format: Annotated[
        Literal["text", "json"],
        Meta(description="How the log on stderr is written, the engine's too."),
    ] = "text"
    access_log: Annotated[
        bool, Meta(description="Log one line per request, with the client's address.")
    ] = True
    access_log_polls: Annotated[
        bool, Meta(description="Log probes, scrapes and what the page polls as well.")
    ] = False
    unknown_params: Annotated[
        Literal["warn", "error", "allow"],
        Meta(
            description="Fields of a body that nobody knows. warn: the header x-unknown-params "
            "lists them; error: 400; allow: silence."
        ),
    ] = "warn"

    chat_template: Annotated[
        str | None,
        Meta(
            description="File with a Jinja chat template, or the name of one of the model's. "
            "Default: the model's own."
        ),
    ] = None
    tool_call_parser: Annotated[
        str,
        Meta(
            description="How the model writes tool calls. auto: recognised from its chat template; "
            "none: not at all."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Meta(
            description="How the model marks its reasoning. auto: recognised from its chat "
            "template; none: not at all."
        ),
    ] = "auto"
    chat_template_kwargs: Annotated[
        dict[str, Any], Meta(description="Variables that every chat template receives.")
    ] = {}
    disable_any_whitespace: Annotated[
        bool,
        Meta(
            description="JSON in structured outputs has no whitespace, unless a request sets "
            "disable_any_whitespace or a whitespace pattern. Default: at most one space, or one "
            "line break and an indentation, between two tokens of JSON."
        ),
    ] = False

    max_concurrent_requests: Annotated[
        PositiveInt | None,
        Meta(
            description="Most completions that the engine holds at once; more wait here. Default: "
            "twice max_num_seqs."
        ),
    ] = None
    max_queued_requests: Annotated[
        NonNegativeInt,
        Meta(description="Most requests that wait for the engine; one more is answered 429."),
    ] = 1024
    max_queued_tokens: Annotated[
        PositiveInt, Meta(description="Most prompt tokens that wait; more are answered 429.")
    ] = 4_000_000
    max_body_bytes: Annotated[
        PositiveInt, Meta(description="Largest body of a request, in bytes.")
    ] = 32 * 2**20
    max_header_bytes: Annotated[
        PositiveInt, Meta(description="Largest head of a request, in bytes.")
    ] = 64 * 2**10
    max_connections: Annotated[
        PositiveInt, Meta(description="Most open connections; one more is answered 503.")
    ] = 4096
    max_prompts_per_request: Annotated[
        PositiveInt, Meta(description="Most prompts in one request.")
    ] = 2048
    max_n: Annotated[PositiveInt, Meta(description="Most completions per prompt.")] = 128
    header_timeout_s: Annotated[
        Seconds, Meta(description="How long a client may take to send its headers.")
    ] = 10.0
    body_timeout_s: Annotated[
        Seconds, Meta(description="How long a client may take to send a body.")
    ] = 30.0
    keep_alive_timeout_s: Annotated[
        Seconds, Meta(description="How long a connection may idle between two requests.")
    ] = 75.0
    write_timeout_s: Annotated[
        Seconds,
        Meta(
            description="How long a client may leave an answer unread before its request is "
            "aborted."
        ),
    ] = 60.0
    sse_keep_alive_s: Annotated[
        Seconds, Meta(description="Silence in a stream after which a comment is sent.")
    ] = 15.0
    step_timeout_s: Annotated[
        Seconds, Meta(description="Step time beyond which /health/ready calls the engine stuck.")
    ] = 60.0
    drain_timeout_s: Annotated[
        Seconds, Meta(description="How long running requests may take after SIGTERM.")
    ] = 30.0
    salt_per_key: Annotated[
        bool, Meta(description="Share the prefix cache only between requests of one key.")
    ] = False
    max_chunks_per_s: Annotated[
        NonNegativeInt,
        Meta(
            description="About how many chunks all streams together send in a second; beyond it "
            "chunks hold several tokens. "
            "First tokens and ends never wait, others (and stop strings) about 50 ms at most. 0: "
            "one for each token, however many streams there are."
        ),
    ] = 1250
    max_stored_responses: Annotated[
        NonNegativeInt,
        Meta(description="Answers of /v1/responses that are kept for later; the oldest go first."),
    ] = 1024


def server_fields() -> dict[str, msgspec.structs.FieldInfo]:
    """Every argument of the server by name."""
    return {field.name: field for field in msgspec.structs.fields(ServerConfig)}
