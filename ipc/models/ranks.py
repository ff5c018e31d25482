"""What several ranks can run, and what each holds: the frontend and the executor refuse the rest by
name.

Must not know: processes, tensors, how a layer is divided.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..config import EngineConfig, ModelConfig
from ..errors import InvalidParameterError, ModelLoadError
from ..operating_system import SYSTEM, Darwin, Linux
from .state_layout import state_bytes

if TYPE_CHECKING:
    from .architectures import Architecture
    from .decoder_config import DecoderConfig

Count = tuple[str, int]  # of heads or features, and its name


def num_ranks(config: EngineConfig) -> int:
    """Processes that run the model together."""
    device = config.device_config
    return device.tensor_parallel_size * device.pipeline_parallel_size


def num_steps_in_flight(config: EngineConfig) -> int:
    """The most steps that run at the same time, or wait for the one that runs."""
    num_stages = config.device_config.pipeline_parallel_size
    return max(num_stages, 2 if config.scheduler_config.async_scheduling else 1)


def layers_of_stages(
    num_stages: int, num_layers: int, last_more: float = 0.0, cuts: Sequence[int] | None = None
) -> list[range]:
    """The layers of each stage: neighbours. last_more: layers that take as long as what the last
    stage computes besides. cuts: the first layers that a stage after the first one may have, in
    order, num_stages - 1 or more; None: any. All stages take about equally long, as far as the cuts
    allow, and have one layer or more.
    """
    places = range(1, num_layers) if cuts is None else cuts
    firsts, begin = [0], 0
    for stage in range(1, num_stages):
        even = int((num_layers + last_more) * stage / num_stages + 0.5)
        # the stages that follow need cuts of their own
        free = range(begin, len(places) - (num_stages - 1 - stage))
        begin = min(free, key=lambda i: (abs(places[i] - even), i))
        firsts.append(places[begin])
        begin += 1
    return list(map(range, firsts, [*firsts[1:], num_layers]))


def cuts_of(config: DecoderConfig, readers: int = 0) -> list[int]:
    """The first layers that a stage after the first one may have: it has the layers whose keys and
    values its own layers read. readers: how many of the first layers add rows of images, which the
    first stage has.
    """
    reads_before = set[int]()  # places that a layer's keys and values would have to pass
    for index in range(config.num_hidden_layers):
        if (owner := config.layer(index).kv_from) is not None:
            reads_before.update(range(owner + 1, index + 1))
    places = range(max(1, readers), config.num_hidden_layers)
    return [place for place in places if place not in reads_before]


def stages_of(config: DecoderConfig, num_stages: int, readers: int = 0) -> list[range]:
    """The layers of each stage of a model; see layers_of_stages and cuts_of. Call it for no more
    stages than cuts allow.
    """
    last_more, cuts = head_in_layers(config), cuts_of(config, readers)
    return layers_of_stages(num_stages, config.num_hidden_layers, last_more, cuts)


def num_readers(model: ModelConfig) -> int:
    """How many of the first layers add rows of images."""
    return 0 if model.vision is None else model.vision.num_vectors - 1


def head_in_layers(config: DecoderConfig) -> float:
    """How many layers take as long as the output head, by the weights that a token multiplies. Half
    of that: a decoded token needs the head, that of a prompt does not.
    """
    num_layers = config.num_hidden_layers
    weights = sum(multiplied_weights(config, layer) for layer in range(num_layers)) / num_layers
    return config.has_lm_head * config.vocab_size * config.hidden_size / weights / 2


def multiplied_weights(config: DecoderConfig, index: int) -> int:
    """The weights of a layer that a token multiplies."""
    size, layer, num_weights = config.hidden_size, config.layer(index), 0
    if layer.has_attention and config.latent is not None:
        num_weights += config.latent.multiplied_weights(size, config.num_attention_heads)
    elif layer.has_attention:
        num_weights += sum(rows * columns for rows, columns in config.attention_shapes(layer))
    if layer.mixer is not None:
        num_weights += sum(rows * columns for rows, columns in layer.mixer.linear_shapes(size))
    if not layer.has_mlp:
        return num_weights
    matrices, experts = 2 + config.has_gated_mlp, config.experts
    if experts is None or index in experts.dense_layers:
        return num_weights + matrices * size * config.intermediate_size
    width = experts.latent_size or size
    num_weights += (
        matrices * experts.per_token * experts.size * width + 2 * experts.latent_size * size
    )
    return num_weights + matrices * experts.shared_size * size


def state_bytes_of_rank(config: EngineConfig, itemsize: int) -> int:
    """Bytes of the states of one request on a rank, at most. itemsize: of a number of the model's
    dtype.
    """
    architecture, _ = row_of(config.model_config)
    assert architecture is not None  # check_ranks
    shape = architecture.parse(config.model_config.hf_config)
    device = config.device_config
    size, mixers = (
        device.tensor_parallel_size,
        [shape.layer(index).mixer for index in range(shape.num_hidden_layers)],
    )
    stages = stages_of(shape, device.pipeline_parallel_size, num_readers(config.model_config))
    return max(
        state_bytes(
            (one.of_rank(size).state_parts for index in own if (one := mixers[index]) is not None),
            itemsize,
        )
        for own in stages
    )


def check_ranks(config: EngineConfig, system: Linux | Darwin = SYSTEM) -> None:
    """`config` is resolved. Raises InvalidParameterError for what several ranks cannot do."""
    if config.device_config.distributed_executor_backend == "ray":
        _check_ray(config)
    if num_ranks(config) == 1:
        return
    name = "tensor_parallel_size"
    if config.device_config.tensor_parallel_size == 1:
        name = "pipeline_parallel_size"
    if not system.has_ranks:
        raise _refusal(
            config,
            name,
            "must be 1 on macOS, which has no eventfd for processes to wake each other",
        )
    device = config.device_config
    if device.distributed_executor_backend == "ray" and device.device != "cpu":
        option = f"device={device.device} and distributed_executor_backend=ray"
        raise _refusal(config, name, f"must be 1 with {option}, whose ranks run on CPUs")
    _check_model(config, name)


def _check_ray(config: EngineConfig) -> None:
    name = "distributed_executor_backend"
    if num_ranks(config) == 1:
        raise InvalidParameterError(
            name, "ray needs tensor_parallel_size or pipeline_parallel_size above 1"
        )
    if config.device_config.data_parallel_cores:
        raise InvalidParameterError(
            "data_parallel_cores", f"names cores of this machine; must be empty with {name}=ray"
        )
    if not _is_installed("ray"):
        raise InvalidParameterError(name, "ray needs the package ray: pip install ray")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # it is in sys.modules without a spec
        return sys.modules.get(module) is not None


def _check_model(config: EngineConfig, name: str) -> None:
    model = config.model_config
    try:
        architecture, found = row_of(model)
    except ModelLoadError as error:
        raise _refusal(config, name, f"must be 1 with this model ({error})") from error
    if architecture is None:
        raise _refusal(config, name, f"must be 1 with a model of type {found}")
    shape, size = architecture.parse(model.hf_config), config.device_config.tensor_parallel_size
    divided, shared = _counts(shape)
    for what, count in divided:
        if count % size:
            raise _refusal(config, name, f"must divide the model's {what}={count}")
    for what, count in shared:
        if count % size and size % count:
            raise _refusal(
                config, name, f"must divide the model's {what}={count}, or be a multiple of it"
            )
    _check_stages(config, shape, found)


def _counts(shape: DecoderConfig) -> tuple[dict[Count, None], dict[Count, None]]:
    """What tensor ranks divide, and what they divide or, where it is fewer than ranks, have in
    common; in order.
    """
    divided: dict[Count, None] = {}
    shared: dict[Count, None] = {}
    experts = shape.experts
    for index in range(shape.num_hidden_layers):
        layer = shape.layer(index)
        if layer.has_attention:
            divided["num_attention_heads", shape.num_attention_heads] = None
            if layer.kv_from is None and shape.latent is None:
                shared["num_key_value_heads", layer.num_kv_heads] = None
        if layer.mixer is not None:
            divided.update(dict.fromkeys(layer.mixer.divided().items()))
            shared.update(dict.fromkeys(layer.mixer.shared().items()))
        if not layer.has_mlp:
            continue
        if experts is None or experts.names.is_beside_mlp or index in experts.dense_layers:
            divided["intermediate_size", layer.intermediate_size] = None
        else:
            divided["the shared expert's size", experts.shared_size] = None
        if experts is not None:
            divided["an expert's size", experts.size] = None
    return divided, shared


def _check_stages(config: EngineConfig, shape: DecoderConfig, found: str) -> None:
    """found: the name of the architecture."""
    name, count = "pipeline_parallel_size", config.device_config.pipeline_parallel_size
    if count > shape.num_hidden_layers:
        most = f"num_hidden_layers={shape.num_hidden_layers}"
        raise InvalidParameterError(name, f"must be at most the model's {most}, got {count}")
    readers = num_readers(config.model_config)
    most = 1 + len(cuts_of(shape, readers))
    if count > most:
        problem = "layers that read keys and values of another one belong to its stage"
        if readers:
            problem = f"{readers} layers add rows of images, and belong to the first stage"
        raise _refusal(config, name, f"must be at most {most} with {found}: {problem}")


def row_of(model: ModelConfig) -> tuple[Architecture | None, str]:
    """The row that a decoder is built from, and its name; None and the type of other models. Raises
    ModelLoadError.
    """
    # all architectures, which an engine with one rank does not need
    from .architectures import ARCHITECTURES
    from .fallback_architectures import QUIRE, choose_implementation

    implementation, found = choose_implementation(model.hf_config, model.model_impl)
    return (ARCHITECTURES.get(found) if implementation == QUIRE else None), found


def _refusal(config: EngineConfig, name: str, problem: str) -> InvalidParameterError:
    return InvalidParameterError(name, f"{problem}, got {getattr(config.device_config, name)}")
