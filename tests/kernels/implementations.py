"""Runs a test once per implementation of an operation."""

import pytest
import torch
from quire.kernels import registry
from quire.kernels.registry import Facts

FACTS = Facts("cpu", torch.float32)


def each(op: str) -> pytest.MarkDecorator:
    """Parametrizes `op` with the functions that implement it for the CPU in fp32."""
    found = [i for i in registry.implementations(op) if i.predicate(FACTS)]
    return pytest.mark.parametrize(op, [i.function for i in found], ids=[i.name for i in found])
