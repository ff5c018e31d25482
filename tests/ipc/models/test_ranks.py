"""What several ranks refuse, by name."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import msgspec
import pytest
from quire.frontend.engine_args import EngineArgs
from quire.ipc.errors import InvalidParameterError
from quire.ipc.models.ranks import check_ranks, num_ranks, num_steps_in_flight
from quire.tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {
        "qwen2": {},
        "gpt_oss": {},
        "qwen3_next": {"linear_num_key_heads": 3, "linear_num_value_heads": 6},
        "nemotron_h": {"mamba_num_heads": 3, "n_groups": 3},
        "kimi_linear": {"linear_num_heads": 3},
        "gemma4_text": {},
    }
    return {
        kind: str(save_tiny_model(tmp_path_factory.mktemp(kind), kind, **arguments))
        for kind, arguments in made.items()
    }


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        ("qwen2", {"tensor_parallel_size": 3}, "must divide the model's num_attention_heads=4"),
        ("qwen2", {"model_impl": "transformers"}, "must be 1 with a model of type qwen2"),
        ("qwen3_next", {}, "must divide the model's linear_num_key_heads=3, or be a multiple of"),
        ("kimi_linear", {}, "must divide the model's linear_num_heads=3, got 2"),
        ("nemotron_h", {}, "must divide the model's heads of Mamba 2=3, got 2"),
    ],
)
def test_what_is_refused(models, kind: str, arguments: dict, words: str) -> None:
    arguments = {"tensor_parallel_size": 2, "device": "cpu"} | arguments
    with pytest.raises(InvalidParameterError, match=f"tensor_parallel_size: .*{words}"):
        EngineArgs(models[kind], **arguments).create_engine_config()


def test_what_is_accepted(models) -> None:
    config = EngineArgs(models["qwen2"], tensor_parallel_size=2).create_engine_config()
    assert num_ranks(config) == 2
    device = msgspec.structs.replace(config.device_config, device="cuda")
    check_ranks(msgspec.structs.replace(config, device_config=device))


def test_what_stages_refuse(models) -> None:
    """Layers 4 and 5 read keys and values of layers 2 and 3, so a stage begins at 1 or 2."""
    words = (
        "pipeline_parallel_size: must be at most 3 with Gemma4ForCausalLM: layers that read keys "
        "and values of another one belong to its stage, got 4"
    )
    with pytest.raises(InvalidParameterError, match=words):
        EngineArgs(models["gemma4_text"], pipeline_parallel_size=4).create_engine_config()
    EngineArgs(models["gemma4_text"], pipeline_parallel_size=3).create_engine_config()


def test_stages(models) -> None:
    def config(**arguments):
        return EngineArgs(models["qwen2"], pipeline_parallel_size=2, **arguments)

    config(num_scheduler_steps=4).create_engine_config()
    for is_async in (False, True):
        of_stages = config(async_scheduling=is_async).create_engine_config()
        assert num_steps_in_flight(of_stages) == 2
    one = EngineArgs(models["qwen2"]).create_engine_config()
    assert num_steps_in_flight(one) == 1
    scheduling = msgspec.structs.replace(one.scheduler_config, async_scheduling=True)
    assert num_steps_in_flight(msgspec.structs.replace(one, scheduler_config=scheduling)) == 2


def test_one_rank_is_never_refused(models) -> None:
    EngineArgs(models["gpt_oss"]).create_engine_config()


def test_ray(models, monkeypatch) -> None:
    def check(**arguments) -> None:
        arguments["distributed_executor_backend"] = "ray"
        EngineArgs(models["qwen2"], **arguments).create_engine_config()

    words = "distributed_executor_backend: ray needs tensor_parallel_size or pipeline_parallel_size"
    with pytest.raises(InvalidParameterError, match=words):
        check()
    with pytest.raises(InvalidParameterError, match="data_parallel_cores: .* must be empty with"):
        check(tensor_parallel_size=2, data_parallel_size=2, data_parallel_cores=["0", "1"])
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidParameterError, match="needs the package ray: pip install ray"):
        check(pipeline_parallel_size=2)
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    sys.modules["ray"].__spec__ = ModuleSpec("ray", None)
    check(pipeline_parallel_size=2)
    with pytest.raises(InvalidParameterError, match="must be 1 with device=cuda and .*=ray"):
        check(device="cuda", tensor_parallel_size=2)
