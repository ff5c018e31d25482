"""The stages of a token's path in the frontend, with their lines of source code.

Must not know: traces, the engine.
"""

from __future__ import annotations

from importlib import import_module

from ...ipc.trace import place_of_function
from ..clients.client import EngineClient

# (module of the frontend, class and method), in the order in which a request meets them; "client"
# is the class of the engine's client
BLOCKING = (
    "llm:LLM.generate",
    "requests.input_processor:InputProcessor.process_inputs",
    "client:add_request",
    "llm_engine:LLMEngine.step",
    "client:get_output",
    "requests.output_processor:OutputProcessor.process_outputs",
    "text.detokenizer:IncrementalDetokenizer.update",
)
ASYNC = (
    "async_llm:AsyncLLM.generate",
    "requests.input_processor:InputProcessor.process_inputs",
    "client:add_request",
    "async_llm:AsyncLLM._read_outputs",
    "client:get_output_async",
    "requests.output_processor:OutputProcessor.process_outputs",
    "text.detokenizer:IncrementalDetokenizer.update",
)


def blocking_places(client: EngineClient) -> dict[str, str]:
    """Returns "file:line" of each stage of LLM and LLMEngine, in order."""
    return dict(_place(stage, client) for stage in BLOCKING)


def async_places(client: EngineClient) -> dict[str, str]:
    """Does the same for AsyncLLM."""
    return dict(_place(stage, client) for stage in ASYNC)


def _place(stage: str, client: EngineClient) -> tuple[str, str]:
    module, name = stage.split(":")
    found = type(client) if module == "client" else import_module(f"...{module}", __name__)
    for part in name.split("."):
        found = getattr(found, part)
    return found.__qualname__, place_of_function(found)
