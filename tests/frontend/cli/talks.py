"""A conversation with a tiny model in this process, and a display that records its output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire import EngineArgs
from quire.frontend.cli.conversation import Conversation
from quire.frontend.llm_engine import LLMEngine


class RecordingDisplay:
    """Records what is displayed."""

    def __init__(self) -> None:
        self.answers: list[str] = [""]
        self.reasoning = ""
        self.notices: list[str] = []
        self.errors: list[str] = []

    def write(self, text: str) -> None:
        self.answers[-1] += text

    def write_reasoning(self, text: str) -> None:
        self.reasoning += text

    def end(self) -> None:
        self.answers.append("")

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def error(self, text: str) -> None:
        self.errors.append(text)


@contextmanager
def conversation(model: Path, max_model_len: int = 200, **sampling: Any) -> Iterator[Conversation]:
    args = EngineArgs(str(model), max_model_len=max_model_len, kv_cache_memory_bytes=2**22)
    engine = LLMEngine.from_engine_args(args, engine="inproc")
    try:
        yield Conversation(engine, {"max_tokens": 8, "temperature": 0.0, **sampling}, None)
    finally:
        engine.shutdown()
