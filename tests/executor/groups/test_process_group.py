"""The backend that carries tensors of a device."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quire.executor.groups.process_group import make_process_group


def test_tensors_of_a_cpu_go_through_gloo() -> None:
    distributed: Any = torch.distributed
    fd = os.memfd_create("store")

    def work(rank: int) -> list[float]:
        store = distributed.FileStore(f"/proc/self/fd/{fd}")
        group = make_process_group(store, rank, 2, 10.0)
        assert isinstance(group, distributed.ProcessGroupGloo)
        parts = torch.empty(2, 1)
        group.allgather([list(parts.unbind(0))], [torch.tensor([1.0 + rank])]).wait()
        return parts.view(-1).tolist()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, range(2))) == [[1.0, 2.0]] * 2
    os.close(fd)


def test_a_member_that_does_not_come_is_an_error() -> None:
    distributed: Any = torch.distributed
    store = distributed.HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(RuntimeError):
        make_process_group(store, 0, 2, 0.2)


def test_tensors_of_a_gpu_go_through_nccl(monkeypatch) -> None:
    """What is asked of NCCL; tests/gpu/test_ranks.py asks it where there are two GPUs."""
    made: list[Any] = []

    class FakeNCCL:
        Options = SimpleNamespace

        def __init__(self, *args: Any) -> None:
            made.extend(args)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeNCCL, raising=False)
    group = make_process_group("store", 1, 2, 9.0, device=torch.device("cuda", 1))
    assert isinstance(group, FakeNCCL)
    assert made[:3] == ["store", 1, 2] and made[3]._timeout == timedelta(seconds=9.0)
