"""Which engine has which experts, and what engines that share them refuse, by name."""

from __future__ import annotations

import msgspec
import pytest
from quire.frontend.clients.connect import start_client
from quire.frontend.clients.own_loop import run_once
from quire.frontend.engine_args import EngineArgs
from quire.ipc.errors import InvalidParameterError
from quire.ipc.models.expert_parallel import check_expert_parallel, experts_of, shares_experts
from quire.tests.tiny_models import save_tiny_model

SHARED = {"data_parallel_size": 2, "enable_expert_parallel": True, "device": "cpu"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    kinds = ("qwen2", "mixtral")
    return {kind: str(save_tiny_model(tmp_path_factory.mktemp(kind), kind)) for kind in kinds}


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        ("mixtral", {"async_scheduling": True}, "with async_scheduling"),
        ("mixtral", {"num_scheduler_steps": 2}, "with num_scheduler_steps > 1"),
        ("mixtral", {"model_impl": "transformers"}, "needs a mixture of experts"),
        ("qwen2", {}, "needs a mixture of experts"),
        ("mixtral", {"data_parallel_size": 3}, "must divide the model's 4 experts .* got 3"),
    ],
)
def test_what_is_refused(models, kind: str, arguments: dict, words: str) -> None:
    name = "data_parallel_size" if "data_parallel_size" in arguments else "enable_expert_parallel"
    with pytest.raises(InvalidParameterError, match=f"^{name}: .*{words}"):
        EngineArgs(models[kind], **SHARED | arguments).create_engine_config()


def test_what_is_accepted(models) -> None:
    config = EngineArgs(models["mixtral"], enable_lora=True, **SHARED).create_engine_config()
    assert shares_experts(config)
    device = msgspec.structs.replace(config.device_config, device="cuda")
    with pytest.raises(InvalidParameterError, match="cannot be used with device=cuda"):
        check_expert_parallel(msgspec.structs.replace(config, device_config=device))
    with pytest.raises(InvalidParameterError, match="data_parallel_size: is for engines in other"):
        run_once(start_client(config, "inproc"))


def test_one_engine_has_all_experts(models) -> None:
    args = EngineArgs(models["qwen2"], enable_expert_parallel=True, enable_lora=True, device="cpu")
    assert not shares_experts(args.create_engine_config())


def test_experts_are_divided() -> None:
    assert [list(experts_of(rank, 3, 6)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
