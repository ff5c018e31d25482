"""What goes from stage to stage, and which layers each has."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from quire.executor.groups.stages import Stages
from quire.executor.ranks.ring import RingEnds, StageEnds
from quire.executor.ranks.shared_links import RingStageLinks
from quire.ipc.models.ranks import layers_of_stages

MADE: list[RingEnds] = []


@pytest.fixture(autouse=True)
def _closes_descriptors() -> Iterator[None]:
    yield
    while MADE:
        for fd in MADE.pop().fds:
            os.close(fd)


def make_stages(count: int) -> list[Stages]:
    links = [RingEnds.create(1) for _ in range(count - 1)]
    MADE.extend(links)
    return [Stages(RingStageLinks(StageEnds(stage, links))) for stage in range(count)]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_layer_is_in_one_stage(count: int) -> None:
    for num_layers in range(count, 12):
        parts = layers_of_stages(count, num_layers)
        assert [layer for part in parts for layer in part] == list(range(num_layers))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert layers_of_stages(1, 7) == [range(7)] == layers_of_stages(1, 7, 3.0)


@pytest.mark.parametrize(
    ("count", "last_more", "sizes"),
    [(2, 4.6, [14, 10]), (2, 1.0, [13, 11]), (3, 3.0, [9, 9, 6]), (4, 90.0, [21, 1, 1, 1])],
)
def test_the_last_stage_has_fewer_layers_for_its_head(count, last_more, sizes) -> None:
    parts = layers_of_stages(count, 24, last_more)
    assert [layer for part in parts for layer in part] == list(range(24))
    assert [len(part) for part in parts] == sizes


@pytest.mark.parametrize(
    ("count", "cuts", "firsts"),
    [(2, [3, 4, 9], [9]), (3, [3, 4, 9], [4, 9]), (4, [3, 4, 9], [3, 4, 9]), (3, [1, 2], [1, 2])],
)
def test_a_stage_begins_at_the_nearest_cut(count, cuts, firsts) -> None:
    parts = layers_of_stages(count, 14, 0.0, cuts)
    assert [layer for part in parts for layer in part] == list(range(14))
    assert [part.start for part in parts[1:]] == firsts


def test_tensors_arrive_as_they_were_sent() -> None:
    first, second, last = make_stages(3)
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (1, 0, 0, 1)
    x = torch.randn(5, 7).bfloat16()
    first.send(x)
    received = second.receive(5, 7, torch.bfloat16)
    assert torch.equal(received, x)
    received += 1  # it is the receiver's own
    second.send(received[:, ::2])
    assert torch.equal(last.receive(5, 4, torch.bfloat16), received[:, ::2])
    second.send(torch.empty(0, 100))
    assert last.receive(0, 100, torch.float32).shape == (0, 100)


def test_other_shapes_are_an_error() -> None:
    first, last = make_stages(2)
    first.send(torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match=r"24 bytes arrived .*, not \(2, 4\)"):
        last.receive(2, 4, torch.float32)
