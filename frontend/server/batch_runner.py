"""Runs the batches of a server: each line is a call of the handler that answers such a request over
HTTP, for an owner in the background of the engine.

Must not know: what a handler does, the formats of results.

Of several processes that use one store, the one that has its lock runs the batches. A line waits
while the server cannot answer it: while the model loads, or while the queue is full.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from starlette.requests import Request

from ...ipc.own_files import open_own
from ..batches.batch_run import BatchRun
from ..batches.formats import Answer
from ..batches.input_file import InputLine, InputRules
from ..batches.line_run import Gate
from ..batches.store import Store, StoredBatch
from .app import App
from .config import ServerConfig
from .http.call import HttpCall
from .http.errors import ENDS, ApiError
from .state import ServerState

logger = logging.getLogger(__name__)
POLL_S = 0.5  # between two looks for new batches
SWEEP_S = 600.0
MEASURE_S = 10.0  # between two sums of the files' sizes
MAX_ACTIVE = 8  # batches whose lines are answered in turn
MAX_REQUESTS = 1_000_000  # lines of a batch
LINE_ID = "batch_req_"  # begins the ids of requests, as those of lines begin
WEIGHT = 0.0  # in the background of the engine
# While others run, a step has few rows of lines, and what a line costs the server delays them.
BESIDE_OTHERS = 1
RETRY_S = 1.0  # where an error does not say when to try again
RETRIED = frozenset({429, 503})  # what the server says while it cannot answer yet


class LineCaller:
    """Answers lines through the handlers of an app, without a socket and without a key."""

    def __init__(self, app: App):
        self._app = app

    async def __call__(
        self, asked: InputLine, request_id: str, owner: str = "", weight: float = 1.0
    ) -> Answer:
        """`owner` and `weight` are those of the key. Tries again until there is an answer."""
        while True:
            answer, retry_after_s = await self._call(asked, request_id, owner, weight)
            if answer.status not in RETRIED:
                return answer
            await asyncio.sleep(retry_after_s)

    async def _call(
        self, asked: InputLine, request_id: str, owner: str, weight: float
    ) -> tuple[Answer, float]:
        body, state = bytes(asked.body), self._app.state
        sent = iter([{"type": "http.request", "body": body, "more_body": False}])
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        response = _Response()
        call = HttpCall(
            request_id,
            loop.time(),
            task,
            asked.url,
            tenant=owner,
            weight=weight,
            disconnected=loop.create_future(),  # which never happens
            send=response.send,
        )
        scope = {
            "type": "http",
            "method": "POST",
            "path": asked.url,
            "raw_path": asked.url.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "state": {"call": call},
            "app": self._app,
        }

        async def receive() -> dict:
            return next(sent)

        try:
            endpoint = self._app.endpoint("POST", asked.url)
            handler = await endpoint(Request(scope, receive, response.send))
            await handler(scope, receive, response.send)
        except ENDS:
            raise
        except BaseException as error:
            refusal = state.explain(error, f"a line of a batch ({asked.url})", request_id)
            answer = Answer(refusal.status, request_id, refusal.body(asked.url))
            return answer, refusal.retry_after_s or RETRY_S
        finally:
            state.meters.add_body_bytes(-call.num_body_bytes)
        return Answer(response.status, request_id, bytes(response.body)), RETRY_S


class _Response:
    """What a handler sends."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")


