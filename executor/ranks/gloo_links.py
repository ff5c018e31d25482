"""What connects ranks that share no memory: torch.distributed's gloo, over TCP.

Must not know: layers, models, steps, what the tensors are, how addresses reach the other ranks.

The sums are those of tensor_group.py: gloo only brings each rank the parts of all. Its connections
are neither authenticated nor encrypted (docs/ranks.md); they are bound to one address.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from .messages import RankLostError, host_name
from .stages import Stages
from .tensor_group import TensorGroup

# Tensors that a rank has sent and another has not received yet. gloo sends when the other rank
# receives, so waiting at once would let two ranks wait for each other.
MAX_PENDING = 8
_MAX_TAG = 2**31


class Addresses(Protocol):
    """Where the ranks find each other's addresses."""

    def publish(self, name: str, address: bytes) -> None:
        """To all ranks."""
        ...

    def look_up(self, name: str) -> bytes:
        """Waits until a rank has published it."""
        ...


class _Store(Store):
    """The addresses of one group, as gloo asks for them."""

    def __init__(self, group_name: str, addresses: Addresses):
        super().__init__()
        self._prefix, self._addresses = group_name + "/", addresses

    def set(self, key: str, value: Any) -> None:
        self._addresses.publish(self._prefix + key, bytes(value))

    def get(self, key: str) -> bytes:
        return self._addresses.look_up(self._prefix + key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Without a time limit: the engine ends ranks of which some do not come."""
        for key in keys:
            self.get(key)


class GlooGroup:
    """Some ranks that can reach each other."""

    def __init__(
        self, addresses: Addresses, name: str, rank: int, size: int, host: str, timeout_s: float
    ):
        """Waits for all ranks of the group `name`. host: the address of this machine that the
        others know. timeout_s: of each operation.
        """
        self.rank, self.size = rank, size
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
        options._timeout = timedelta(seconds=timeout_s)
        self._pending: deque[tuple[Any, Tensor]] = deque()
        self._what = f"rank {rank} of the group {name}"
        with self._errors():
            self._group = gloo(_Store(name, addresses), rank, size, options)

    def all_gather(self, mine: Tensor) -> Tensor:
        """mine [n] f32 of each rank -> [size, n]."""
        parts = torch.empty(self.size, len(mine), dtype=torch.float32)
        with self._errors():
            self._group.allgather([list(parts.unbind(0))], [mine]).wait()
        return parts

    def send(self, x: Tensor, to: int) -> None:
        """Returns at once, unless many have not arrived yet."""
        if x.numel() == 0:  # the other end knows
            return
        own = x.contiguous().clone()
        with self._errors():
            while len(self._pending) >= MAX_PENDING * (self.size - 1):
                self._pending.popleft()[0].wait()
            work = self._group.send([own.view(-1).view(torch.uint8)], to, _tag(own))
        self._pending.append((work, own))

    def receive(self, shape: tuple[int, int], dtype: torch.dtype, of: int) -> Tensor:
        """The next tensor of this size that `of` has sent."""
        x = torch.empty(shape, dtype=dtype)
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


class GlooExchange:
    """Implements Exchange (tensor_group.py)."""

    def __init__(self, group: GlooGroup):
        self._group = group
        self.rank, self.size = group.rank, group.size

    def exchange(self, piece: Tensor, num_floats: int) -> Tensor:
        """See Exchange."""
        mine = torch.zeros(num_floats)
        mine[: len(piece)] = piece
        return self._group.all_gather(mine)


class GlooStageLinks:
    """Implements StageLinks (stages.py). The ranks of the group are the stages."""

    def __init__(self, group: GlooGroup):
        self._group = group
        self.stage, self.count = group.rank, group.size

    def send(self, x: Tensor) -> None:
        """See StageLinks."""
        self._group.send(x, self.stage + 1)

    def receive(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """See StageLinks."""
        return self._group.receive(shape, dtype, self.stage - 1)


def gloo_group(
    rank: int, tp_size: int, num_stages: int, addresses: Addresses, host: str, timeout_s: float
) -> TensorGroup:
    """A rank's view of its group and of the stages. Waits for the ranks that it talks to.

    rank: stage * tp_size + the rank in its group. host, timeout_s: see GlooGroup.
    """
    addresses.publish(host_name(rank), host.encode())
    stage, part = divmod(rank, tp_size)
    exchange, links = None, None
    if tp_size > 1:
        name = f"stage-{stage}"
        exchange = GlooExchange(GlooGroup(addresses, name, part, tp_size, host, timeout_s))
    if num_stages > 1:
        name = f"part-{part}"
        links = GlooStageLinks(GlooGroup(addresses, name, stage, num_stages, host, timeout_s))
    hosts = [addresses.look_up(host_name(other)) for other in range(tp_size * num_stages)]
    return TensorGroup(exchange, Stages(links), hosts.count(host.encode()))
