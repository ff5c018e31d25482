"""Gathers the rows that each client is owed (new tokens, refusals, aborts) until they leave as one EngineCoreOutputs per client.
May know: the messages, client indices.
Must not know: the scheduler, sockets, or what a client does with its rows."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..ipc.messages import EngineCoreOutputs, Finished, FinishReason, SchedulerStats, SlotLogprobs, TokenLogprobs


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

    def add(self, request_id: str, first_index: int, token_ids: list[int]) -> None:
        self.request_ids.append(request_id)
        self.first_indices.append(first_index)
        self.num_tokens.append(len(token_ids))
        self.token_ids += token_ids

    # Each of these adds to the row that was added last.

    def finish(self, reason: FinishReason, stop_reason: int | None = None, error: str | None = None) -> None:
        self.finished.append(Finished(len(self.request_ids) - 1, reason, stop_reason, error))

    def add_logprobs(self, logprobs: SlotLogprobs) -> None:
        self.logprobs.append(TokenLogprobs(len(self.request_ids) - 1, logprobs.token_ids, logprobs.logprobs, logprobs.ranks))

    def add_num_cached_tokens(self, num_cached_tokens: int) -> None:
        self.num_cached_tokens.append((len(self.request_ids) - 1, num_cached_tokens))


class OutputRows:
    """Rows by client, clients in the order of their first row."""

    def __init__(self, epoch: int = 0):
        self.epoch = epoch
        self._by_client: dict[int, ClientRows] = {}

    def __bool__(self) -> bool:
        return bool(self._by_client)

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
        now = time.monotonic()
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
                stats=stats,
                timestamp=now,
            )
            for client_index, rows in by_client.items()
        }
