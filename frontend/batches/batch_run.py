"""Runs one batch of the store from its status to its end.

Must not know: HTTP, how a line is answered, other batches.

    validating ──▶ in_progress ──▶ finalizing ──▶ completed, expired
        └──▶ failed       └──▶ cancelling ──────▶ cancelled

Each status is on disk before its work begins, and the work of each can be done again: a process
that ends in the middle is continued by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from .formats import AnthropicFormat, LineFormat, OpenAIFormat
from .input_file import InputRules, LineError, check_input
from .line_run import AnswerLine, Gate, LineRun
from .results import Results
from .store import KEEP_S, Counts, Ending, Store, StoredBatch, StoredFile

logger = logging.getLogger(__name__)
LOOK_S = 0.25  # between two looks whether a batch is cancelled
RETRY_S = 5.0  # after a disk did not take a status
FORMATS: dict[str, LineFormat] = {"openai": OpenAIFormat(), "anthropic": AnthropicFormat()}


class BatchRun:
    """`rules` are those of the batch's lines."""

    def __init__(
        self, store: Store, batch: StoredBatch, rules: InputRules, answer: AnswerLine, gate: Gate
    ):
        self._store = store
        self._batch = batch
        self._rules = rules
        self._answer = answer
        self._gate = gate
        self._folder = store.batch_folder(batch)

    async def run(self) -> None:
        """Returns when the batch has ended. Cancelling leaves it to a later run."""
        batch = self._batch
        try:
            if batch.status == "validating":
                await self._validate()
            if not batch.has_ended:
                await self._answer_lines()
        except (OSError, ValueError) as error:
            if not self._folder.exists():  # it has been deleted
                return
            logger.error("batch %s failed: %s", batch.id, error)
            await self._fail([LineError("internal_error", "The batch's files cannot be read.")])

    async def _set(self, status: str) -> None:
        """Notes a status on disk, if necessary when the disk takes it again."""
        self._batch.status = status
        self._batch.times.setdefault(status, int(self._store.now()))
        await self._retried(lambda: self._store.save_batch(self._batch))

    async def _fail(self, errors: list[LineError]) -> None:
        self._batch.errors = errors
        await self._set("failed")

    async def _validate(self) -> None:
        path = self._folder / "input.jsonl"
        report = await asyncio.to_thread(check_input, path, self._rules)
        self._batch.num_lines = report.num_lines
        self._batch.counts = Counts(total=report.num_requests)
        if report.errors:
            return await self._fail(report.errors)
        await self._set("in_progress")

    async def _answer_lines(self) -> None:
        batch, folder = self._batch, self._folder
        paths = folder / "output.jsonl", folder / "errors.jsonl"
        # a journal of a million lines takes a second to read
        results = await asyncio.to_thread(
            Results, *paths, folder / "journal", batch.num_lines, batch.id
        )
        try:
            line_format = FORMATS[batch.kind]
            prefix = f"batch_req_{batch.id.rpartition('_')[2]}_"
            run = LineRun(
                folder / "input.jsonl", results, line_format, self._answer, self._gate, prefix
            )
            if batch.ending is None:
                batch.ending = await self._run_until_end(run, results)
                await self._set("cancelling" if batch.ending == "cancelled" else "finalizing")
            if batch.ending != "completed":
                await run.drop_rest("expired" if batch.ending == "expired" else "cancelled")
            self._count(results)
        finally:
            await asyncio.to_thread(results.close)
        await self._publish(*paths)
        await self._set(batch.ending)

    def _count(self, results: Results) -> bool:
        """Takes over the counts. Returns whether they have changed."""
        counts = Counts(self._batch.counts.total, **results.counts)
        has_changed = counts != self._batch.counts
        self._batch.counts = counts
        return has_changed

    async def _run_until_end(self, run: LineRun, results: Results) -> Ending:
        running = asyncio.create_task(run.run())
        try:
            while True:
                await asyncio.wait([running], timeout=LOOK_S)
                if running.done():
                    await running
                    return "completed"
                if self._store.cancel_requested(self._batch) is not None:
                    return "cancelled"
                if self._store.now() >= self._batch.expires_at:
                    return "expired"
                if not self._folder.exists():
                    raise FileNotFoundError(self._folder)
                if self._count(results):
                    with contextlib.suppress(OSError):  # these are only shown
                        await asyncio.to_thread(self._store.save_batch, self._batch)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _publish(self, output: Path, errors: Path) -> None:
        """Makes files of the results. Anthropic's stay with their batch."""
        batch = self._batch
        batch.has_output = output.stat().st_size > 0
        batch.has_errors = errors.stat().st_size > 0
        if batch.kind == "anthropic":
            return
        for path, id, ending in (
            (output, batch.output_file_id, "output"),
            (errors, batch.error_file_id, "error"),
        ):
            if not path.stat().st_size:
                continue
            created = int(self._store.now())
            expires_s = KEEP_S if batch.output_expires_s is None else batch.output_expires_s
            info = StoredFile(
                id=id,
                bytes=path.stat().st_size,
                created_at=created,
                expires_at=created + int(expires_s),
                filename=f"{batch.id}_{ending}.jsonl",
                purpose="batch_output",
            )
            await self._retried(partial(self._store.publish, batch.owner, path, info))

    async def _retried(self, work: Callable[[], None]) -> None:
        while True:
            try:
                return await asyncio.to_thread(work)
            except OSError as error:
                if not self._folder.exists():
                    raise
                logger.error("batch %s waits for the disk: %s", self._batch.id, error)
                await asyncio.sleep(RETRY_S)
