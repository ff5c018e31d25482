"""adapter_config.json: scales, patterns, and refusals in one sentence."""

from pathlib import Path

import pytest
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.lora_config import LoraConfig, parse_lora_config

PATH = Path("adapter/adapter_config.json")
PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
LAYER = "model.layers.1.self_attn.q_proj"


def parse(**config) -> LoraConfig:
    return parse_lora_config({**PLAIN, **config}, PATH)


def test_scales():
    assert parse().scale(LAYER) == 2.0
    assert parse(use_rslora=True).scale(LAYER) == 16 / 8**0.5
    assert parse(lora_alpha=5.5).scale(LAYER) == 5.5 / 8


@pytest.mark.parametrize(
    ("name", "matches"),
    [
        ("q_proj", True),
        ("self_attn.q_proj", True),
        (LAYER, True),
        ("layers.1.self_attn.q_proj", True),
        (r"layers\.\d+\.self_attn\.q_proj", True),
        (".*q_proj", True),
        ("q_proj|v_proj", True),
        ("^model.layers.1.self_attn.q_proj", True),
        ("proj", False),
        ("k_proj", False),
        ("layers.2.self_attn.q_proj", False),
        ("^layers.1.self_attn.q_proj", False),
    ],
)
def test_patterns_match_whole_names_or_their_end_at_a_dot(name, matches):
    config = parse(rank_pattern={name: 4}, alpha_pattern={name: 32})
    assert (config.rank(LAYER), config.scale(LAYER)) == ((4, 8.0) if matches else (8, 2.0))


def test_modules_that_the_configuration_does_not_name():
    parse().check_module(LAYER)
    parse(target_modules="all-linear").check_module("anything")
    parse(target_modules=r".*\.(q|k)_proj").check_module("anything")
    parse(layers_to_transform=[0, 1]).check_module(LAYER)
    with pytest.raises(ValueError, match="target_modules"):
        parse(target_modules=["k_proj"]).check_module(LAYER)
    with pytest.raises(ValueError, match="layers_to_transform"):
        parse(layers_to_transform=0).check_module(LAYER)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"peft_type": "IA3"}, "peft_type must be 'LORA', not 'IA3'"),
        ({"peft_type": None}, "peft_type must be"),
        ({"use_dora": True}, "use_dora: DoRA adapters are not supported"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens: activated LoRA"),
        ({"layer_replication": [[0, 2]]}, "layer_replication: replicated layers"),
        ({"lora_bias": True}, "lora_bias: adapters with a bias"),
        ({"bias": "all"}, "bias: adapters that change biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: adapters that replace"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: 'pissa_niter_4' changes"),
        ({"init_lora_weights": "olora"}, "init_lora_weights: 'olora' changes"),
        ({"init_lora_weights": "corda"}, "init_lora_weights: 'corda' changes"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights: 'loftq' changes"),
        ({"init_lora_weights": ["x"]}, "init_lora_weights"),
        ({"a_new_method": {"x": 1}}, "a_new_method is not supported"),
        ({"r": 0}, r"r must be an integer in \[1, 512\], not 0"),
        ({"r": True}, "r must be"),
        ({"r": 8.0}, "r must be"),
        ({"r": None}, "r must be"),
        ({"lora_alpha": "x"}, "lora_alpha must be a finite number"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be"),
        ({"use_rslora": "yes"}, "use_rslora must be"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern must map"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must map"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern must map"),
        ({"alpha_pattern": {"(a+)+b": 1}}, "alpha_pattern: '.*' must be the name of a module"),
        ({"alpha_pattern": {"a*a*a*a*b": 1}}, "must be the name of a module"),
        ({"alpha_pattern": {"(": 1}}, "must be the name of a module"),
        ({"alpha_pattern": {"x" * 500: 1}}, "must be the name of a module"),
        ({"target_modules": [1]}, "target_modules must be"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform must be"),
    ],
)
def test_what_is_refused(config, problem):
    with pytest.raises(ModelLoadError, match=problem) as caught:
        parse(**config)
    assert str(caught.value).startswith(str(PATH)) and "\n" not in str(caught.value)


def test_keys_that_say_how_an_adapter_was_made_are_ignored():
    config = parse(
        task_type="CAUSAL_LM",
        inference_mode=True,
        lora_dropout=0.1,
        use_dora=False,
        modules_to_save=None,
        init_lora_weights="gaussian",
        exclude_modules=None,
        peft_version="0.19.0",
        fan_in_fan_out=False,
        a_new_method=None,
    )
    assert config == LoraConfig(8, 16, target_modules=("q_proj", "v_proj"))
