"""Streaming clients with mixed requests, whose answers are compared byte for byte."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from quire.frontend.bench.http_client import Failure, HttpClient
from quire.frontend.bench.sse import SseParser

NUM_CLIENTS = 32
TIMEOUT_S = 600.0  # of one answer
ON_ITS_WAY_S = 0.5  # chunks that arrive so soon after a death may have been on their way
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 40},
                "days": {"type": "integer"},
            },
            "required": ["city", "days"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 60, "maxLength": 120},
        "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 20, "maxItems": 30},
    },
    "required": ["name", "numbers"],
    "additionalProperties": False,
}
LOGPROBS = {"logprobs": 3, "temperature": 0.8}
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 700},
    "seeded": {"temperature": 1.0, "max_tokens": 600},
    "unseeded": {"temperature": 1.0, "max_tokens": 400, "ignore_eos": True},
    "penalties": PENALTIES | {"max_tokens": 500, "ignore_eos": True},
    "logit bias": {"logit_bias": {"300": 2.5, "5": -100}, "max_tokens": 300, "ignore_eos": True},
    "regex": {"structured_outputs": {"regex": "[a-z]{80,200} [0-9]{40,90}"}, "max_tokens": 400},
    "schema": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 500},
    "n=2": {"n": 2, "temperature": 0.9, "max_tokens": 400, "ignore_eos": True},
    "logprobs": LOGPROBS | {"max_tokens": 300, "ignore_eos": True},
    "n=2 with logprobs": LOGPROBS | {"n": 2, "max_tokens": 200, "ignore_eos": True},
    "greedy logprobs": {"logprobs": 5, "temperature": 0, "max_tokens": 300},
    "min_tokens": {"min_tokens": 300, "max_tokens": 400, "temperature": 0},
    "stop": {"stop": [" dragon", "princess"], "max_tokens": 900, "ignore_eos": True},
    "bad words": {"bad_words": [" the"], "max_tokens": 400, "ignore_eos": True},
    "echo": {"echo": True, "logprobs": 1, "max_tokens": 100, "ignore_eos": True},
    "long prompt": {"max_tokens": 300, "ignore_eos": True},
    "short": {"max_tokens": 1},
    "top": {"top_p": 0.8, "top_k": 20, "min_p": 0.02, "max_tokens": 500, "ignore_eos": True},
    "chat": {"max_tokens": 300, "logprobs": True, "top_logprobs": 2},
    "tools": {"tools": [WEATHER], "tool_choice": "auto", "max_tokens": 300},
    "forced tool": {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 300},
    "chat schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        "max_tokens": 500,
    },
}
OPENINGS = ["Once upon a time", "One day, a little", "The old king", "In the forest"]
CHAT_KINDS = {"chat", "tools", "forced tool", "chat schema"}


@dataclass(frozen=True)
class Job:
    """A request whose answer is known. is_exact: the same each time; else only its length is."""

    name: str
    path: str
    body: bytes
    is_exact: bool


def mixed_jobs(seed: int, number: int = 64, *, length: float = 1.0) -> list[Job]:
    """length: of the answers, relative to KINDS."""
    rng, jobs = random.Random(seed), []
    for i, kind in zip(range(number), itertools.cycle(KINDS)):
        opening = rng.choice(OPENINGS)
        body = {"seed": rng.randrange(2**31), "stream": True} | KINDS[kind]
        for name in ("max_tokens", "min_tokens"):
            if name in body:
                body[name] = max(1, int(length * body[name]))
        body["stream_options"] = {"include_usage": True}
        if kind == "unseeded":
            del body["seed"]
        if kind in CHAT_KINDS:
            body["messages"] = [
                {"role": "user", "content": f"{opening}: what is the weather in Oslo? ({i})"}
            ]
        elif kind == "long prompt":
            body["prompt"] = [rng.randrange(5, 2000) for _ in range(rng.randint(1000, 3000))]
        else:
            body["prompt"] = f"{opening} there was number {i},"
        path = "/v1/chat/completions" if kind in CHAT_KINDS else "/v1/completions"
        jobs.append(Job(f"{kind} {i}", path, json.dumps(body).encode(), kind != "unseeded"))
    rng.shuffle(jobs)
    return jobs


@dataclass
class Answer:
    """One stream: what its chunks add up to, and when they came."""

    failure: str | None = None
    choices: dict[int, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    usage: dict[str, Any] | None = None
    other: list[Any] = field(default_factory=list)
    is_done: bool = False
    began: float = 0.0
    times: list[float] = field(default_factory=list)

    def take(self, event: bytes) -> None:
        if event == b"[DONE]":
            self.is_done = True
            return
        chunk = json.loads(event)
        if "error" in chunk:
            self.failure = json.dumps(chunk["error"])
            return
        for choice in chunk.pop("choices", []):
            _add(self.choices[choice.pop("index")], choice)
        self.usage = chunk.get("usage") or self.usage

    def content(self) -> dict[str, Any]:
        """What must be the same each time: not ids, dates, nor how many tokens were cached."""
        usage = dict(self.usage or {})
        usage.pop("prompt_tokens_details", None)
        return {"choices": {i: self.choices[i] for i in sorted(self.choices)}, "usage": usage}

    def problem(self, expected: Answer, job: Job) -> str | None:
        """How this answer differs from that of an undisturbed engine."""
        if self.failure is not None:
            return f"{job.name}: failed: {self.failure}"
        if not self.is_done:
            return f"{job.name}: the stream ended early"
        mine, others = self.content(), expected.content()
        if not job.is_exact:
            mine, others = mine["usage"], others["usage"]
        return None if mine == others else f"{job.name}: {mine} is not {others}"


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Adds a chunk's fields to those before: texts and lists are joined, tool calls by index."""
    for key, value in part.items():
        if value is None:
            whole.setdefault(key, None)
        elif isinstance(value, dict):
            if not isinstance(whole.get(key), dict):
                whole[key] = {}
            _add(whole[key], value)
        elif key == "tool_calls":
            calls = whole.setdefault(key, {})
            for call in value:
                call.pop("id", None)
                _add(calls.setdefault(call.pop("index"), {}), call)
        elif isinstance(value, (str, list)) and whole.get(key) and key not in ("role", "type"):
            whole[key] = whole[key] + value
        else:
            whole[key] = value


