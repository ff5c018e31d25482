"""quantization_config of config.json: which layers are quantized, and one sentence for everything
that is not supported.
"""

from __future__ import annotations

import time

import pytest
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.quantization_config import METHODS, CheckpointQuantization, parse_quantization

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
ROUND = {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"}
BITNET = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS}
CT = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head", "re:model.layers.[01]\\..*"],
}
LAYERS = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.mlp.down_proj",
    "model.layers.10.mlp.down_proj",
    "lm_head",
]


def parse(config: object) -> CheckpointQuantization:
    found = parse_quantization({"quantization_config": config})
    assert found is not None
    return found


def quantized(config: dict) -> list[bool]:
    found = parse(config)
    return [found.format_of(f"{layer}.weight", [8, 8]) is not None for layer in LAYERS]


def test_a_checkpoint_without_the_key_is_not_quantized():
    assert parse_quantization({}) is None
    assert parse_quantization({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AWQ, [True, True, True, False]),
        ({**AWQ, "modules_to_not_convert": ["layers.1", "q_proj"]}, [False, False, True, False]),
        ({**GPTQ, "lm_head": True}, [True, True, True, True]),
        ({**GPTQ, "dynamic": {"-:.*q_proj": {}}}, [False, True, True, False]),
        ({**ROUND, "extra_config": {"model.layers.1": {"bits": 16}}}, [True, False, True, False]),
        ({**FP8, "modules_to_not_convert": ["lm_head", "mlp"]}, [True, False, False, False]),
        ({**FP8, "ignored_layers": ["q_proj"]}, [False, True, True, False]),
        (CT, [False, False, True, False]),
        ({**CT, "ignore": None}, [True, True, True, True]),
        ({**CT, "ignore": [LAYERS[0]]}, [False, True, True, True]),
        (
            {**CT, "config_groups": {"g": {**GROUP, "targets": ["re:.*mlp.*"]}}},
            [False, False, True, False],
        ),
    ],
)
def test_which_layers_are_quantized(config, expected):
    assert quantized(config) == expected


def test_norms_biases_and_the_embedding_are_not():
    found = parse({**CT, "ignore": []})
    for name, shape in (
        ("model.norm.weight", [8]),
        (f"{LAYERS[0]}.bias", [8]),
        ("model.embed_tokens.weight", [8, 8]),
    ):
        assert found.format_of(name, shape) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AWQ, "int4 with zero points in groups of 128"),
        ({**GPTQ, "bits": 8, "group_size": -1}, "int8 with zero points with a scale per row"),
        (CT, "int4 in groups of 32"),
        (BITNET, "ternary with a scale per tensor"),
        (FP8, "fp8 in blocks of 128 x 128"),
        ({"quant_method": "fp8"}, "fp8 with a scale per tensor"),
        ({"quant_method": "fbgemm_fp8"}, "fp8 with a scale per row"),
    ],
)
def test_formats_in_words(config, expected):
    assert str(parse(config).format_of("model.layers.2.mlp.up_proj.weight", [8, 8])) == expected


def in_fp8(**activations):
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    of_group = {"num_bits": 8, "type": "float", **activations} if activations else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": of_group}
    return {**CT, "format": "float-quantized", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (FP8, "group"),
        ({**FP8, "weight_block_size": [128, 64]}, ""),  # no kernel has such groups
        ({"quant_method": "fp8"}, "token"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "static"),
        ({"quant_method": "fbgemm_fp8"}, ""),  # its rows have an upper bound
        (in_fp8(), ""),
        (in_fp8(strategy="token", dynamic=True), "token"),
        (in_fp8(strategy="tensor", dynamic=False), "static"),
        (in_fp8(strategy="tensor", dynamic=True), "token"),
        (in_fp8(strategy="group", group_size=128, dynamic=True), "group"),
        (in_fp8(strategy="group", group_size=64, dynamic=True), ""),
        (in_fp8(strategy="token", dynamic=True, type="int"), ""),
        (CT, ""),
    ],
)
def test_how_activations_are_quantized(config, expected):
    """Nothing is said of it where the kernels do not do it."""
    name = "model.layers.2.mlp.up_proj.weight"
    found = parse_quantization({"quantization_config": config}, True, True)
    assert found.format_of(name, [8, 8]).activations == expected
    assert parse(config).format_of(name, [8, 8]).activations == ""


def test_the_first_group_that_names_a_layer_is_its_format():
    mlp = {"targets": ["re:.*mlp.*"], "weights": {**WEIGHTS, "num_bits": 8}}
    found = parse({**CT, "ignore": [], "config_groups": {"a": mlp, "b": GROUP}})
    formats = [found.format_of(f"{layer}.weight", [8, 8]) for layer in LAYERS]
    assert [None if f is None else f.bits for f in formats] == [4, 8, 8, 4]


