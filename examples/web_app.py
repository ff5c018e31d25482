"""An engine inside a web application: a Starlette app that streams completions.

python examples/web_app.py --port 8080
curl -N 'localhost:8080/complete?prompt=Once+upon+a+time'
"""

import argparse
import contextlib
import uuid
from collections.abc import AsyncIterator

import uvicorn
from quire import AsyncLLM, EngineArgs, InvalidParameterError, RequestOutputKind, SamplingParams
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[dict]:
    """The engine lives as long as the application. It is a child process, without a port."""
    engine = await AsyncLLM.start(EngineArgs())
    try:
        yield {"engine": engine}
    finally:
        await engine.wait_until_idle(timeout_s=10)
        await engine.shutdown_async()


async def complete(request: Request) -> Response:
    engine: AsyncLLM = request.state.engine
    prompt = request.query_params.get("prompt", "Once upon a time")
    params = SamplingParams(temperature=0, max_tokens=32, output_kind=RequestOutputKind.DELTA)
    outputs = engine.generate(prompt, params, request_id=str(uuid.uuid4()))
    try:
        first = await anext(outputs)  # a bad parameter is known here, before the headers are sent
    except InvalidParameterError as error:
        return JSONResponse({"error": str(error)}, status_code=400)

    async def text() -> AsyncIterator[str]:
        async with contextlib.aclosing(outputs):  # a client that leaves aborts its request
            yield first.outputs[0].text
            async for output in outputs:
                yield output.outputs[0].text

    return StreamingResponse(text(), media_type="text/plain")


async def health(request: Request) -> Response:
    engine: AsyncLLM = request.state.engine
    is_ready = await engine.is_responsive(timeout_s=1.0)
    return JSONResponse({"ready": is_ready}, status_code=200 if is_ready else 503)


app = Starlette(routes=[Route("/complete", complete), Route("/health", health)], lifespan=lifespan)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8080)
    uvicorn.run(app, port=parser.parse_args().port, log_level="warning")