async def ask(client: HttpClient, job: Job, answer: Answer) -> None:
    """Sends the job; its answer comes into `answer`."""
    answer.began, parser = time.monotonic(), SseParser()

    def on_data(data: bytes, now: float) -> None:
        events = parser.feed(data)  # none, if these were comments that keep the connection open
        if events:
            answer.times.append(time.monotonic())
        for event in events:
            answer.take(event)

    try:
        reply = await client.exchange("POST", job.path, job.body, on_data)
        if reply.status != 200:
            answer.failure = f"HTTP {reply.status}: {bytes(reply.body)[:500].decode()}"
    except Failure as failure:
        answer.failure = str(failure)


async def undisturbed(url: str, jobs: list[Job]) -> dict[str, Answer]:
    """Each job's answer. Fails if one fails."""
    client, limit = HttpClient(url, {}, TIMEOUT_S), asyncio.Semaphore(NUM_CLIENTS)

    async def one(job: Job) -> tuple[str, Answer]:
        async with limit:
            await ask(client, job, answer := Answer())
        assert answer.failure is None and answer.is_done, (job, answer.failure)
        return job.name, answer

    return dict(await asyncio.gather(*(one(job) for job in jobs)))


class Traffic:
    """Clients that send jobs, one after the other, until `stop`; and what went wrong."""

    def __init__(self, url: str, jobs: list[Job], expected: dict[str, Answer], seed: int):
        self._client = HttpClient(url, {}, TIMEOUT_S)
        self._jobs, self._expected, self._rng = jobs, expected, random.Random(seed)
        self.problems: list[str] = []
        self.answers: list[Answer] = []
        # Deaths by signals other than SIGKILL. A request that was there at two of them may look
        # like their cause, and then ends with an error that says so.
        self.deaths: list[float] = []
        self.num_convicted = 0
        self._is_over = asyncio.Event()
        self._tasks: list[asyncio.Task] = []

    def start(self, num_clients: int = NUM_CLIENTS) -> None:
        self._tasks = [asyncio.create_task(self._run()) for _ in range(num_clients)]

    async def _run(self) -> None:
        while not self._is_over.is_set():
            job = self._rng.choice(self._jobs)
            self.answers.append(answer := Answer())
            await ask(self._client, job, answer)
            num_deaths = sum(answer.began <= death for death in self.deaths)
            if num_deaths >= 2 and "engine_crash" in (answer.failure or ""):
                self.num_convicted += 1
            elif (problem := answer.problem(self._expected[job.name], job)) is not None:
                self.problems.append(problem)

    async def stop(self) -> None:
        """Lets each client finish its request."""
        self._is_over.set()
        await asyncio.gather(*self._tasks)
        self._client.close()


def gaps(answers: list[Answer], deaths: list[float]) -> list[float]:
    """For each of these deaths and each stream that was open: the longest time without a chunk that
    began with the death or soon after it.
    """
    found = []
    for death in deaths:
        for answer in answers:
            times = [answer.began, *answer.times]
            silences = [
                after - max(before, death)
                for before, after in itertools.pairwise(times)
                if before < death + ON_ITS_WAY_S and after > death
            ]
            if answer.began <= death and silences:
                found.append(max(silences))
    return found
