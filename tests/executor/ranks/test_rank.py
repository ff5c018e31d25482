"""The program of a rank: cores, threads, and what its results have in common with others'."""

from __future__ import annotations

import os

import pytest
from quire.executor.ranks.rank import digest_of, share_cores, with_threads
from quire.ipc.step_messages import ModelRunnerOutput
from quire.tests.executor.driver import make_config


@pytest.fixture
def cores():
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_ranks_share_the_cores(cores, monkeypatch) -> None:
    asked: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 5, 6})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, own: asked.append(set(own)))
    monkeypatch.setattr("quire.executor.ranks.rank.available_cores", lambda: 5)
    assert [share_cores(rank, 2) for rank in range(2)] == [2, 2]
    assert asked == [{0, 1}, {4, 5, 6}]
    assert share_cores(0, 6) == 1 and len(asked) == 2


def test_threads_of_a_rank(tiny, monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = make_config(tiny(), num_threads=None)
    assert with_threads(config, 3).device_config.num_threads == 3
    assert with_threads(make_config(tiny(), num_threads=5), 3).device_config.num_threads == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert with_threads(config, 3).device_config.num_threads is None


def test_a_digest_tells_tokens_apart() -> None:
    one = ModelRunnerOutput([1, 2], [5, 6, 7])
    others = [
        ModelRunnerOutput([2, 1], [5, 6, 7]),
        ModelRunnerOutput([1, 2], [5, 6, 8]),
        ModelRunnerOutput([1, 2], [5, 6, 7], errors={0: "x"}),
        ModelRunnerOutput([1, 2], [5, 6, 7], num_ahead=[0, 0]),
    ]
    assert digest_of(one) == digest_of(ModelRunnerOutput([1, 2], [5, 6, 7]))
    assert len({digest_of(output) for output in [one, *others]}) == 5
