"""The part of the machine that one of several engines keeps to.

Must not know: torch, how the parts were chosen.
"""

from __future__ import annotations

import os

from ..ipc.config import DeviceConfig
from ..ipc.errors import InvalidParameterError
from ..ipc.machine import use_cores, visible_gpus

VARIABLE = "CUDA_VISIBLE_DEVICES"


def take_share(device: DeviceConfig) -> None:
    """Binds this process to the engine's cores and GPUs, before CUDA is initialised.

    Raises InvalidParameterError if there are too few GPUs.
    """
    if device.cores:
        use_cores(device.cores)
    if device.device == "cuda" and device.data_parallel_size > 1:
        number = device.tensor_parallel_size * device.pipeline_parallel_size
        try:
            own = visible_gpus(device.data_parallel_rank, number, os.environ.get(VARIABLE))
        except ValueError as error:
            raise InvalidParameterError("data_parallel_size", str(error)) from None
        os.environ[VARIABLE] = own
