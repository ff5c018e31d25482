"""The registry: selection, valid overrides, and errors."""

import logging

import pytest
import torch
from quire.ipc.errors import InvalidParameterError
from quire.kernels import ops, registry
from quire.kernels.cpu.native.library import library
from quire.kernels.registry import register, select, unregister

# the implementation of silu_and_mul that is selected by default
OURS = "native" if library else "cpu"


@pytest.fixture
def add():
    """Registers silu_and_mul implementations, which return the number they are made with and are
    removed after the test.
    """
    before = {i.name for i in registry.implementations("silu_and_mul")}

    def add(name: str, answer: int, **options) -> None:
        def silu_and_mul(x):
            return answer

        register("silu_and_mul", name=name, **options)(silu_and_mul)

    yield add
    for name in {i.name for i in registry.implementations("silu_and_mul")} - before:
        unregister("silu_and_mul", name)


def test_every_operation_has_a_reference_that_runs_everywhere():
    for op in registry.CONTRACTS:
        reference = next(i for i in registry.implementations(op) if i.name == "reference")
        assert reference.priority == 0 and reference.predicate(
            registry.Facts("anything", torch.float16)
        )


def test_the_table_has_one_attribute_per_operation():
    table = select("cpu", torch.float32)
    for op in registry.CONTRACTS:
        chosen = next(i for i in registry.implementations(op) if i.name == table.chosen[op])
        assert getattr(table, op) is chosen.function
    assert table.chosen["copy_blocks"] == "cpu"


def test_an_external_registration_wins_by_default_and_can_be_removed(add):
    add("mine", 7)
    assert select("cpu", torch.float32).silu_and_mul(None) == 7
    unregister("silu_and_mul", "mine")
    assert select("cpu", torch.float32).chosen["silu_and_mul"] == OURS
    add("mine", 8)  # the name is free again
    assert select("cpu", torch.float32).silu_and_mul(None) == 8


def test_priority_decides_and_the_first_of_equals_wins(add):
    add("low", 1, priority=5)
    assert select("cpu", torch.float32).chosen["silu_and_mul"] == OURS
    add("high", 2, priority=500)
    add("high too", 3, priority=500)
    assert select("cpu", torch.float32).chosen["silu_and_mul"] == "high"


def test_predicates_see_the_facts(add):
    seen = []

    def predicate(facts):
        seen.append(facts)
        return facts.dtype == torch.bfloat16 and facts.head_dim == 64

    add("picky", 1, predicate=predicate)
    assert (
        select("cpu", torch.bfloat16, head_dim=64, num_heads=14).chosen["silu_and_mul"] == "picky"
    )
    assert seen[-1] == registry.Facts("cpu", torch.bfloat16, head_dim=64, num_heads=14)
    assert select("cpu", torch.bfloat16).chosen["silu_and_mul"] == OURS
    assert select("cpu", torch.float32, head_dim=64).chosen["silu_and_mul"] == OURS


def test_engines_of_different_dtypes_hold_different_tables(add):
    add("bf16 only", 16, predicate=lambda facts: facts.dtype == torch.bfloat16)
    narrow, wide = select("cpu", torch.bfloat16), select("cpu", torch.float32)
    assert narrow.silu_and_mul(None) == 16
    assert wide.silu_and_mul(torch.zeros(1, 2)).shape == (1, 1)


def test_overrides():
    table = select("cpu", torch.float32, {"rms_norm": "reference"})
    assert table.chosen["rms_norm"] == "reference" and table.chosen["silu_and_mul"] == OURS


def test_unsatisfiable_overrides_are_refused(add):
    add("cuda only", 1, predicate=lambda facts: facts.device == "cuda")
    for overrides, words in (
        ({"rms_nrom": "cpu"}, ["'rms_nrom'", "rms_norm", "paged_attention"]),
        ({"rms_norm": "fast"}, ["'fast'", "reference", "cpu"]),
        ({"silu_and_mul": "cuda only"}, ["'cuda only'", "device='cpu'"]),
    ):
        with pytest.raises(InvalidParameterError) as caught:
            select("cpu", torch.float32, overrides)
        assert caught.value.parameter == "kernels"
        assert all(word in str(caught.value) for word in words)


def test_registrations_that_cannot_work_are_refused(add):
    with pytest.raises(InvalidParameterError, match="op: unknown operation 'swish'.*silu_and_mul"):
        register("swish", name="mine")
    with pytest.raises(
        InvalidParameterError,
        match=r"function: silu_and_mul takes \(x\), but implementation 'mine' takes \(x, y\)",
    ):
        register("silu_and_mul", name="mine")(lambda x, y: x)
    add("mine", 1)
    with pytest.raises(
        InvalidParameterError, match="name: silu_and_mul already has an implementation 'mine'"
    ):
        register("silu_and_mul", name="mine")(lambda x: x)
    with pytest.raises(
        InvalidParameterError, match="name: silu_and_mul has no implementation 'yours'"
    ):
        unregister("silu_and_mul", "yours")
    with pytest.raises(TypeError):
        select("cpu", torch.float32, num_layers=3)  # not one of the facts


def test_the_choice_is_logged(caplog):
    with caplog.at_level(logging.INFO, logger="quire.kernels.registry"):
        select("cpu", torch.float32, {"rms_norm": "reference"})
    assert caplog.text == ""  # forty names are for who asks for them
    with caplog.at_level(logging.DEBUG, logger="quire.kernels.registry"):
        table = select("cpu", torch.float32, {"rms_norm": "reference"})
    assert "kernels for cpu torch.float32" in caplog.text
    for op, name in table.chosen.items():
        assert f"{op}={name}" in caplog.text


def test_functions_of_ops_follow_later_registrations(add):
    x = torch.ones(1, 4)
    assert ops.silu_and_mul(x).shape == (1, 2)
    add("mine", 9)
    assert ops.silu_and_mul(x) == 9
