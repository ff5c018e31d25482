"""The stages of a token's path in the frontend, with their lines of source code.

Must not know: traces, the engine.
"""

from __future__ import annotations

from ...ipc.trace import place_of_function


def frontend_places() -> dict[str, str]:
    """By stage, "file:line"."""
    from ..clients.inproc_client import InprocClient
    from ..clients.mp_client import MPClient
    from ..llm import LLM
    from ..llm_engine import LLMEngine
    from ..requests.output_processor import OutputProcessor
    from ..text.detokenizer import IncrementalDetokenizer

    functions = (
        LLM.generate,
        LLMEngine.step,
        MPClient.get_output,
        InprocClient.get_output,
        OutputProcessor.process_outputs,
        IncrementalDetokenizer.update,
    )
    return {function.__qualname__: place_of_function(function) for function in functions}
