"""What config.json says about experts; mistakes are named."""

from __future__ import annotations

import pytest
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.architectures import ARCHITECTURES
from quire.ipc.models.experts_config import ExpertsConfig, ExpertsFormat, first_layers
from quire.tests.tiny_models import make_tiny_config


def parse(kind: str, **change: object) -> ExpertsConfig | None:
    hf_config = {**make_tiny_config(kind).to_dict(), **change}
    name = next(n for n, known in ARCHITECTURES.items() if known.model_type == kind)
    return ARCHITECTURES[name].parse(hf_config).experts


def test_each_familys_experts() -> None:
    def expect(kind: str, *args: int, **options: object) -> ExpertsConfig:
        names = next(known.experts for known in ARCHITECTURES.values() if known.model_type == kind)
        return ExpertsConfig(*args, names=names, **options)

    assert parse("mixtral") == expect("mixtral", 4, 2, 96, renormalizes=True)
    assert parse("qwen2_moe") == expect("qwen2_moe", 6, 3, 32, renormalizes=False, shared_size=80)
    qwen3_moe = expect("qwen3_moe", 8, 3, 48, renormalizes=True, dense_layers=(0, 2))
    assert parse("qwen3_moe") == qwen3_moe
    olmoe = parse("olmoe", norm_topk_prob=True)
    assert olmoe == expect("olmoe", 5, 2, 96, renormalizes=True)
    gpt_oss = expect("gpt_oss", 5, 2, 96, renormalizes=True, clamped_swiglu=(1.702, 0.9))
    assert parse("gpt_oss") == gpt_oss
    assert parse("llama") is None


def test_dense_layers_are_listed_or_between_every_nth() -> None:
    dense = parse("qwen2_moe", mlp_only_layers=[1], decoder_sparse_step=1)
    assert dense is not None and dense.dense_layers == (1,)
    dense = parse("qwen2_moe", mlp_only_layers=[2], decoder_sparse_step=3)
    assert dense is not None and dense.dense_layers == (0, 1, 2)


def test_the_number_of_experts_has_two_names() -> None:
    experts = parse("qwen3_moe", num_experts=None, num_local_experts=6)
    assert experts is not None and experts.count == 6


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("mixtral", {"num_local_experts": None, "num_experts": None}, "lacks num_experts"),
        (
            "mixtral",
            {"num_experts_per_tok": 5},
            "num_experts_per_tok must be an integer from 1 to 4",
        ),
        ("olmoe", {"num_experts": 0}, "num_experts must be an integer from 1 to 65,536, got 0"),
        ("olmoe", {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias=False is not supported"),
        ("qwen2_moe", {"mlp_only_layers": "0"}, "mlp_only_layers must be a list"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer from 1"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ("qwen3_moe", {"moe_intermediate_size": -1}, "moe_intermediate_size must be an integer"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ("llama", {"num_experts": 8}, "num_experts=8 is not supported"),
    ],
    ids=str,
)
def test_mistakes_are_named(kind: str, change: dict[str, object], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        parse(kind, **change)


def test_a_sigmoid_router_with_groups_and_a_shared_expert() -> None:
    """The keys of DeepSeek V3 and of Nemotron 3."""
    names = ExpertsFormat(
        "moe_intermediate_size",
        scoring="sigmoid",
        correction="gate.e_score_correction_bias",
        scale="routed_scaling_factor",
        num_groups="n_group",
        top_groups="topk_group",
        num_shared="n_shared_experts",
        shared_size="moe_intermediate_size",
        shared="shared_experts",
        shared_gate=None,
        dense_layers=first_layers("first_k_dense_replace"),
        latent_size="moe_latent_size",
        is_optional=True,
        block="",
        gate=None,
    )
    keys = {
        "num_hidden_layers": 3,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "moe_latent_size": 16,
    }
    config = names.parse(keys)
    assert config == ExpertsConfig(
        *(8, 2, 24, True, names, 48, (0,)),
        scale=2.5,
        num_groups=4,
        top_groups=2,
        latent_size=16,
    )
    shapes = dict(names.weight_shapes(config, 32))
    assert len(shapes) == 2 + 2 + 8 * 2
    assert shapes["gate.e_score_correction_bias"] == [8]
    assert shapes["fc1_latent_proj.weight"] == [16, 32]
    assert shapes["experts.7.down_proj.weight"] == [16, 24]
    assert names.parse(keys | {"n_routed_experts": 0}) is None
    with pytest.raises(ModelLoadError, match="n_group must be a divisor of the 8 experts"):
        names.parse(keys | {"n_group": 8})
    with pytest.raises(ModelLoadError, match="topk_group must be an integer from 1 to 4"):
        names.parse(keys | {"topk_group": 5})
