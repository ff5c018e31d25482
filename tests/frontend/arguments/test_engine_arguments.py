"""The typed keyword arguments agree with the configuration fields."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest
import quire
from quire import LLM, AsyncLLM, EngineArgs
from quire.frontend.arguments.engine_arguments import EngineArguments
from quire.ipc.config import config_fields


def test_typed_arguments_equal_the_configuration() -> None:
    typed = get_type_hints(EngineArguments)
    fields = {name: field for name, (_, field) in config_fields().items() if name != "model"}
    assert list(typed) == list(fields)
    for name, field in fields.items():
        assert msgspec.inspect.type_info(typed[name]) == unconstrained(field.type), name


def unconstrained(annotation) -> msgspec.inspect.Type:
    """The type of a field without its range and description."""
    info = msgspec.inspect.type_info(annotation)
    while isinstance(info, msgspec.inspect.Metadata):
        info = info.type
    if isinstance(info, msgspec.inspect.UnionType):
        return msgspec.inspect.UnionType(tuple(map(bare, info.types)))
    return bare(info)


def bare(info: msgspec.inspect.Type) -> msgspec.inspect.Type:
    numbers = (msgspec.inspect.IntType, msgspec.inspect.FloatType)
    return type(info)() if isinstance(info, numbers) else info


@pytest.mark.parametrize("function", [LLM.__init__, EngineArgs.__init__, AsyncLLM.from_engine_args])
def test_editors_see_the_arguments(function) -> None:
    annotation = inspect.signature(function).parameters["arguments"].annotation
    assert annotation == "Unpack[EngineArguments]"


def test_from_engine_args_takes_arguments_or_engine_args(monkeypatch) -> None:
    from quire.frontend import async_llm

    seen = []

    def connect(engine_args, engine, *, asyncio_mode):
        seen.append((engine_args, engine))
        raise InterruptedError

    monkeypatch.setattr(async_llm, "connect", connect)
    for call in (
        lambda: AsyncLLM.from_engine_args(model="m", max_num_seqs=3, engine="inproc"),
        lambda: AsyncLLM.from_engine_args(EngineArgs("m", max_num_seqs=3), "inproc"),
    ):
        with pytest.raises(InterruptedError):
            call()
    assert seen == [(EngineArgs("m", max_num_seqs=3), "inproc")] * 2
    with pytest.raises(TypeError, match="not both"):
        AsyncLLM.from_engine_args(EngineArgs("m"), max_num_seqs=3)


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(quire.__file__).parent / "py.typed").is_file()
