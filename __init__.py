"""Quire, an LLM inference engine. `from quire import LLM, SamplingParams`.

Must not know: anything at import time; names resolve on first use, so that `import quire` takes
milliseconds.
"""

import os
import sys
from importlib import import_module

TYPE_CHECKING = False  # the name that type checkers know; importing typing takes milliseconds

__version__ = "0.1.0"

if TYPE_CHECKING:  # "as": a name that the package exports
    # isort: off
    from .frontend.llm import LLM as LLM
    from .frontend.llm_engine import LLMEngine as LLMEngine
    from .frontend.async_llm import AsyncLLM as AsyncLLM, AsyncLLMEngine as AsyncLLMEngine
    from .frontend.clients.client import EngineClient as EngineClient
    from .frontend.clients.inproc_client import InprocClient as InprocClient
    from .frontend.clients.mp_client import MPClient as MPClient
    from .core.engine_core import EngineCore as EngineCore
    from .frontend.engine_args import EngineArgs as EngineArgs, AsyncEngineArgs as AsyncEngineArgs
    from .frontend.outputs import (
        RequestOutput as RequestOutput,
        CompletionOutput as CompletionOutput,
        Logprob as Logprob,
    )
    from .frontend.pooling_outputs import (
        PoolingRequestOutput as PoolingRequestOutput,
        PoolingOutput as PoolingOutput,
        EmbeddingRequestOutput as EmbeddingRequestOutput,
        ClassificationRequestOutput as ClassificationRequestOutput,
        ScoringRequestOutput as ScoringRequestOutput,
    )
    from .frontend.requests.beam_search import (
        BeamSearchParams as BeamSearchParams,
        BeamSearchOutput as BeamSearchOutput,
        BeamSearchSequence as BeamSearchSequence,
    )
    from .ipc.params import (
        SamplingParams as SamplingParams,
        StructuredOutputsParams as StructuredOutputsParams,
        PoolingParams as PoolingParams,
        RequestOutputKind as RequestOutputKind,
    )
    from .ipc.lora import LoRARequest as LoRARequest
    from .ipc.config import EngineConfig as EngineConfig
    from .ipc.errors import (
        QuireError as QuireError,
        InvalidParameterError as InvalidParameterError,
        ModelLoadError as ModelLoadError,
        EngineStartError as EngineStartError,
        EngineDeadError as EngineDeadError,
        EnginePausedError as EnginePausedError,
        EngineUsageError as EngineUsageError,
    )
    # isort: on

_HOME = {
    "LLM": "frontend.llm",
    "LLMEngine": "frontend.llm_engine",
    "AsyncLLM": "frontend.async_llm",
    "AsyncLLMEngine": "frontend.async_llm",
    "EngineClient": "frontend.clients.client",
    "InprocClient": "frontend.clients.inproc_client",
    "MPClient": "frontend.clients.mp_client",
    "EngineCore": "core.engine_core",
    "EngineArgs": "frontend.engine_args",
    "AsyncEngineArgs": "frontend.engine_args",
    "RequestOutput": "frontend.outputs",
    "CompletionOutput": "frontend.outputs",
    "Logprob": "frontend.outputs",
    "PoolingRequestOutput": "frontend.pooling_outputs",
    "PoolingOutput": "frontend.pooling_outputs",
    "EmbeddingRequestOutput": "frontend.pooling_outputs",
    "ClassificationRequestOutput": "frontend.pooling_outputs",
    "ScoringRequestOutput": "frontend.pooling_outputs",
    "BeamSearchParams": "frontend.requests.beam_search",
    "BeamSearchOutput": "frontend.requests.beam_search",
    "BeamSearchSequence": "frontend.requests.beam_search",
    "SamplingParams": "ipc.params",
    "StructuredOutputsParams": "ipc.params",
    "PoolingParams": "ipc.params",
    "LoRARequest": "ipc.lora",
    "RequestOutputKind": "ipc.params",
    "EngineConfig": "ipc.config",
    "QuireError": "ipc.errors",
    "InvalidParameterError": "ipc.errors",
    "ModelLoadError": "ipc.errors",
    "EngineStartError": "ipc.errors",
    "EngineDeadError": "ipc.errors",
    "EnginePausedError": "ipc.errors",
    "EngineUsageError": "ipc.errors",
}

__all__ = ["__version__", *_HOME]


NO_WINDOWS = (
    "Quire does not run on Windows itself: install it in the Windows Subsystem for Linux, WSL 2 "
    "(in PowerShell: wsl --install), and run it there"
)


def __getattr__(name: str):
    if sys.platform == "win32":
        raise ImportError(NO_WINDOWS)
    if name == "testing":
        return import_module(".kernels.testing", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    if (other := shadowed_package()) is not None:
        import warnings

        warnings.warn(
            f"quire is imported from {__path__[0]}, which the import path names before the "
            f"installed package in {other}; to use that one, rename the folder or run the program "
            f"elsewhere",
            stacklevel=2,
        )
    value = getattr(import_module("." + _HOME[name], __name__), name)
    globals()[name] = value
    return value


def shadowed_package() -> str | None:
    """The directory of a second package named quire that this one hides: of the installed one,
    where a clone lies beside the script. None where there is none.
    """
    for entry in sys.path:
        other = os.path.join(entry, "quire")
        if os.path.isfile(os.path.join(other, "__init__.py")):
            if not os.path.samefile(other, __path__[0]):
                return other
    return None


def __dir__() -> list[str]:
    return sorted(__all__)