class BatchRunner:
    """`states` are those of the models. `check_model` raises ApiError for a name that is none of
    them. `is_ready` tells whether it knows them.
    """

    def __init__(
        self,
        app: App,
        config: ServerConfig,
        store: Store,
        states: Callable[[], Iterable[ServerState]],
        check_model: Callable[[str | None], object],
        is_ready: Callable[[], bool],
    ):
        self._answer = LineCaller(app)
        self._config = config
        self._store = store
        self._states = states
        self._check_model = check_model
        self._is_ready = is_ready
        self._gate = Gate(self._num_places)
        self._runs: dict[tuple[str, str], asyncio.Task[None]] = {}  # by owner and id
        self._given_up: set[tuple[str, str]] = set()  # after errors of this program
        self._is_full = False
        self._next_sweep = self._next_measure = 0.0

    async def run(self) -> None:
        """Runs until it is cancelled. What is unfinished then continues in a later run."""
        lock: int | None = None
        try:
            while True:
                try:
                    if lock is None:
                        lock = self._take_lock()
                    if lock is not None:
                        await self._look()
                except OSError as error:
                    logger.error("batches cannot be run: %s", error)
                    await asyncio.sleep(MEASURE_S)
                await asyncio.sleep(POLL_S)
        finally:
            for run in self._runs.values():
                run.cancel()
            await asyncio.gather(*self._runs.values(), return_exceptions=True)
            if lock is not None:
                os.close(lock)

    def _take_lock(self) -> int | None:
        """Returns the locked file, or None while another process has it or nothing is stored."""
        if not self._store.root.is_dir():
            return None
        lock = open_own(self._store.root / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    async def _look(self) -> None:
        now = time.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_S
            await asyncio.to_thread(self._store.sweep)
        if self._runs and now >= self._next_measure:
            self._next_measure = now + MEASURE_S
            self._note_size(await asyncio.to_thread(self._store.used_bytes))
        for name, run in list(self._runs.items()):
            if run.done():
                del self._runs[name]
                if (error := run.exception()) is not None:
                    logger.error("batch %s is left", name[1], exc_info=error)
                    self._given_up.add(name)
        if self._is_ready():
            self._start_due()

    def _note_size(self, num_bytes: int) -> None:
        is_full = num_bytes >= self._store.max_bytes
        if is_full and not self._is_full:
            logger.warning("batches wait: their files have %d bytes, the most", num_bytes)
        self._is_full = is_full

    def _start_due(self) -> None:
        """Starts the oldest batch of the owner that has fewest running, while there is room."""
        waiting = [
            name
            for name in self._store.unfinished()
            if name not in self._runs and name not in self._given_up
        ]
        num_running = Counter(owner for owner, _ in self._runs)
        while waiting and len(self._runs) < MAX_ACTIVE:
            name = min(waiting, key=lambda name: num_running[name[0]])  # the first of these
            waiting.remove(name)
            owner, id = name
            kind = "anthropic" if id.startswith("msg") else "openai"
            batch = self._store.batch(owner, id, kind)
            if batch is None:
                continue
            num_running[owner] += 1
            self._runs[name] = asyncio.create_task(self._run_of(batch).run())

    def _run_of(self, batch: StoredBatch) -> BatchRun:
        owner = f"batch:{batch.owner}"

        async def answer(asked: InputLine, request_id: str) -> Answer:
            return await self._answer(asked, request_id, owner, WEIGHT)

        rules = InputRules(
            batch.urls, self._problem_of_model, self._config.max_body_bytes, MAX_REQUESTS
        )
        return BatchRun(self._store, batch, rules, answer, self._gate)

    def _problem_of_model(self, name: str | None) -> str | None:
        try:
            self._check_model(name)
        except ApiError as error:
            return error.message
        return None

    # ------------------------------------------------------------ beside other requests

    def _num_places(self) -> int:
        if self._is_full:
            return 0
        states = list(self._states())
        if any(_has_others(state) for state in states):
            return BESIDE_OTHERS
        if (most := self._config.max_batch_requests) is not None:
            return most
        engines = [state.engine for state in states if state.engine is not None]
        return max((engine.config.num_seqs_at_once for engine in engines), default=1)


def _has_others(state: ServerState) -> bool:
    """Whether requests run that are no lines of batches, also in other processes."""
    own = state.running_ids
    return any(LINE_ID not in one for one in own) or state.num_running > len(own)
