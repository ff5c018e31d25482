"""The stages of a token's path in the frontend, with their lines of source code.

Must not know: traces, the engine.
"""

from __future__ import annotations

from ...ipc.trace import place_of_function
from ..clients.client import EngineClient

# they run once per message of the engine, and the others once per request
OF_EACH_STEP = ("LLMEngine.step", "AsyncLLM._read_outputs")


def blocking_places(client: EngineClient) -> dict[str, str]:
    """Of LLM and LLMEngine: by stage, "file:line", in the order in which a request meets them."""
    from ..llm import LLM
    from ..llm_engine import LLMEngine

    functions = (LLM.generate, type(client).add_request, LLMEngine.step, type(client).get_output)
    return _places(functions)


def async_places(client: EngineClient) -> dict[str, str]:
    """The same of AsyncLLM."""
    from ..async_llm import AsyncLLM

    return _places(
        (
            AsyncLLM.generate,
            type(client).add_request,
            AsyncLLM._read_outputs,
            type(client).get_output_async,
        )
    )


def _places(functions: tuple) -> dict[str, str]:
    from ..requests.input_processor import InputProcessor
    from ..requests.output_processor import OutputProcessor
    from ..text.detokenizer import IncrementalDetokenizer

    ends = OutputProcessor.process_outputs, IncrementalDetokenizer.update
    way = functions[0], InputProcessor.process_inputs, *functions[1:], *ends
    return {function.__qualname__: place_of_function(function) for function in way}