def group(**weights: object) -> dict:
    return {**CT, "config_groups": {"group_0": {**GROUP, "weights": {**WEIGHTS, **weights}}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "must be an object"),
        ({}, "quant_method None is not supported; supported: awq, gptq, auto-round"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        ({"quant_method": ["awq"]}, "quant_method"),
        ({**AWQ, "bits": 3}, "bits=3 is not supported; supported: 4"),
        ({**AWQ, "bits": True}, "bits=True is not supported"),
        ({**AWQ, "zero_point": False}, "zero_point=False is not supported"),
        ({**AWQ, "version": "gemv"}, "version='gemv' is not supported"),
        ({**AWQ, "group_size": 12}, "group_size must be -1 or a multiple of 8, got 12"),
        ({**AWQ, "group_size": 10**30}, "group_size must be"),
        ({**AWQ, "modules_to_not_convert": "mlp"}, "modules_to_not_convert must be a list"),
        ({**GPTQ, "bits": 2}, "bits=2 is not supported; supported: 4, 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic may only exclude layers"),
        ({**GPTQ, "dynamic": {"-:(": {}}}, "'\\(' is no regular expression"),
        ({**GPTQ, "lm_head": "no"}, "lm_head='no' is not supported"),
        ({**ROUND, "packing_format": "itrex"}, "packing_format='itrex' is not supported"),
        ({**ROUND, "extra_config": {"a": {"bits": 2}}}, "extra_config may only exclude layers"),
        ({**ROUND, "extra_config": {"a": {}}}, "extra_config may only exclude layers"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size must be two positive integers"),
        ({**FP8, "fmt": "e5m2"}, "fmt='e5m2' is not supported"),
        ({**BITNET, "use_rms_norm": True}, "use_rms_norm=True is not supported"),
        ({**BITNET, "quantization_mode": "both"}, "quantization_mode='both' is not supported"),
        ({**CT, "format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized'"),
        ({**CT, "format": "marlin-24"}, "format='marlin-24' is not supported"),
        ({**CT, "config_groups": {}}, "config_groups must be an object with groups"),
        ({**CT, "config_groups": {"a": {"weights": None}}}, "config_groups.a must have weights"),
        ({**CT, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({**CT, "transform_config": {"config_groups": {"a": 1}}}, "transform_config"),
        ({**CT, "ignore": [3]}, "ignore must be a list of names"),
        ({**CT, "ignore": ["re:("]}, "ignore: '\\(' is no regular expression"),
        ({**CT, "ignore": ["re:(a+)+$"]}, "has repeated groups"),
        ({**CT, "ignore": ["re:" + ".*" * 9]}, "has repeated groups or more than 4 repetitions"),
        (group(num_bits=3), "config_groups.group_0.weights: num_bits=3 is not supported"),
        (group(strategy="block"), "strategy='block' is not supported"),
        (group(symmetric=1), "symmetric=1 is not supported"),
        (group(type="float", num_bits=8), "type float is not supported with format pack-quantized"),
        (group(group_size=None), "group_size must be"),
        (
            {**group(type="float", num_bits=8, strategy="block"), "format": "float-quantized"},
            "block_structure must be two positive integers",
        ),
    ],
)
def test_what_is_refused(config, message):
    with pytest.raises(ModelLoadError, match=f"config.json: quantization_config: .*{message}"):
        parse(config)


WEIRD = [
    0,
    -1,
    True,
    0.5,
    10**30,
    float("nan"),
    "4",
    [],
    [1],
    {},
    {"a": {}},
    None,
    "re:" + "(" * 99,
]


def test_values_of_wrong_types_give_one_sentence():
    for config in (AWQ, GPTQ, ROUND, BITNET, FP8, CT, GROUP, WEIGHTS):
        for key in (*config, "dynamic", "extra_config", "sparsity_config", "transform_config"):
            for value in WEIRD:
                edited = {**config, key: value}
                if config is WEIGHTS:
                    edited = {**CT, "config_groups": {"g": {**GROUP, "weights": edited}}}
                elif config is GROUP:
                    edited = {**CT, "config_groups": {"g": edited}}
                try:
                    parse(edited).format_of("model.layers.0.mlp.up_proj.weight", [8, 8])
                except ModelLoadError as error:
                    assert "\n" not in str(error) and len(str(error)) < 400


def test_a_pattern_takes_little_time():
    found = parse({**CT, "ignore": ["re:" + ".*a" * 4 + "$"]})
    start = time.thread_time()
    found.format_of("model.layers." + "a" * 60 + "b.weight", [8, 8])
    assert time.thread_time() - start < 2


def test_every_method_is_covered():
    of_tests = {config["quant_method"] for config in (AWQ, GPTQ, ROUND, BITNET, FP8, CT)}
    assert METHODS.keys() == of_tests | {"fbgemm_fp8", "mxfp4"}


def test_mxfp4_is_of_experts_alone():
    found = parse({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert found.method == "mxfp4"
    assert found.format_of("model.layers.0.self_attn.q_proj.weight", [64, 64]) is None
    experts = found.format_of("model.layers.0.mlp.experts.3.up_proj.weight", [64, 64])
    assert str(experts) == "MXFP4"
    assert found.format_of("model.layers.0.mlp.experts.3.up_proj.bias", [64]) is None
