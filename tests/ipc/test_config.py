"""The configuration tree: one flat name per field, ranges, unknown keys raise errors, the tree
survives the wire.
"""

import msgspec
import pytest
from quire import EngineConfig
from quire.ipc.config import Section, config_fields


def sections() -> dict[str, type]:
    return {field.name: field.type for field in msgspec.structs.fields(EngineConfig)}


def test_flat_names_are_unique_and_complete() -> None:
    names = [
        field.name for section in sections().values() for field in msgspec.structs.fields(section)
    ]
    assert len(names) == len(set(names))
    internal = {"hf_config", "pooling", "vision", "data_parallel_rank", "cores", "expert_group"}
    assert set(config_fields()) == set(names) - internal
    assert {field.section for field in config_fields().values()} == set(sections())


@pytest.mark.parametrize("name", config_fields())
def test_every_argument_is_described_and_its_default_is_in_range(name: str) -> None:
    field = config_fields()[name]
    assert field.help.endswith(".")
    assert msgspec.convert(field.default, field.type) == field.default


def test_names_and_defaults_equal_vllms() -> None:
    fields = config_fields()
    expected = {
        "block_size": 16,
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "seed": 0,
    }
    expected |= {
        "max_num_seqs": 256,
        "tensor_parallel_size": 1,
        "dtype": "auto",
        "load_format": "auto",
        "max_model_len": None,
    }
    assert {name: fields[name].default for name in expected} == expected


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("cache_config", {"block_size": 17}),
        ("cache_config", {"gpu_memory_utilization": 0.0}),
        ("cache_config", {"gpu_memory_utilization": 1.1}),
        ("scheduler_config", {"max_num_seqs": 0}),
        ("scheduler_config", {"scheduling_policy": "lifo"}),
        ("model_config", {"seed": -1}),
        ("service_config", {"startup_timeout_s": 0}),
        ("device_config", {"unknown": 1}),
        ("unknown_config", {}),
    ],
)
def test_bad_values_and_unknown_keys_are_refused(section: str, values: dict) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode({section: values}), type=EngineConfig)


def test_the_tree_survives_json_and_msgpack() -> None:
    model_config = msgspec.structs.replace(
        EngineConfig().model_config,
        hf_config={"vocab_size": 5, "rope_scaling": {"factor": 2.0}},
        max_model_len=7,
    )
    config = EngineConfig(model_config=model_config)
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(config), type=EngineConfig) == config


def test_the_tree_cannot_be_changed() -> None:
    assert all(issubclass(section, Section) for section in sections().values())
    with pytest.raises(AttributeError):
        EngineConfig().cache_config.block_size = 32
