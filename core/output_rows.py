"""Gathers the rows that each client is owed (new tokens, refusals, aborts) until they leave as one EngineCoreOutputs per client.
May know: the messages, client indices, a request's account of its time.
Must not know: the scheduler, sockets, or what a client does with its rows."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..ipc.messages import (
    Array,
    EngineCoreOutputs,
    Finished,
    FinishReason,
    PromptLogprobs,
    RequestTiming,
    SchedulerStats,
    SlotLogprobs,
    SlotPromptLogprobs,
    TokenLogprobs,
)  # fmt: skip
from .request import Request


@dataclass(slots=True)
class ClientRows:
    """The columns of one client's next message; see EngineCoreOutputs."""

    request_ids: list[str] = field(default_factory=list)
    first_indices: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: list[tuple[int, int]] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    timings: list[RequestTiming] = field(default_factory=list)

    def add(self, request_id: str, first_index: int, token_ids: list[int]) -> None:
        self.request_ids.append(request_id)
        self.first_indices.append(first_index)
        self.num_tokens.append(len(token_ids))
        self.token_ids += token_ids

    # Each of these adds to the row that was added last.

    def finish(
        self, reason: FinishReason, stop_reason: int | None = None, error: str | None = None, parameter: str | None = None
    ) -> None:
        self.finished.append(Finished(len(self.request_ids) - 1, reason, stop_reason, error, parameter))

    def add_logprobs(self, logprobs: SlotLogprobs, num_tokens: int) -> None:
        """Of the first `num_tokens` tokens: a request may end before the last of those that were sampled."""
        columns = (_head(array, num_tokens) for array in (logprobs.token_ids, logprobs.logprobs, logprobs.ranks))
        self.logprobs.append(TokenLogprobs(len(self.request_ids) - 1, *columns))

    def add_prompt_logprobs(self, logprobs: SlotPromptLogprobs) -> None:
        row = len(self.request_ids) - 1
        self.prompt_logprobs.append(PromptLogprobs(row, logprobs.first_index, logprobs.token_ids, logprobs.logprobs, logprobs.ranks))

    def add_num_cached_tokens(self, num_cached_tokens: int) -> None:
        self.num_cached_tokens.append((len(self.request_ids) - 1, num_cached_tokens))

    def add_timing(self, request: Request, now: float) -> None:
        """`now`: when its last token came, or when it ended without another."""
        self.timings.append(request.timing(len(self.request_ids) - 1, now))


def _head(array: Array, num_rows: int) -> Array:
    """The first rows of an array, without a copy."""
    if num_rows >= array.shape[0]:
        return array
    data = memoryview(array.data).cast("B")
    return Array(array.dtype, (num_rows, *array.shape[1:]), data[: len(data) // array.shape[0] * num_rows])


class OutputRows:
    """Rows by client, clients in the order of their first row."""

    def __init__(self, epoch: int = 0):
        self.epoch = epoch
        self.now = 0.0  # when the model last ran; see stamp
        self._by_client: dict[int, ClientRows] = {}

    def __bool__(self) -> bool:
        return bool(self._by_client)

    def stamp(self) -> None:
        """The model has run: its rows carry this moment. The clock is read once per step."""
        self.now = time.monotonic()

    def of(self, client_index: int) -> ClientRows:
        rows = self._by_client.get(client_index)
        if rows is None:
            rows = self._by_client[client_index] = ClientRows()
        return rows

    def drop(self, client_index: int) -> None:
        """The client is gone; nobody will ask for its rows."""
        self._by_client.pop(client_index, None)

    def take(self, stats: SchedulerStats | None) -> dict[int, EngineCoreOutputs] | None:
        """Everything owed, as messages; None when nothing is."""
        if not self._by_client:
            return None
        by_client, self._by_client = self._by_client, {}
        now, self.now = self.now or time.monotonic(), 0.0
        return {
            client_index: EngineCoreOutputs(
                epoch=self.epoch,
                request_ids=rows.request_ids,
                first_indices=rows.first_indices,
                num_tokens=rows.num_tokens,
                token_ids=rows.token_ids,
                finished=rows.finished,
                logprobs=rows.logprobs,
                num_cached_tokens=rows.num_cached_tokens,
                prompt_logprobs=rows.prompt_logprobs,
                stats=stats,
                timestamp=now,
                timings=rows.timings,
            )
            for client_index, rows in by_client.items()
        }
