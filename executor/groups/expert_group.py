"""The engines that share the experts of a model: they agree on each pass, and send each other rows.

Must not know: layers, models, requests, how the engines were started.

    meet          does any engine have work? ─▶ all run one pass, or none does
      gather      every row and its experts' ids ─▶ all engines            ┐ in each layer
      scatter     what an engine's experts return ─▶ the rows' engines     ┘ of experts

Messages go through gloo. An engine that ends breaks the calls of the others, which then raise.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...ipc.config import EngineConfig
from ...ipc.errors import EngineDeadError
from ...ipc.models.expert_parallel import shares_experts
from .process_group import make_process_group

T = TypeVar("T")


class ExpertGroup:
    """An engine's view of the group. Without a directory it is the only engine.

    A pass outside `one_pass` warms up or measures, and is this engine's own: rows whose experts are
    elsewhere get zeros.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        directory: str = "",
        timeout_s: float = 60.0,
        name: str = "gloo",
    ):
        """directory and name: where the members of this group find each other."""
        self.rank, self.size = rank, size
        self._directory, self._name, self._timeout_s = directory, name, timeout_s
        self._gloo: Any = None
        self._is_meeting = False  # this pass is one of all engines
        self._num_rows: list[int] = []  # of each engine in this pass, once they are known
        self.num_passes = 0  # that were of all engines

    def connect(self) -> None:
        """Waits for the other engines. Raises EngineDeadError."""
        distributed: Any = dist  # whose types are incomplete
        with self._failing():
            store = distributed.FileStore(str(Path(self._directory) / self._name), self.size)
            store.set_timeout(datetime.timedelta(seconds=self._timeout_s))
            # on the loopback: they are engines of one machine
            self._gloo = make_process_group(store, self.rank, self.size, self._timeout_s)

    def close(self) -> None:
        self._gloo = None

    def meet(self, has_work: bool) -> bool:
        """Waits until all engines meet. Returns whether any has work: then all run a pass."""
        return any(self._gather_numbers(int(has_work)))

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """A context whose next pass of the model is one of all engines."""
        self._is_meeting, self._num_rows = True, []
        try:
            yield
        finally:
            self._is_meeting = False

    def run(self, step: Callable[[], T], join: Callable[[], None]) -> T:
        """Runs a step as one pass of all engines. `join` runs a pass without data, for a step in
        which no request could be computed.
        """
        if self.size == 1:
            return step()
        with self.one_pass():
            result = step()
            if self.is_due:
                join()
        return result

    @property
    def is_due(self) -> bool:
        """Within `one_pass`: the others still wait for this engine's pass."""
        return self._is_meeting and not self._num_rows

    def gather(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """x [T, H] and the ids [T, K] i32 of its rows' experts -> those of all engines, in their
        order, and how many rows each engine has.
        """
        if not self._is_meeting:
            return x, ids, [len(x) if rank == self.rank else 0 for rank in range(self.size)]
        if not self._num_rows:
            self._num_rows = self._gather_numbers(len(x))
            self.num_passes += 1
        if len(x) != self._num_rows[self.rank]:
            raise RuntimeError(
                f"a layer of experts got {len(x)} rows in a pass of {self._num_rows[self.rank]}"
            )
        width = x.shape[1] * x.element_size()
        own = torch.cat([_bytes(x), _bytes(ids)], dim=1)
        rows = self._exchange([own] * self.size, self._num_rows)
        all_x, all_ids = rows[:, :width].contiguous(), rows[:, width:].contiguous()
        return all_x.view(x.dtype), all_ids.view(ids.dtype), self._num_rows

    def scatter(self, returned: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """returned [P, H] f32, of which the first `sent[0]` rows are for the first engine, and so
        on -> [sum of received, H], in the order of engines.
        """
        if self._is_meeting:
            return self._exchange(returned.contiguous().split(list(sent)), received)
        num_rows = sum(received)
        out = torch.zeros(num_rows, returned.shape[1], dtype=returned.dtype)
        begin = sum(received[: self.rank])
        out[begin : begin + len(returned)] = returned
        return out

    def _gather_numbers(self, number: int) -> list[int]:
        """The numbers of all engines; this one's is `number`."""
        return self._exchange([torch.tensor([number])] * self.size, [1] * self.size).tolist()

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[int]) -> Tensor:
        """Sends the contiguous rows sent[i] to engine i -> the rows that the engines have sent to
        this one, in their order; received: how many each.
        """
        out = torch.empty(sum(received), *sent[0].shape[1:], dtype=sent[0].dtype)
        works = []
        with self._failing():
            assert self._gloo is not None
            # its collectives take a hundred times as long, in threads of their own
            for rank, (to, of) in enumerate(zip(sent, out.split(list(received)))):
                if rank == self.rank:
                    of.copy_(to)
                    continue
                works += [self._gloo.send([to], rank, 0)] if len(to) else []
                works += [self._gloo.recv([of], rank, 0)] if len(of) else []
            for work in works:
                work.wait()
        return out

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo's, of a broken connection or after the timeout
            cause = str(error).partition(". This is typically")[0]
            raise EngineDeadError(f"another engine of the group is gone: {cause}") from error


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


ALL_EXPERTS = ExpertGroup()


def make_expert_group(config: EngineConfig, rank: int = 0) -> ExpertGroup:
    """The group of an engine's resolved configuration, not connected. rank: among all ranks of the
    engine. Those with the same number are a group: they have the same layers and parts of them.
    """
    if not shares_experts(config):
        return ALL_EXPERTS
    device, service = config.device_config, config.service_config
    timeout_s = max(service.step_timeout_s, service.startup_timeout_s)
    place = device.data_parallel_rank, device.data_parallel_size
    return ExpertGroup(*place, device.expert_group, timeout_s, f"gloo-{rank}")
