"""A scripted server for the page: streams, a simulated engine, loading, failing.

Must not know: an engine, a model, a browser.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import uvicorn
from quire.frontend.server.routes import page
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

BLOCK_SIZE, NUM_BLOCKS, STEP_S, MAX_MODEL_LEN = 16, 960, 0.012, 2048
CHUNK = 96  # prompt tokens of one request per step
ANSWERS = {  # by the message that selects it; every other message gets the story
    path.stem: path.read_text().rstrip("\n")
    for path in (Path(__file__).parent / "answers").glob("*.md")
} | {"short": "Yes.", "long": "The rain began before the lamps were lit. " * 200}


@dataclass
class Job:
    """One request of the simulated engine; its tokens move by one step every STEP_S."""

    id: str
    num_prompt: int
    num_cached: int
    max_tokens: int
    computed: int = 0
    output: int = 0
    blocks: list[int] = field(default_factory=list)
    state: str = "waiting"
    num_preemptions: int = 0
    ends_at: int = 10**9  # output tokens
    lora_name: str | None = None


class Mock:
    """The state that tests and screenshots set: `mode` ("ready", "loading", "dead", "locked") and
    `jobs`.
    """

    def __init__(self) -> None:
        self.mode = "ready"
        self.percent = 42.0
        self.has_chat_template = True
        self.reads_images = False
        self.num_queued = 0
        self.loras: list[str] = []
        self.adapters: dict = {}
        self.restarts: dict = {}  # further fields of /v1/engine/state
        self.num_blocks = NUM_BLOCKS
        self.num_finished = 0
        self.token_s = 0.012  # seconds between two chunks of a stream
        self.began = time.monotonic()
        self.last = self.began
        self.step = 0
        self.steps: list[list[float]] = []
        self.jobs: list[Job] = []
        self.finished: list[dict] = []
        self.bodies: list[dict] = []  # of chat and completion requests
        self.experts: dict[str, list] = {"layers": [], "tokens": []}
        self.paths: list[str] = []  # of all requests
        self.num_polls = 0
        self.num_aborted = 0
        self.blocks = ["-"] + ["."] * (NUM_BLOCKS - 1)
        self.counters = dict.fromkeys(
            [
                "num_running",
                "num_waiting",
                "num_swapped",
                "num_free_blocks",
                "num_blocks",
                "num_prompt_tokens",
                "num_generation_tokens",
                "prefix_cache_queries",
                "prefix_cache_hits",
                "num_preemptions",
                "num_recomputed_tokens",
                "num_finished_stop",
                "num_finished_length",
                "num_finished_abort",
                "num_finished_error",
            ],
            0,
        )

    def add(self, num_prompt: int, num_cached: int, max_tokens: int, name: str = "") -> Job:
        job = Job(
            f"{name or f'chatcmpl-{len(self.jobs) + self.step:04x}7be19ac0d2f4'}-{'0' * 16}",
            num_prompt,
            num_cached,
            max_tokens,
        )
        self.jobs.append(job)
        return job

    def advance(self) -> None:
        now = time.monotonic()
        while self.last + STEP_S < now:
            self.last += STEP_S
            if self.jobs:
                self._one_step()

    def _one_step(self) -> None:
        self.step += 1
        prefill = decode = 0
        for index, job in enumerate(list(self.jobs)):
            if index >= 10:
                continue
            if job.state == "waiting":
                job.state, job.computed = "running", job.num_cached
                self.counters["prefix_cache_queries"] += job.num_prompt
                self.counters["prefix_cache_hits"] += job.num_cached
                shared = [i for i, mark in enumerate(self.blocks) if mark in "cs"][
                    : job.num_cached // BLOCK_SIZE
                ]
                for i in shared:
                    self.blocks[i] = "s"
                job.blocks += shared
            if job.computed < job.num_prompt:
                if prefill < 2 * CHUNK:
                    n = min(CHUNK, job.num_prompt - job.computed)
                    job.computed, prefill = job.computed + n, prefill + n
            else:
                job.output, decode, job.computed = job.output + 1, decode + 1, job.computed + 1
            self._grow(job)
            if job.output >= min(job.max_tokens, job.ends_at):
                self._finish(job)
        self.counters["num_prompt_tokens"] += prefill
        self.counters["num_generation_tokens"] += decode
        execute = (
            0.0042 + 0.00021 * decode + 0.000035 * prefill + 0.0009 * ((self.step * 7919) % 13) / 13
        )
        num = min(len(self.jobs), 10)
        self.steps.append(
            [
                self.step,
                self.last,
                0.0003 + 0.00002 * num,
                execute,
                0.00035 + 0.00003 * num,
                prefill,
                decode,
                num,
                0,
            ]
        )

    def _grow(self, job: Job) -> None:
        while len(job.blocks) * BLOCK_SIZE < job.computed and (
            "." in self.blocks or "c" in self.blocks
        ):
            at = self.blocks.index("." if "." in self.blocks else "c")
            self.blocks[at] = "u"
            job.blocks.append(at)

    def _finish(self, job: Job, reason: str = "length") -> None:
        self.jobs.remove(job)
        for i in job.blocks:
            if self.blocks[i] in "us":
                self.blocks[i] = "c"
        self.counters[f"num_finished_{reason}"] += 1
        self.note(job, reason)

    def note(self, job: Job, reason: str) -> None:
        self.num_finished += 1

        self.finished.insert(
            0,
            {
                "id": job.id[:-17],
                "created": time.time(),
                "model": "quire-demo",
                "finish_reason": reason,
                "prompt_tokens": job.num_prompt,
                "completion_tokens": job.output,
                "cached_tokens": job.num_cached,
                "ttft_s": 0.0312 + 0.0001 * job.num_prompt,
                "e2e_s": job.output * STEP_S + 0.05,
                "num_preemptions": 0,
            },
        )

    def state(self, since: int) -> dict:
        self.num_polls += 1
        self.advance()
        running = [job for job in self.jobs if job.state == "running"]
        marks = {"used": "u", "shared": "s", "cached": "c", "free": "."}
        counts = {name: self.blocks.count(mark) for name, mark in marks.items()}
        counts["free"] += self.num_blocks - len(self.blocks)
        gauges = {"num_running": len(running), "num_waiting": len(self.jobs) - len(running)}
        gauges |= {
            "num_free_blocks": counts["free"] + counts["cached"],
            "num_blocks": self.num_blocks,
        }
        return {
            "time": time.monotonic(),
            "step": self.step,
            "steps": [step for step in self.steps if step[0] > since][-512:],
            "requests": [
                {
                    "request_id": job.id,
                    "state": job.state,
                    "num_prompt_tokens": job.num_prompt,
                    "num_computed_tokens": job.computed,
                    "num_output_tokens": job.output,
                    "max_tokens": job.max_tokens,
                    "num_blocks": len(job.blocks),
                    "num_cached_tokens": job.num_cached,
                    "num_preemptions": job.num_preemptions,
                    "priority": 0,
                    "lora_name": job.lora_name,
                    "queued_time": self.last,
                }
                for job in self.jobs
            ],
            "num_blocks": self.num_blocks,
            "blocks": "".join(self.blocks).rstrip("."),
            "blocks_per_cell": 1,
            "block_counts": counts,
            "counters": self.counters | gauges,
            "model": "quire-demo",
            "max_model_len": MAX_MODEL_LEN,
            "block_size": BLOCK_SIZE,
            "uptime_s": time.monotonic() - self.began,
            "num_queued": self.num_queued,
            "num_finished": self.num_finished,
            "has_chat_template": self.has_chat_template,
            "reads_images": self.reads_images,
            "loras": self.loras,
            "default_sampling_params": {
                "temperature": 0.7,
                "top_p": 0.9,
                "top_k": -1,
                "min_p": 0.0,
                "max_tokens": None,
                "repetition_penalty": 1.1,
            },
            "adapters": self.adapters,
            **self.restarts,
        }

    def refusal(self) -> Response | None:
        def error(status: int, message: str, code: str, **more: object) -> Response:
            headers = {"retry-after": "7"} if status == 503 else {}
            return JSONResponse(
                {
                    "error": {
                        "message": message,
                        "type": "server_error",
                        "param": None,
                        "code": code,
                        **more,
                    }
                },
                status,
                headers,
            )

        if self.mode == "loading":
            return error(
                503,
                f"The model is loading: load weights, {self.percent:.0f}%, about 7 s to go.",
                "model_loading",
            )
        if self.mode == "dead":
            return error(
                503, "The engine has stopped; the server's log has the cause.", "engine_dead"
            )
        if self.mode == "locked":
            return error(
                401,
                "You didn't provide an API key. Send it as 'Authorization: Bearer KEY'.",
                "invalid_api_key",
            )
        return None


def timings_of(summary: dict) -> dict:
    """Return the timings of a request in the format of /v1/requests/{id}."""
    step = 0.012
    chunks = [
        {
            "name": "prefill_chunk",
            "begin_s": 0.004 + i * step,
            "end_s": 0.004 + (i + 1) * step - 0.001,
            "step": 40 + i,
            "num_tokens": CHUNK,
        }
        for i in range(3)
    ]
    first = 0.004 + 3 * step
    decode = [
        {
            "name": "decode_step",
            "begin_s": first + i * step,
            "end_s": first + (i + 1) * step,
            "num_tokens": 1,
        }
        for i in range(summary["completion_tokens"] - 1)
    ]
    last = decode[-1]["end_s"] if decode else first
    events = [
        {"name": "queued", "begin_s": 0.0, "end_s": 0.004},
        {"name": "cached", "begin_s": 0.004, "num_tokens": summary["cached_tokens"]},
        *chunks,
        {"name": "first_token", "begin_s": first},
        {"name": "decode", "begin_s": first, "end_s": last},
        *decode,
        {"name": "finished", "begin_s": last},
    ]
    return summary | {
        "queued_s": 0.004,
        "prefill_s": first - 0.004,
        "decode_s": last - first,
        "num_recomputed_tokens": 0,
        "events": events,
    }


def make_app(mock: Mock):
    def guarded(handler):
        async def route(request: Request) -> Response:
            return mock.refusal() or await handler(request)

        return route

    async def state(request: Request) -> Response:
        return JSONResponse(mock.state(int(request.query_params.get("since", 0))))

    async def experts(request: Request) -> Response:
        return JSONResponse(mock.experts)

    async def recent(request: Request) -> Response:
        return JSONResponse(
            {"object": "list", "data": mock.finished[: int(request.query_params.get("limit", 100))]}
        )

    async def one(request: Request) -> Response:
        found = [summary for summary in mock.finished if summary["id"] == request.path_params["id"]]
        if not found:
            return JSONResponse(
                {"error": {"message": f"No request {request.path_params['id']!r} is remembered."}},
                404,
            )
        return JSONResponse(
            {"traceEvents": []} if request.url.path.endswith("/trace") else timings_of(found[0])
        )

    async def chat(request: Request) -> Response:
        body = await request.json()
        mock.bodies.append(body)
        asked = body["messages"][-1]["content"]
        if isinstance(asked, list):  # with pictures
            asked = "".join(part.get("text", "") for part in asked)
        if asked == "refuse":
            message = "temperature: must be between 0 and 2, got 9"
            return JSONResponse(
                {
                    "error": {
                        "message": message,
                        "type": "invalid_request_error",
                        "param": "temperature",
                        "code": "invalid_value",
                    }
                },
                400,
            )
        if asked == "busy":
            refusal = {"error": {"message": "The queue is full.", "code": "rate_limit_exceeded"}}
            return JSONResponse(refusal, 429, {"retry-after": "3"})
        mock.advance()
        job = mock.add(
            212, 128, body.get("max_tokens", 400), f"chatcmpl-{len(mock.bodies):06x}aa41c93e7d"
        )
        text = ANSWERS.get(asked, ANSWERS["story"])
        words = [word + " " for word in text.split(" ")]
        words[-1] = words[-1][:-1]
        job.ends_at = len(words)
        events = stream(mock, job, words, breaks=asked == "break", thinks=asked == "think")
        return StreamingResponse(
            events, media_type="text/event-stream", headers={"x-request-id": "req-unlike"}
        )

    async def completions(request: Request) -> Response:
        """Answer several prompts in one call, as the page's burst sends them, or stream one."""
        body = await request.json()
        mock.bodies.append(body)
        mock.advance()
        if body.get("stream"):
            job = mock.add(9, 0, body["max_tokens"], f"cmpl-{len(mock.bodies):06x}cc41c93e7d")
            words = [" and", " so", " *it*", " went", " on."]
            return StreamingResponse(
                stream(mock, job, words, completes=True), media_type="text/event-stream"
            )
        jobs = [
            mock.add(120, 96, body["max_tokens"], f"cmpl-{len(mock.bodies):06x}bb41c93e7d-{i}")
            for i in range(len(body["prompt"]))
        ]
        while any(job in mock.jobs for job in jobs):
            if await request.is_disconnected():
                mock.num_aborted += len(jobs)
                for job in [job for job in jobs if job in mock.jobs]:
                    mock._finish(job, "abort")
            await asyncio.sleep(0.02)
            mock.advance()
        return JSONResponse({"choices": []})

    routes = [
        *page.routes(SimpleNamespace(server_config=SimpleNamespace(page=True))),
        Route("/v1/engine/state", guarded(state)),
        Route("/v1/engine/experts", guarded(experts)),
        Route("/v1/requests", guarded(recent)),
        Route("/v1/requests/{id}", guarded(one)),
        Route("/v1/requests/{id}/trace", guarded(one)),
        Route("/v1/chat/completions", guarded(chat), methods=["POST"]),
        Route("/v1/completions", guarded(completions), methods=["POST"]),
    ]
    app = Starlette(routes=routes)

    async def behind_a_proxy(scope, receive, send) -> None:
        """Also answer below /some/prefix, like a proxy that strips its prefix."""
        if scope["type"] == "http":
            mock.paths.append(scope["path"])
            scope = scope | {"path": scope["path"].removeprefix("/some/prefix") or "/"}
        await app(scope, receive, send)

    return behind_a_proxy


