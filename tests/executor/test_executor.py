"""The protocol between the core and an executor: which classes implement it, and that the core uses
nothing else.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire.executor.executor import Executor, SharingExecutor, make_executor
from quire.executor.ranks.multiproc_executor import MultiprocExecutor
from quire.executor.worker import Worker
from quire.tests.executor.driver import make_config
from quire.tests.fakes import FakeExecutor

CORE = Path(__file__).resolve().parents[2] / "core"
OFFERED = {name for name in vars(Executor) if not name.startswith("_")}
OF_SHARED_EXPERTS = {name for name in vars(SharingExecutor) if not name.startswith("_")}


@pytest.mark.parametrize("implementation", [Worker, MultiprocExecutor, FakeExecutor])
def test_implementations_have_every_method_with_these_parameters(implementation) -> None:
    values = {"burst_weights_bytes", "kv_cache_windows", "max_num_seqs", "num_state_checkpoints"}
    for name in OFFERED - values:
        wanted = inspect.signature(getattr(Executor, name)).parameters.values()
        offered = inspect.signature(getattr(implementation, name)).parameters.values()
        assert [p.kind for p in offered] == [p.kind for p in wanted], name


def test_one_rank_is_a_worker_in_this_process(tiny) -> None:
    assert type(make_executor(make_config(tiny()))) is Worker


def reached(tree: ast.Module) -> Iterator[str]:
    """Return the executor attributes that the code uses and the protocol lacks, and every
    `.worker`.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = ast.unparse(node.value).split(".")[-1]
        if node.attr in {"worker", "workers"} or (
            owner == "executor" and node.attr not in OFFERED | OF_SHARED_EXPERTS
        ):
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda path: path.name)
def test_the_core_uses_only_the_protocol(path: Path) -> None:
    assert list(reached(ast.parse(path.read_text()))) == []


def test_use_of_other_attributes_is_found() -> None:
    for bad in ("self.executor.worker.model", "core.executor.runner", "x.worker", "executor.model"):
        assert list(reached(ast.parse(bad))), bad
    assert list(reached(ast.parse("self.executor.execute_model(step)"))) == []
