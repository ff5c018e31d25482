"""Collects the rows for each client (new tokens, refusals, aborts) into one EngineCoreOutputs.

Must not know: the scheduler, sockets, or what a client does with its rows.

Rows leave after each step, or, for a client that requested fewer and larger messages, the tokens of
several steps together:

    step 1: a b c ──▶ sent
    step 2: a b c held
    step 3: a b c held, c ends ──▶ c sent, three tokens
    step 4: a b ──▶ sent, three tokens each

A message costs the threads on its way nearly the same with four tokens as with one, and so does a
row its client.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

import msgspec

from ..ipc.counters import SchedulerStats
from ..ipc.messages import (
    Array,
    EngineCoreOutputs,
    EngineCoreRequest,
    Finished,
    FinishReason,
    Pooled,
    PromptLogprobs,
    RequestTiming,
    TokenLogprobs,
)
from ..ipc.step_messages import SlotLogprobs, SlotPooled, SlotPromptLogprobs
from .request import Request

# Between two messages. Holding rows for less time is not worth it; more could be noticed.
LEAST_GAP_S, MAX_GAP_S = 0.005, 0.05


class ClientRows(msgspec.Struct):
    """The columns of one client's next message, which have the names of EngineCoreOutputs."""

    request_ids: list[str] = []
    first_indices: list[int] = []
    num_tokens: list[int] = []
    token_ids: list[int] = []
    finished: list[Finished] = []
    logprobs: list[TokenLogprobs] = []
    num_cached_tokens: list[tuple[int, int]] = []
    prompt_logprobs: list[PromptLogprobs] = []
    timings: list[RequestTiming] = []
    step_times: list[float] = []
    token_steps: list[int] = []
    pooled: list[Pooled] = []

    def add(self, request_id: str, first_index: int, token_ids: list[int]) -> None:
        self.request_ids.append(request_id)
        self.first_indices.append(first_index)
        self.num_tokens.append(len(token_ids))
        self.token_ids += token_ids

    def add_admitted(self, request: EngineCoreRequest) -> None:
        """A row without a token: its grammar is checked, and steps compute the request."""
        self.add(request.request_id, len(request.resume_tokens), [])

    # Each of these extends the row that was added last.

    def finish(
        self,
        reason: FinishReason,
        stop_reason: int | None = None,
        error: str | None = None,
        parameter: str | None = None,
    ) -> None:
        self.finished.append(
            Finished(len(self.request_ids) - 1, reason, stop_reason, error, parameter)
        )

    def add_logprobs(self, logprobs: SlotLogprobs, num_tokens: int) -> None:
        """Adds those of the first `num_tokens` tokens: a request may end before its last sampled
        token.
        """
        columns = (
            _head(array, num_tokens)
            for array in (logprobs.token_ids, logprobs.logprobs, logprobs.ranks)
        )
        self.logprobs.append(TokenLogprobs(len(self.request_ids) - 1, *columns))

    def add_prompt_logprobs(self, logprobs: SlotPromptLogprobs) -> None:
        row = len(self.request_ids) - 1
        self.prompt_logprobs.append(
            PromptLogprobs(
                row, logprobs.first_index, logprobs.token_ids, logprobs.logprobs, logprobs.ranks
            )
        )

    def add_pooled(self, pooled: SlotPooled) -> None:
        self.pooled.append(Pooled(len(self.request_ids) - 1, pooled.values))

    def add_num_cached_tokens(self, num_cached_tokens: int) -> None:
        self.num_cached_tokens.append((len(self.request_ids) - 1, num_cached_tokens))

    def add_timing(self, request: Request, now: float) -> None:
        """`now`: when its last token came, or when it ended without another."""
        self.timings.append(request.timing(len(self.request_ids) - 1, now))

    def urgent_ids(self) -> list[str]:
        """The requests whose rows have more than tokens and log-probabilities: a first token,
        an end.
        """
        news = {
            entry.row
            for column in (self.finished, self.prompt_logprobs, self.timings)
            for entry in column
        }
        news.update(row for row, _ in self.num_cached_tokens)
        return list(dict.fromkeys(self.request_ids[row] for row in sorted(news)))