async def stream(
    mock: Mock,
    job: Job,
    words: list[str],
    *,
    breaks: bool = False,
    thinks: bool = False,
    completes: bool = False,
):
    """Stream chunks with a comment among them, in the format of the chat API. `breaks`: an error in
    the middle. `thinks`: reasoning first. `completes`: chunks of the completions API.
    """

    def data(value: object) -> str:
        return f"data: {json.dumps(value)}\n\n"

    def event(delta: dict, **more: object) -> str:
        said = {"text": delta.get("content", "")} if completes else {"delta": delta}
        choice = {"index": 0, "finish_reason": None} | said | more
        return data({"id": job.id[:-17], "choices": [choice], "usage": None})

    try:
        yield event({"role": "assistant", "content": ""})
        if thinks:
            yield event({"reasoning_content": "One moment."})
        yield ": keep-alive\n\n"
        for i, word in enumerate(words):
            if breaks and i == 5:
                yield data({"error": {"message": "The engine failed in the middle."}})
                return
            await asyncio.sleep(mock.token_s)
            yield event({"content": word})
        yield event({}, finish_reason="stop")
        usage = {
            "prompt_tokens": job.num_prompt,
            "completion_tokens": len(words),
            "prompt_tokens_details": {"cached_tokens": job.num_cached},
        }
        yield f"data: {json.dumps({'id': job.id[:-17], 'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"
        job.output = len(words)
    except (asyncio.CancelledError, GeneratorExit):
        mock.num_aborted += 1
        raise
    finally:
        if job in mock.jobs:
            mock._finish(job, "stop" if job.output == len(words) else "abort")


@contextmanager
def serving(mock: Mock):
    """Return the address of a server for `mock` in a thread of this process."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # connections before the thread has started wait
    server = uvicorn.Server(
        uvicorn.Config(make_app(mock), log_level="warning", ws="none", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
