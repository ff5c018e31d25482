"""Connects ranks that share no memory by torch.distributed: gloo over TCP, or NCCL between GPUs.

Must not know: layers, models, steps, what the tensors are, how addresses reach the other ranks.

The sums are those of tensor_group.py: the backend only brings each rank the parts of all. gloo's
connections are neither authenticated nor encrypted (docs/ranks.md); they are bound to one address.
On a GPU all operations are work of its streams, and return before it is done.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from ..groups.process_group import LOOPBACK, make_process_group
from ..groups.stages import Stages
from ..groups.tensor_group import TensorGroup
from .messages import RankEnds, RankLostError, host_name

# Tensors that a rank has sent and another has not received yet. They are sent when the other rank
# receives, so waiting at once would let two ranks wait for each other.
MAX_PENDING = 8
_MAX_TAG = 2**31
CPU = torch.device("cpu")


class Addresses(Protocol):
    """Where the ranks find each other's addresses."""

    def publish(self, name: str, address: bytes) -> None:
        """Publishes an address to all ranks."""
        ...

    def look_up(self, name: str) -> bytes:
        """Waits until a rank has published it."""
        ...


class _Store(Store):
    """The addresses of one group, as gloo asks for them. NCCL asks for more (local_group)."""

    def __init__(self, group_name: str, addresses: Addresses):
        super().__init__()
        self._prefix, self._addresses = group_name + "/", addresses

    def set(self, key: str, value: Any) -> None:
        self._addresses.publish(self._prefix + key, bytes(value))

    def get(self, key: str) -> bytes:
        return self._addresses.look_up(self._prefix + key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits without a time limit: the engine ends the ranks if some do not come."""
        for key in keys:
            self.get(key)


class TorchGroup:
    """Some ranks that can reach each other."""

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        size: int,
        timeout_s: float,
        *,
        host: str = LOOPBACK,
        device: torch.device = CPU,
    ):
        """Waits for all ranks of the group `name`, whose `store` is. host, device, timeout_s: as in
        make_process_group.
        """
        self.rank, self.size, self._device = rank, size, device
        self._pending: deque[tuple[Any, Tensor]] = deque()
        self._what = f"rank {rank} of the group {name}"
        with self._errors():
            self._group = make_process_group(store, rank, size, timeout_s, host=host, device=device)

    def all_gather(self, mine: Tensor) -> Tensor:
        """mine [n] f32 of each rank -> [size, n]."""
        parts = torch.empty(self.size, len(mine), dtype=torch.float32, device=self._device)
        with self._errors():
            self._group.allgather([list(parts.unbind(0))], [mine]).wait()
        return parts

    def send(self, x: Tensor, to: int) -> None:
        """Sends a tensor. Returns at once, unless many have not arrived yet."""
        if x.numel() == 0:  # the other end expects nothing
            return
        own = x.contiguous().clone()
        with self._errors():
            while len(self._pending) >= MAX_PENDING * (self.size - 1):
                self._pending.popleft()[0].wait()
            work = self._group.send([own.view(-1).view(torch.uint8)], to, _tag(own))
        self._pending.append((work, own))

    def receive(self, shape: tuple[int, int], dtype: torch.dtype, of: int) -> Tensor:
        """The next tensor of this size that `of` has sent."""
        x = torch.empty(shape, dtype=dtype, device=self._device)
        if x.numel():
            with self._errors():
                self._group.recv([x.view(-1).view(torch.uint8)], of, _tag(x)).wait()
        return x

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLostError(f"{self._what} has lost another one: {error}") from error


def _tag(x: Tensor) -> int:
    """Tensors of one size arrive in order; one of another size is never taken for it."""
    return x.nbytes % _MAX_TAG


class TorchExchange:
    """Implements Exchange (tensor_group.py)."""

    def __init__(self, group: TorchGroup):
        self._group = group
        self.rank, self.size = group.rank, group.size

    def exchange(self, piece: Tensor, num_floats: int) -> Tensor:
        """See Exchange."""
        mine = torch.zeros(num_floats, device=piece.device)
        mine[: len(piece)] = piece
        return self._group.all_gather(mine)


class TorchStageLinks:
    """Implements StageLinks (stages.py). The ranks of the group are the stages."""

    def __init__(self, group: TorchGroup):
        self._group = group
        self.stage, self.count = group.rank, group.size

    def send(self, x: Tensor) -> None:
        """See StageLinks."""
        self._group.send(x, self.stage + 1)

    def receive(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """See StageLinks."""
        return self._group.receive(shape, dtype, self.stage - 1)


def torch_group(
    rank: int,
    tp_size: int,
    num_stages: int,
    open_store: Callable[[str], Any],
    num_on_machine: int,
    timeout_s: float,
    *,
    host: str = LOOPBACK,
    device: torch.device = CPU,
) -> TensorGroup:
    """A rank's view of its group and of the stages. Waits for the ranks that it talks to.

    rank: stage * tp_size + the rank in its group. open_store: of the name of a group.
    num_on_machine: as in TensorGroup. host, device, timeout_s: as in make_process_group.
    """
    stage, part = divmod(rank, tp_size)

    def group(name: str, own_rank: int, size: int) -> TorchGroup:
        store = open_store(name)
        return TorchGroup(store, name, own_rank, size, timeout_s, host=host, device=device)

    exchange, links = None, None
    if tp_size > 1:
        exchange = TorchExchange(group(f"stage-{stage}", part, tp_size))
    if num_stages > 1:
        links = TorchStageLinks(group(f"part-{part}", stage, num_stages))
    return TensorGroup(exchange, Stages(links), num_on_machine)


def network_group(
    rank: int, tp_size: int, num_stages: int, addresses: Addresses, host: str, timeout_s: float
) -> TensorGroup:
    """The group of ranks on several machines, by gloo; see torch_group."""
    addresses.publish(host_name(rank), host.encode())
    size = tp_size * num_stages
    hosts = [addresses.look_up(host_name(other)) for other in range(size)]

    def open_store(name: str) -> Store:
        return _Store(name, addresses)

    num_here = hosts.count(host.encode())
    return torch_group(rank, tp_size, num_stages, open_store, num_here, timeout_s, host=host)


def local_group(ends: RankEnds, timeout_s: float, device: torch.device) -> TensorGroup:
    """The group of ranks on this machine that share no memory; see torch_group. Their store is a
    file.

    They are connected when it returns: NCCL takes its memory now, before that of a cache is
    measured.
    """
    distributed: Any = dist
    tp_size = 1 if ends.group is None else len(ends.group.events)
    num_stages = ends.size // tp_size

    def open_store(name: str) -> Any:
        return distributed.PrefixStore(name, distributed.FileStore(f"/proc/self/fd/{ends.store}"))

    args = ends.rank, tp_size, num_stages, open_store, ends.size, timeout_s
    group = torch_group(*args, device=device)
    one = torch.zeros(1, 1, device=device)
    if group.size > 1:
        group.all_reduce(one)
    if not group.stages.is_first:
        group.stages.receive(1, 1, one.dtype)
    if not group.stages.is_last:
        group.stages.send(one)
    return group
