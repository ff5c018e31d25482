"""Where the engines of tests run: on a CPU, or on a GPU with pytest's option --device cuda."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from quire.executor.kernel_choice import INVARIANT_ON_A_GPU
from quire.frontend.engine_args import EngineArgs

KV_CACHE_BYTES = 2**30  # of one engine on a GPU, which several test processes share
# Programs that a test starts know it, too. A name with QUIRE_ would be one of a setting.
_VARIABLE = "DEVICE_OF_TESTS"
_INVARIANT = "KERNELS_OF_TESTS_ARE_INVARIANT"


def engine_device() -> str:
    """The device of engines whose test names none: "cpu" or "cuda"."""
    return os.environ.get(_VARIABLE, "cpu")


def use_device(name: str) -> None:
    """Makes `name` the device of engines whose test names none."""
    os.environ[_VARIABLE] = name
    if name != "cpu" or Path("/dev/nvidiactl").exists():  # where "auto" may mean the GPU
        EngineArgs.create_engine_config = _with_device(EngineArgs.create_engine_config)


def use_invariant_kernels(wanted: bool) -> None:
    """Whether engines on a GPU whose test names no device get the kernels of batch_invariant."""
    os.environ[_INVARIANT] = "1" if wanted else ""


def engine_kernels() -> dict[str, str]:
    """The kernels of engines whose test names none."""
    is_invariant = engine_device() != "cpu" and os.environ.get(_INVARIANT)
    return INVARIANT_ON_A_GPU if is_invariant else {}


def _with_device(create_engine_config: Any) -> Any:
    @functools.wraps(create_engine_config)
    def create(args: EngineArgs) -> Any:
        given = vars(args)
        if given["device"] == "auto":
            given = given | {"device": engine_device()}
            has_default = given["kv_cache_memory_bytes"] is given["num_gpu_blocks_override"] is None
            if engine_device() != "cpu" and has_default:
                given["kv_cache_memory_bytes"] = KV_CACHE_BYTES
            given = given | {"kernels": engine_kernels() | given["kernels"]}
        return create_engine_config(EngineArgs(**given))

    return create
