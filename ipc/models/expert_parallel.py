"""Which engine has which experts, and what engines that share experts can run: the rest is refused
by name.

Must not know: processes, tensors, how rows travel.
"""

from __future__ import annotations

from ..config import EngineConfig
from ..errors import InvalidParameterError, ModelLoadError
from .ranks import row_of

NAME = "enable_expert_parallel"


def shares_experts(config: EngineConfig) -> bool:
    """Whether the engines of this configuration each have a part of the experts."""
    device = config.device_config
    return device.enable_expert_parallel and device.data_parallel_size > 1


def experts_of(rank: int, size: int, count: int) -> range:
    """The experts of one of `size` engines: neighbours, equally many."""
    return range(count * rank // size, count * (rank + 1) // size)


def check_expert_parallel(config: EngineConfig) -> None:
    """`config` is resolved. Raises InvalidParameterError for what such engines cannot do.

    Engines meet in each pass of the model, so each step must be one pass, without a pass that only
    one of them decides on.
    """
    device, scheduling = config.device_config, config.scheduler_config
    if not shares_experts(config):
        return
    for is_asked, option in (
        (device.device != "cpu", f"device={device.device}"),
        (device.distributed_executor_backend != "mp", "distributed_executor_backend=ray"),
        (scheduling.async_scheduling, "async_scheduling"),
        (scheduling.num_scheduler_steps > 1, "num_scheduler_steps > 1"),
    ):
        if is_asked:
            raise InvalidParameterError(NAME, f"cannot be used with {option}")
    _check_model(config)


def _check_model(config: EngineConfig) -> None:
    model = config.model_config
    try:
        architecture, found = row_of(model)
    except ModelLoadError as error:
        raise InvalidParameterError(NAME, f"cannot be used with this model ({error})") from error
    experts = None if architecture is None else architecture.parse(model.hf_config).experts
    if experts is None:
        raise InvalidParameterError(
            NAME,
            f"needs a mixture of experts on a page of Quire's own, got a model of type {found}",
        )
    size = config.device_config.data_parallel_size
    if experts.count % size:
        raise InvalidParameterError(
            "data_parallel_size",
            f"must divide the model's {experts.count} experts with {NAME}, got {size}",
        )
