"""torch.distributed's process groups, with the backend that carries tensors of a device.

Must not know: ranks, engines, what the tensors are, where the addresses come from.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"  # no connection from elsewhere is taken


def make_process_group(
    store: Any,
    rank: int,
    size: int,
    timeout_s: float,
    *,
    host: str = LOOPBACK,
    device: torch.device | None = None,
) -> Any:
    """gloo, or NCCL for tensors of a GPU. Waits for the other members, NCCL at its first operation.

    store: where the members find each other. timeout_s: of an operation. host: the address of this
    machine that the others know; gloo listens there. device: by default the CPU.

    Raises RuntimeError.
    """
    distributed: Any = dist  # whose types are incomplete
    timeout = timedelta(seconds=timeout_s)
    if device is not None and device.type == "cuda":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return distributed.ProcessGroupNCCL(store, rank, size, options)
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
    options._timeout, options._threads = timeout, 1
    return gloo(store, rank, size, options)