def _head(array: Array, num_rows: int) -> Array:
    """The first rows of an array, without a copy."""
    if num_rows >= array.shape[0]:
        return array
    data = memoryview(array.data).cast("B")
    return Array(
        array.dtype, (num_rows, *array.shape[1:]), data[: len(data) // array.shape[0] * num_rows]
    )


@dataclass(slots=True)
class HeldRow:
    """The tokens of one request from several steps."""

    first_index: int
    token_ids: list[int] = field(default_factory=list)
    # for each token: its step's index in Pace._step_times
    token_steps: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Pace:
    """The pace of one client that requested about `rows_per_s` rows.

    n rows leave together, not before n / rows_per_s seconds after the last ones. A row with more
    than tokens (a first token, an end) leaves at once, with the held rows of its request.
    """

    def __init__(self, rows_per_s: int):
        self._rows_per_s = rows_per_s
        self._held: dict[str, HeldRow] = {}  # by request id
        self._step_times: list[float] = []  # of the steps since all rows left
        self._sent_at = float("-inf")

    def __bool__(self) -> bool:
        """Whether rows are held."""
        return bool(self._held)

    def change(self, rows_per_s: int) -> None:
        """The client requests another pace. Rows that are held follow it, too."""
        self._rows_per_s = rows_per_s

    def take(self, rows: ClientRows, now: float, *, everything: bool) -> ClientRows | None:
        """What leaves after a step that ended at `now` and gave `rows`; None for nothing.

        `everything`: all rows leave.
        """
        gap_s = (
            min(MAX_GAP_S, max(len(rows.request_ids), len(self._held)) / self._rows_per_s)
            if self._rows_per_s
            else 0.0
        )
        is_due = everything or gap_s < LEAST_GAP_S or now - self._sent_at >= gap_s
        if is_due:
            self._sent_at = now
            if not self._held:
                return rows
        self._hold(rows, now)
        leaving = list(self._held) if is_due else rows.urgent_ids()
        sent = self._release(leaving, rows) if leaving else None
        if is_due:
            self._step_times = []
        return sent

    def _hold(self, rows: ClientRows, now: float) -> None:
        held, step, end = self._held, len(self._step_times), 0
        self._step_times.append(now)
        for request_id, first_index, num_tokens in zip(
            rows.request_ids, rows.first_indices, rows.num_tokens
        ):
            start, end = end, end + num_tokens
            row = held.get(request_id)
            if row is None:
                row = held[request_id] = HeldRow(first_index)
            row.token_ids += rows.token_ids[start:end]
            row.token_steps += [step] * num_tokens
        for logprobs in rows.logprobs:
            held[rows.request_ids[logprobs.row]].logprobs.append(logprobs)

    def _release(self, request_ids: list[str], rows: ClientRows) -> ClientRows:
        """The held rows of these requests, with everything else of the step that gave `rows`."""
        index_of = {request_id: index for index, request_id in enumerate(request_ids)}

        def moved(entry):
            return msgspec.structs.replace(entry, row=index_of[rows.request_ids[entry.row]])

        sent = ClientRows(
            finished=[*map(moved, rows.finished)],
            timings=[*map(moved, rows.timings)],
            prompt_logprobs=[*map(moved, rows.prompt_logprobs)],
            pooled=[*map(moved, rows.pooled)],
            num_cached_tokens=[
                (index_of[rows.request_ids[row]], number) for row, number in rows.num_cached_tokens
            ],
            step_times=self._step_times.copy(),
        )
        for index, request_id in enumerate(request_ids):
            row = self._held.pop(request_id)
            sent.add(request_id, row.first_index, row.token_ids)
            sent.token_steps += row.token_steps
            if row.logprobs:
                sent.logprobs.append(_joined(index, row.logprobs))
        return sent


def _joined(row: int, parts: list[TokenLogprobs]) -> TokenLogprobs:
    """Joins the rows of one request."""
    columns = zip(*((part.token_ids, part.logprobs, part.ranks) for part in parts))
    return TokenLogprobs(row, *map(_below_each_other, columns))


def _below_each_other(arrays: tuple[Array, ...]) -> Array:
    first = arrays[0]
    if len(arrays) == 1:
        return first
    return Array(
        first.dtype,
        (sum(array.shape[0] for array in arrays), *first.shape[1:]),
        b"".join(array.data for array in arrays),
    )


class OutputRows:
    """Rows by client, clients in the order of their first row."""

    def __init__(self, epoch: int = 0, engine_index: int = 0):
        self.epoch, self.engine_index = epoch, engine_index
        self.now = 0.0  # when the model last ran; see stamp
        # since rows were last taken
        self._by_client: defaultdict[int, ClientRows] = defaultdict(ClientRows)
        self.paces: dict[int, Pace] = {}  # of the clients that requested one

    def __bool__(self) -> bool:
        return bool(self._by_client or (self.paces and self.holds_any))

    @property
    def holds_any(self) -> bool:
        """Whether rows of earlier steps wait for those of the next."""
        return any(self.paces.values())

    def pace(self, client_index: int, rows_per_s: int) -> None:
        """Sets a client's pace; see PaceOutputs."""
        self.paces.setdefault(client_index, Pace(rows_per_s)).change(rows_per_s)

    def stamp(self) -> None:
        """Records when the model ran, for its rows. The clock is read once per step."""
        self.now = time.monotonic()

    def of(self, client_index: int) -> ClientRows:
        return self._by_client[client_index]

    def drop(self, client_index: int) -> None:
        """The client is gone: discards its rows."""
        self._by_client.pop(client_index, None)
        self.paces.pop(client_index, None)

    def take(
        self, stats: SchedulerStats | None, *, everything: bool = True
    ) -> dict[int, EngineCoreOutputs] | None:
        """The messages that are due; None if there are none.

        Without `everything`, clients with a pace may get theirs later.
        """
        by_client, self._by_client = self._by_client, defaultdict(ClientRows)
        now, self.now = self.now or time.monotonic(), 0.0
        if self.paces:
            self._keep_pace(by_client, now, everything=everything)
        return {
            client_index: EngineCoreOutputs(
                epoch=self.epoch,
                engine_index=self.engine_index,
                stats=stats,
                timestamp=now,
                **msgspec.structs.asdict(rows),
            )
            for client_index, rows in by_client.items()
        } or None

    def _keep_pace(self, by_client: dict[int, ClientRows], now: float, *, everything: bool) -> None:
        """Replaces the new rows of clients with a pace by those that are due."""
        for client_index, pace in self.paces.items():
            if client_index in by_client or (everything and pace):
                rows = by_client.pop(client_index, None) or ClientRows()
                due = pace.take(rows, now, everything=everything)
                if due is not None:
                    by_client[client_index] = due
