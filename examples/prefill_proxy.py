"""A proxy before two servers: one computes prompts, the other continues them with the blocks that
it gets from the first one. Needs httpx2.

quire serve --port 8001 --kv-transfer-config '{"kv_role": "kv_producer", "endpoint": "ipc://kv"}' &
quire serve --port 8002 --kv-transfer-config '{"kv_role": "kv_consumer", "peers": ["ipc://kv"]}' &
python examples/prefill_proxy.py --port 8000
"""

import argparse
import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

PROMPT_ROUTES = ("/v1/completions", "/v1/chat/completions")
LENGTHS = ("max_completion_tokens", "min_tokens", "best_of", "stream_options")
OF_CONNECTION = {"host", "connection", "content-length", "transfer-encoding", "keep-alive"}
CLIENT_HAS_LEFT = 499  # a status that nobody reads
PAUSE_S = 5.0  # without the prefill server, after it has failed
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]

logger = logging.getLogger("prefill_proxy")


class Proxy:
    def __init__(self, prefill: str, decode: str, prefill_timeout_s: float):
        self._prefill_timeout = httpx.Timeout(prefill_timeout_s, connect=1.0)
        limits = httpx.Limits(max_connections=None)
        self._prefill = httpx.AsyncClient(base_url=prefill, limits=limits)
        self._decode = httpx.AsyncClient(base_url=decode, limits=limits, timeout=None)
        self._paused_until = 0.0

    async def answer(self, request: Request) -> Response:
        """The answer. When the client leaves, its request ends at either server, which aborts it as
        soon as the connection is closed.
        """
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=CLIENT_HAS_LEFT)
        answering = asyncio.ensure_future(self._answer(request, body))
        leaving = asyncio.ensure_future(request.receive())  # nothing else comes after the body
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            answering.cancel()  # without effect if there is an answer
        try:
            return await answering
        except asyncio.CancelledError:
            return Response(status_code=CLIENT_HAS_LEFT)

    async def _answer(self, request: Request, body: bytes) -> Response:
        """The decode server's answer, once the prefill server has computed the prompt."""
        headers = _passed(request.headers.items())
        if request.method == "POST" and request.url.path in PROMPT_ROUTES:
            await self._compute_prompt(request.url.path, headers, body)
        path = httpx.URL(path=request.url.path, query=request.url.query.encode())
        asked = self._decode.build_request(request.method, path, headers=headers, content=body)
        try:
            answer = await self._decode.send(asked, stream=True)
        except httpx.TransportError as error:
            return JSONResponse({"error": {"message": f"no decode server: {error}"}}, 502)

        async def pieces() -> AsyncIterator[bytes]:
            async with contextlib.aclosing(answer):  # a client that leaves ends its request
                async for piece in answer.aiter_raw():
                    yield piece

        return StreamingResponse(pieces(), answer.status_code, _passed(answer.headers.items()))

    async def _compute_prompt(self, path: str, headers: dict[str, str], body: bytes) -> None:
        """Without the prefill server, or for a body that is refused, the decode server goes on."""
        if time.monotonic() < self._paused_until:
            return
        try:
            of_prompt = _of_prompt(json.loads(body))
        except ValueError:  # it may be compressed
            return
        try:
            answer = await self._prefill.post(
                path, headers=headers, json=of_prompt, timeout=self._prefill_timeout
            )
            failure = f"status {answer.status_code}" if answer.status_code >= 500 else ""
        except httpx.TransportError as error:
            failure = f"{type(error).__name__} {error}"
        if failure:
            self._paused_until = time.monotonic() + PAUSE_S
            logger.warning("no prefill server for %.0f s: %s", PAUSE_S, failure)

    async def close(self) -> None:
        await self._prefill.aclose()
        await self._decode.aclose()


def _of_prompt(body: Any) -> dict[str, Any]:
    """The same request for one token. Raises ValueError."""
    if not isinstance(body, dict):
        raise ValueError("it is no object")
    kept = {name: value for name, value in body.items() if name not in LENGTHS}
    return kept | {"max_tokens": 1, "n": 1, "stream": False}


def _passed(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers if name.lower() not in OF_CONNECTION}


def make_app(proxy: Proxy) -> Starlette:
    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await proxy.close()

    return Starlette(
        routes=[Route("/{path:path}", proxy.answer, methods=METHODS)], lifespan=lifespan
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", default="http://127.0.0.1:8001")
    parser.add_argument("--decode", default="http://127.0.0.1:8002")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill-timeout-s", type=float, default=60.0)
    args = parser.parse_args()
    proxy = Proxy(args.prefill, args.decode, args.prefill_timeout_s)
    uvicorn.run(make_app(proxy), port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
