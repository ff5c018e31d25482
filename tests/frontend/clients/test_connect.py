"""When the tokenizer is loaded beside an engine that starts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from quire.frontend.clients import connect
from quire.frontend.clients.connect import TokenizerLoad
from quire.frontend.engine_args import EngineArgs


def run_at_once(function: Callable[[], object]) -> Future:
    future: Future = Future()
    future.set_result(function())
    return future


def test_the_tokenizer_is_loaded_once_the_configuration_is_sent(monkeypatch):
    """Not before, because it would delay that; not later, because it takes as long as a start."""
    loaded = []
    monkeypatch.setattr(connect, "load_tokenizer", loaded.append)
    monkeypatch.setattr(connect, "start_in_thread", run_at_once)
    reported = []
    config = EngineArgs(load_format="dummy").create_engine_config()
    load = TokenizerLoad(config, lambda *stage: reported.append(stage))
    load.on_progress("start", 0.0)
    assert not loaded
    load.on_progress("start", 1.0)
    load.on_progress("weights", 0.5)
    assert loaded == [config.model_config]
    assert reported == [("start", 0.0), ("start", 1.0), ("weights", 0.5)]
