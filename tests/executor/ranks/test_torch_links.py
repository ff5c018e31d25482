"""Ranks that share no memory: the same bits as through shared memory, and what a lost rank does.
Those of one machine find each other in a file, as ranks on GPUs do.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from quire.executor.groups import PART_FLOATS
from quire.executor.groups.tensor_group import TensorGroup
from quire.executor.ranks.messages import RankEnds, RankLostError
from quire.executor.ranks.ring import GroupEnds, RingEnds
from quire.executor.ranks.torch_links import MAX_PENDING, local_group, network_group
from quire.tests.executor.groups.test_tensor_group import on_ranks

NO_RING = RingEnds(-1, [], [])


class Addresses:
    """What the engine does with them."""

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}
        self._arrived = threading.Condition()

    def publish(self, name: str, address: bytes) -> None:
        with self._arrived:
            self._known[name] = address
            self._arrived.notify_all()

    def look_up(self, name: str) -> bytes:
        with self._arrived:
            self._arrived.wait_for(lambda: name in self._known)
            return self._known[name]


def on_gloo_ranks(
    tp: int,
    pp: int,
    work: Callable[[TensorGroup], Any],
    *,
    timeout_s=60.0,
    leaves_early=False,
    is_local=False,
) -> list:
    """The results of work(group) in a thread for each rank. leaves_early: the first to be
    ready closes its connections. is_local: of one machine.
    """
    addresses, meeting = Addresses(), threading.Barrier(tp * pp, timeout=60)
    store = os.memfd_create("store")

    def make(rank: int) -> TensorGroup:
        if not is_local:
            return network_group(rank, tp, pp, addresses, "127.0.0.1", timeout_s)
        events = None if tp == 1 else GroupEnds(-1, [[]] * tp, -1)
        ends = RankEnds(rank, tp * pp, NO_RING, NO_RING, events, None, store)
        return local_group(ends, timeout_s, torch.device("cpu"))

    def run(rank: int) -> Any:
        group = make(rank)
        meeting.wait()
        result = work(group)
        if not leaves_early:
            meeting.wait()
        return result

    try:
        with ThreadPoolExecutor(tp * pp) as threads:
            return list(threads.map(run, range(tp * pp)))
    finally:
        os.close(store)


@pytest.mark.parametrize(("size", "is_local"), [(2, False), (3, False), (2, True)])
def test_sums_and_joins_have_the_bits_of_those_in_shared_memory(size: int, is_local: bool) -> None:
    def work(group: TensorGroup) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(group.rank)
        small = torch.randn(5, 33, generator=generator)
        large = torch.randn(2, PART_FLOATS // 2 + 7, generator=generator)
        widths = [40, 30, 20][: group.size]
        part = torch.randn(3, widths[group.rank], generator=generator).bfloat16()
        return [
            group.all_reduce(small),
            group.all_reduce(large.bfloat16()),
            group.all_gather(part.float(), widths),
            group.all_gather(part[:0].float(), widths),
        ]

    wanted = on_ranks(size, work)
    found = on_gloo_ranks(size, 1, work, is_local=is_local)
    for of_rank in (*found, *wanted):
        assert all(map(torch.equal, of_rank, wanted[0]))


@pytest.mark.parametrize("is_local", [False, True])
def test_stages_and_groups_at_once(is_local: bool) -> None:
    """Four ranks: each stage adds, and each part has its own links to the other stage."""

    def work(group: TensorGroup) -> torch.Tensor:
        stages, mine = group.stages, torch.full((2, 3), 1.0 + group.rank).bfloat16()
        if stages.is_first:
            stages.send(group.all_reduce(mine).bfloat16()[:, ::2])
            stages.send(mine[:0])
            return mine
        received = stages.receive(2, 2, torch.bfloat16)
        assert stages.receive(0, 3, torch.bfloat16).shape == (0, 3)
        return group.all_reduce(received + group.rank)

    _, _, third, fourth = on_gloo_ranks(2, 2, work, is_local=is_local)
    assert torch.equal(third, fourth) and third.tolist() == [[7.0, 7.0]] * 2


def test_a_stage_may_be_ahead() -> None:
    """It does not wait for the other to receive."""
    is_sent = threading.Event()

    def work(group: TensorGroup) -> list[float]:
        stages, x = group.stages, torch.zeros(1, 2)
        if stages.is_first:
            for step in range(MAX_PENDING - 1):
                stages.send(x.fill_(step))
            is_sent.set()
            return []
        assert is_sent.wait(60)
        return [float(stages.receive(1, 2, torch.float32).sum()) for _ in range(MAX_PENDING - 1)]

    _, last = on_gloo_ranks(1, 2, work)
    assert last == [2.0 * step for step in range(MAX_PENDING - 1)]


@pytest.mark.parametrize("is_stages", [False, True])
def test_a_rank_that_is_gone_is_an_error_at_once(is_stages: bool) -> None:
    def work(group: TensorGroup) -> float:
        if group.rank == 1 or (group.stages.is_first and is_stages):
            return 0.0
        began = time.monotonic()
        with pytest.raises(RankLostError, match="rank . of the group .* has lost another one"):
            if is_stages:
                group.stages.receive(1, 2, torch.float32)
            else:
                group.all_reduce(torch.zeros(3))
        return time.monotonic() - began

    took_s = on_gloo_ranks(*((1, 2) if is_stages else (2, 1)), work, leaves_early=True)
    assert 0.0 < max(took_s) < 30


def test_a_rank_that_says_nothing_is_an_error_in_time() -> None:
    def work(group: TensorGroup) -> None:
        if group.rank == 0:
            with pytest.raises(RankLostError, match="has lost another one"):
                group.all_reduce(torch.zeros(3))

    on_gloo_ranks(2, 1, work, timeout_s=0.3)
