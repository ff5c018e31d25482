"""Quire on Ray Serve: replicas that scale with the load, requests that are routed by prefix, and
streams that continue on another replica when theirs dies.

    cd examples/ray_serve && serve run app:build model=PATH num_cpus=4 max_replicas=8

    client ── Serve's proxy ── Ingress ── PrefixRouter ── Replica: `quire serve` without its port
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

from pydantic import BaseModel
from quire import AsyncLLM, EngineArgs
from quire.frontend.server.app import make_app
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.state import ServerState
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from routing import conversation_key, in_order
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from streams import RESUMABLE, Delivered, with_seed

MAX_TRIES = 4  # replicas for one request
HEALTH_TIMEOUT_S = 5.0
# headers that are of one connection only
NOT_PASSED = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}
REPLICA_IS_GONE = (RayError, RayServeException)
Headers = list[tuple[str, str]]


class Arguments(BaseModel):
    model: str = "bundled"
    served_model_name: str = "quire"
    engine_args: dict[str, Any] = {}  # further EngineArgs
    num_cpus: int = 1  # of each replica, for its kernels' threads
    min_replicas: int = 1
    max_replicas: int = 4
    target_ongoing_requests: float = 16  # of a replica; more load adds replicas
    autoscaling: dict[str, Any] = {}  # further fields of Serve's AutoscalingConfig
    max_ongoing_requests: int = 64  # of a replica; further ones wait at the ingress
    max_replicas_per_node: int | None = None
    ingress_resources: dict[str, float] = {}  # to choose its node


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that its first argument, a key, belongs to."""

    def initialize_state(self, slack: int = 8) -> None:
        self._slack = slack
        self._num_running: Counter[str] = Counter()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Each rank has one replica. The next rank is tried if a replica is full."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        key = pending_request.args[0] if pending_request and pending_request.args else ""
        num_running = {name: self._num_running[name] for name in by_name}
        return [[by_name[name]] for name in in_order(key, num_running, self._slack)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        self._num_running[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._num_running[replica_id.unique_id] -= 1


class Replica:
    """An engine, and Quire's server application over it, called without HTTP."""

    async def __init__(self, arguments: Arguments) -> None:
        settings = {"num_threads": arguments.num_cpus} | arguments.engine_args
        name = arguments.served_model_name
        args = EngineArgs(arguments.model, served_model_name=name, **settings)
        self.engine = await AsyncLLM.start(args)
        self.app = make_app(ServerState(ServerConfig(), name, self.engine))

    async def answer(
        self, key: str, method: str, path: str, query: str, headers: Headers, body: bytes
    ) -> AsyncGenerator[Any, None]:
        """Yields the status and headers, then the body in pieces. Closing it aborts the request."""
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers],
            "client": None,
            "server": None,
        }
        requests = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return requests.pop() if requests else await asyncio.Future()

        call = asyncio.create_task(self.app(scope, receive, messages.put))
        call.add_done_callback(lambda _: messages.put_nowait({}))  # after a fault, too
        try:
            while message := await messages.get():
                if message["type"] == "http.response.start":
                    yield message["status"], message["headers"]
                elif message.get("body"):
                    yield message["body"]
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    break
        finally:
            call.cancel()

    async def check_health(self) -> None:
        """Serve replaces a replica that raises."""
        self.engine.check_health()
        if not await self.engine.is_responsive(HEALTH_TIMEOUT_S):
            raise RuntimeError(f"the engine has not answered for {HEALTH_TIMEOUT_S} s")

    async def __del__(self) -> None:
        await self.engine.shutdown_async()


class Ingress:
    """Reads requests, sends each to a replica, and passes the answer on."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self.replicas = replicas.options(stream=True)
        self.num_resumed = 0

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        parsed = parse(body)
        path, is_resumable = request.url.path, request.url.path in RESUMABLE
        if is_resumable and isinstance(parsed, dict) and parsed.get("stream") is True:
            body = json.dumps(with_seed(parsed)).encode()
        headers = [pair for pair in request.headers.items() if pair[0] not in NOT_PASSED]
        call = conversation_key(parsed), request.method, path, request.url.query, headers, body
        problem: Exception | None = None
        for _ in range(MAX_TRIES):
            answer = self.replicas.answer.remote(*call)
            try:
                status, passed = await begin(answer)
                if passed.get("content-type", "").startswith("text/event-stream"):
                    events = self._events(call, answer, is_resumable)
                    return StreamingResponse(events, status, passed)
                return Response(b"".join([piece async for piece in answer]), status, passed)
            except REPLICA_IS_GONE as error:
                problem = error
        return JSONResponse(error_body(problem), 503, {"retry-after": "1"})

    async def counts(self) -> dict[str, int]:
        return {"num_resumed": self.num_resumed}

    async def _events(
        self, call: tuple[Any, ...], answer: Any, is_resumable: bool
    ) -> AsyncGenerator[bytes, None]:
        """The events of `answer`, and after the death of its replica those of further ones."""
        delivered, num_tries = Delivered(), 1
        try:
            while True:
                try:
                    async for event in whole_events(answer):
                        if part := delivered.new_part(event):
                            yield part
                    return
                except REPLICA_IS_GONE as error:
                    num_tries += 1
                    if not (is_resumable and delivered.can_resume) or num_tries > MAX_TRIES:
                        yield b"data: " + json.dumps(error_body(error)).encode() + b"\n\n"
                        return
                answer = self.replicas.answer.remote(*call)
                self.num_resumed += 1
                delivered.resume()
        finally:
            answer.cancel()  # no effect on one that has ended


async def begin(answer: Any) -> tuple[int, dict[str, str]]:
    """Reads the status and the headers of an answer."""
    status, pairs = await anext(answer)
    headers = {name.decode(): value.decode() for name, value in pairs}
    return status, {name: value for name, value in headers.items() if name not in NOT_PASSED}


async def whole_events(answer: Any) -> AsyncGenerator[bytes, None]:
    """The server-sent events of an answer, one by one."""
    rest = b""
    async for piece in answer:
        if isinstance(piece, bytes):  # a repeated request's answer begins with its status
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                yield event + b"\n\n"


def parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None  # the replica refuses it


def error_body(error: Exception | None) -> dict[str, Any]:
    message = f"The replica of this request is gone: {type(error).__name__}."
    return {"error": {"message": message, "type": "server_error", "code": "replica_gone"}}


def build(arguments: Arguments) -> Application:
    """The application, for `serve run` and `serve deploy`."""
    replica = serve.deployment(
        name="Replica",
        ray_actor_options={"num_cpus": arguments.num_cpus},
        autoscaling_config={
            "min_replicas": arguments.min_replicas,
            "max_replicas": arguments.max_replicas,
            "target_ongoing_requests": arguments.target_ongoing_requests,
            **arguments.autoscaling,
        },
        max_ongoing_requests=arguments.max_ongoing_requests,
        max_replicas_per_node=arguments.max_replicas_per_node,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        graceful_shutdown_timeout_s=60,  # streams may finish when a replica is taken away
        health_check_period_s=5,
    )(Replica)
    ingress = serve.deployment(
        name="Ingress",
        ray_actor_options={"num_cpus": 0, "resources": arguments.ingress_resources},
        max_ongoing_requests=10_000,
    )(Ingress)
    return ingress.bind(replica.bind(arguments))
