"""Engines that meet and exchange rows: the groups are threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from quire.executor.groups.expert_group import ALL_EXPERTS, ExpertGroup, make_expert_group
from quire.ipc.errors import EngineDeadError
from quire.tests.fakes import make_config


class Threads:
    def __init__(self, directory: Path, size: int, timeout_s: float = 20.0):
        self.groups = [ExpertGroup(rank, size, str(directory), timeout_s) for rank in range(size)]
        self._pool = ThreadPoolExecutor(size)
        self.on_each(lambda group: group.connect())

    def on_each(self, call: Callable[[ExpertGroup], Any]) -> list[Any]:
        return list(self._pool.map(call, self.groups))

    def close(self) -> None:
        for group in self.groups:
            group.close()
        self._pool.shutdown()


@pytest.fixture
def three(tmp_path) -> Iterator[Threads]:
    threads = Threads(tmp_path, 3)
    yield threads
    threads.close()


def test_engines_agree_whether_any_has_work(three) -> None:
    assert three.on_each(lambda group: group.meet(False)) == [False] * 3
    for worker in range(3):
        assert three.on_each(lambda group, w=worker: group.meet(group.rank == w)) == [True] * 3


def rows_of(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    num_rows = (4, 1, 30)[rank]
    x = torch.randn(num_rows, 24, generator=generator).to(dtype)
    return x, torch.randint(6, (num_rows, 2), generator=generator).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_rows_come_to_all_engines_and_results_go_back(three, dtype) -> None:
    expected = [torch.cat(parts) for parts in zip(*(rows_of(rank, dtype) for rank in range(3)))]

    def exchange(group: ExpertGroup) -> torch.Tensor:
        with group.one_pass():
            for _ in range(3):  # layers
                assert group.is_due == (group._num_rows == [])
                x, ids, num_rows = group.gather(*rows_of(group.rank, dtype))
                assert num_rows == [4, 1, 30]
                assert torch.equal(x, expected[0]) and torch.equal(ids, expected[1])
                # the engine returns its number for each row, and nothing to the second engine
                returned = torch.full((34, 24), float(group.rank))
                received = (
                    [0, 0, 0] if group.rank == 1 else [len(rows_of(group.rank, dtype)[0])] * 3
                )
                out = group.scatter(returned, [4, 0, 30], received)
            assert not group.is_due
        return out

    outs = three.on_each(exchange)
    assert outs[0][:, 0].tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
    assert outs[1].shape == (0, 24)
    assert outs[2][:, 5].tolist() == [0.0] * 30 + [1.0] * 30 + [2.0] * 30


def test_a_pass_of_its_own_needs_no_other_engine(tmp_path) -> None:
    group = ExpertGroup(1, 2, str(tmp_path))
    x, ids = rows_of(0, torch.float32)
    all_x, all_ids, num_rows = group.gather(x, ids)
    assert all_x is x and all_ids is ids and num_rows == [0, 4]
    # two of five rows went to this engine's experts; those elsewhere give zeros
    out = group.scatter(torch.ones(2, 24), [0, 2], [3, 2])
    assert out[:, 0].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_layers_of_a_pass_have_the_same_rows(three) -> None:
    def exchange(group: ExpertGroup) -> None:
        with group.one_pass():
            x, ids = rows_of(group.rank, torch.float32)
            group.gather(x, ids)
            with pytest.raises(RuntimeError, match="got 0 rows in a pass of"):
                group.gather(x[:0], ids[:0])

    three.on_each(exchange)


def test_an_engine_that_ends_breaks_the_calls_of_the_others(tmp_path) -> None:
    threads = Threads(tmp_path, 2)
    waiting = threading.Thread(target=lambda: (time.sleep(0.2), threads.groups[1].close()))
    waiting.start()
    with pytest.raises(EngineDeadError, match="another engine of the group is gone"):
        threads.groups[0].meet(True)
    waiting.join()
    threads.close()


def test_an_engine_that_does_not_come_is_not_waited_for_for_ever(tmp_path) -> None:
    group = ExpertGroup(0, 2, str(tmp_path), timeout_s=0.3)
    with pytest.raises(EngineDeadError, match="another engine of the group is gone"):
        group.connect()


def test_one_engine_has_all_experts() -> None:
    assert make_expert_group(make_config()) is ALL_EXPERTS
    assert make_expert_group(make_config(data_parallel_size=2)) is ALL_EXPERTS
    config = make_config(data_parallel_size=2, enable_expert_parallel=True)
    group = make_expert_group(config)
    assert (group.rank, group.size) == (0, 2)
