"""GGUF files of Gemma 3n, Gemma 4 and multi-head latent attention answer as the safetensors files
that they are made of.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quire import LLM, EngineArgs, ModelLoadError, SamplingParams
from quire.frontend.diagnosis.model import check_model
from quire.frontend.model_info.plan import make_plan
from quire.ipc.models.gguf import GGUFFile, GGUFTensor, Metadata
from quire.ipc.models.gguf_families import deepseek2_config, gemma3n_config, gemma4_config
from quire.ipc.models.gguf_weights import check_gguf_tensors
from quire.tests.gguf_families import round_to_blocks, write_family_gguf
from quire.tests.tiny_models import GEMMA4_EXPERTS, save_tiny_model

SETTINGS: dict[str, Any] = dict(engine="inproc", max_model_len=256, num_threads=1)
PROMPTS = [{"prompt_token_ids": [3 + i % 290 for i in range(n)]} for n in (5, 90)]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": ("gemma3n_text", {"vocab_size_per_layer_input": 320, "laurel_rank": 32}),
    "gemma4, inputs of layers": ("gemma4_text", {"hidden_size_per_layer_input": 32}),
    "gemma4, experts": ("gemma4_text", GEMMA4_EXPERTS),
    "DeepSeek V2": ("deepseek_v2", {}),
    "DeepSeek V3": (
        "deepseek_v3",
        {"rope_parameters": YARN, "qk_nope_head_dim": 32, "kv_lora_rank": 64},
    ),
    "GLM-4.7-Flash": ("glm4_moe_lite", {}),
    "DeepSeek V3.2": ("deepseek_v32", {"rope_parameters": YARN}),
    "GLM-5": ("glm_moe_dsa", {}),
}


def answers(model: Path, dtype: str = "float32") -> list[list[int]]:
    with LLM(str(model), dtype=dtype, **SETTINGS) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def likeliest(model: Path) -> list[dict[int, float]]:
    """The log-probabilities of the likeliest first tokens of the answers in bfloat16."""
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=8)
    with LLM(str(model), dtype="bfloat16", **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, one)
    of_outputs = (output.outputs[0].logprobs for output in outputs)
    return [{token: one.logprob for token, one in of[0].items()} for of in of_outputs if of]


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("name", MODELS)
def test_it_answers_as_its_safetensors(name: str, tmp_path: Path) -> None:
    """Only the metadata describes the model. Plan and doctor find every tensor as well."""
    kind, overrides = MODELS[name]
    directory, path = save_tiny_model(tmp_path / "model", kind, **overrides), tmp_path / "m.gguf"
    write_family_gguf(path, directory)
    assert answers(path) == answers(directory)
    args = EngineArgs(str(path), dtype="float32")
    of_directory = make_plan(EngineArgs(str(directory), dtype="float32"))
    in_files = of_directory.weights_bytes + of_directory.mapped_bytes  # blocks are not mapped
    assert make_plan(args).weights_bytes == in_files
    assert make_plan(args).kv_bytes_per_token == of_directory.kv_bytes_per_token
    findings = {finding.name: finding for finding in check_model(args)}
    assert {name for name, finding in findings.items() if finding.status == "fail"} == set()


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_multiplied_as_they_are(name: str, tmp_path: Path) -> None:
    """In float32 they are the numbers that they stand for; in bfloat16 memory holds blocks."""
    kind, overrides = MODELS[name]
    directory, path = save_tiny_model(tmp_path / "model", kind, **overrides), tmp_path / "m.gguf"
    round_to_blocks(directory, "Q8_0")
    write_family_gguf(path, directory, "Q8_0")
    exact = answers(directory)
    assert answers(path) == exact
    for numbers, blocks in zip(likeliest(directory), likeliest(path), strict=True):
        best = max(numbers, key=numbers.__getitem__)
        assert abs(numbers[best] - blocks[best]) < 0.5
    plans = [make_plan(EngineArgs(str(path), dtype=dtype)) for dtype in ("float32", "bfloat16")]
    assert [plan.keeps_blocks for plan in plans] == [False, True]
    assert plans[1].weights_bytes < plans[0].weights_bytes / 2


GEMMA4 = {
    "block_count": 3,
    "attention.sliding_window_pattern": [True, True, False],
    "attention.key_length": 32,
    "attention.key_length_swa": 16,
    "attention.head_count_kv": [2, 2, 1],
    "attention.shared_kv_layers": 1,
    "feed_forward_length": [8, 8, 16],
}


@pytest.mark.parametrize(
    ("changes", "factors", "message"),
    [
        ({"attention.sliding_window_pattern": [True]}, [1.0], "sliding_window_pattern must be"),
        ({"attention.value_length": 16}, [1.0], "attention.value_length must be the size"),
        ({"rope.dimension_count_swa": 8}, [1.0], "rope.dimension_count_swa must be the size"),
        ({"attention.head_count_kv": [2, 1, 1]}, [1.0], "head_count_kv must be the same"),
        ({"attention.head_count_kv": [2, "1", 1]}, [1.0], "head_count_kv must be an integer"),
        ({"attention.shared_kv_layers": "1"}, [1.0], "shared_kv_layers must be an integer"),
        ({"feed_forward_length": [8, 9, 16]}, [1.0], "feed_forward_length must be equal"),
        ({}, None, "there is no tensor rope_freqs.weight"),
        ({}, [1.0, 2.0], "rope_freqs.weight must be 1"),
        ({}, [1e30, 1.0], "rope_freqs.weight must be 1"),
    ],
)
def test_metadata_that_gemma_4_cannot_have(
    changes: dict[str, Any], factors: list[float] | None, message: str
) -> None:
    found = gemma4_config({**GEMMA4}, {}, [1.0, 1e30])
    assert found["use_double_wide_mlp"] and found["intermediate_size"] == 8
    assert found["per_layer_config"] == {"2": {"head_dim": 32, "num_key_value_heads": 1}}
    with pytest.raises(ModelLoadError, match=message):
        gemma4_config(GEMMA4 | changes, {}, factors)


def test_metadata_of_gemma_3n() -> None:
    """The cuts of activations, of which a file has 32 bits, are parts that fall away."""
    tables = {
        f"{name}.weight": GGUFTensor(name, (rows, 64), "F32", Path("m.gguf"), 0, 4)
        for name, rows in (("per_layer_token_embd", 320), ("token_embd", 320))
    }
    own: dict[str, Any] = {"activation_sparsity_scale": [1.6448533535003662, -float("inf")]}
    found = gemma3n_config(own | {"feed_forward_length": [8, 16]}, tables, None)
    assert found == {
        "rope_local_base_freq": 10_000.0,
        "intermediate_size": [8, 16],
        "activation_sparsity_pattern": [0.95, 0.0],
        "vocab_size_per_layer_input": 320,
    }
    with pytest.raises(ModelLoadError, match="activation_sparsity_scale must be a list of numbers"):
        gemma3n_config({"activation_sparsity_scale": 1.6}, tables, None)
    few = {name: table._replace(shape=(300, 64)) for name, table in tables.items()}
    few["token_embd.weight"] = tables["token_embd.weight"]
    with pytest.raises(ModelLoadError, match="per_layer_token_embd.weight must have as many rows"):
        gemma3n_config({}, few, None)


DEEPSEEK2 = {
    "block_count": 3,
    "attention.head_count": 4,
    "attention.key_length": 56,
    "attention.key_length_mla": 40,
    "attention.value_length_mla": 32,
    "rope.dimension_count": 16,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope.dimension_count": 40}, "rope.dimension_count must be less than"),
        ({"attention.key_length_mla": "40"}, "rope.dimension_count must be less than"),
        ({"rope.scaling.yarn_log_multiplier": "1"}, "yarn_log_multiplier must be a number"),
        ({"expert_gating_func": 2}, "expert_gating_func must be 1 without exp_probs_b, got 2"),
        ({"block_count": "3"}, "block_count and nextn_predict_layers must be integers"),
        ({"expert_weights_norm": True}, "expert_weights_norm must be false"),
    ],
)
def test_metadata_that_latent_attention_cannot_have(changes: dict[str, Any], message: str) -> None:
    found = deepseek2_config(
        DEEPSEEK2 | {"expert_gating_func": 1, "nextn_predict_layers": 1}, {}, None
    )
    assert found["num_hidden_layers"] == 2
    assert found["architectures"] == ["DeepseekV2ForCausalLM"]
    assert (found["qk_nope_head_dim"], found["v_head_dim"]) == (24, 32)
    with pytest.raises(ModelLoadError, match=message):
        deepseek2_config(DEEPSEEK2 | changes, {}, None)


def test_parts_of_the_weight_of_keys_and_values_that_do_not_fit() -> None:
    whole = "model.layers.0.self_attn.kv_b_proj.weight"
    keys, values = "blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight"
    for shapes, message in (
        ({keys: (4, 40, 24)}, "there is no second part for blk.0.attn_k_b.weight"),
        ({keys: (4, 24, 40), values: (4, 32, 40)}, "the model needs 40 in dimension 1"),
        ({keys: (4, 40, 24), values: (4, 40, 32)}, "the model needs 40 in dimension 2"),
        ({keys: (4, 40, 24), values: (4, 30, 40)}, r"the model needs \[224, 40\]"),
    ):
        tensors = {
            name: GGUFTensor(name, shape, "F32", Path("m.gguf"), 0, 4)
            for name, shape in shapes.items()
        }
        file = GGUFFile([Path("m.gguf")], Metadata({"general.architecture": "deepseek2"}), tensors)
        with pytest.raises(ModelLoadError, match=message):
            check_gguf_tensors(file, {whole: [224, 40]})
