"""EngineArgs: every argument's check, and how defaults, "auto" and conflicts are resolved."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import msgspec
import pytest
import quire
from quire import AsyncLLM, EngineArgs, InvalidParameterError, ModelLoadError
from quire.frontend import engine_args
from quire.frontend.arguments.field_types import describe_type
from quire.ipc.config import EngineConfig, config_fields


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "config.json").write_text(
        json.dumps({"max_position_embeddings": 2048, "vocab_size": 100})
    )
    return str(tmp_path)


def test_every_field_is_an_argument_with_its_default() -> None:
    args = EngineArgs()
    assert set(vars(args)) == set(config_fields())
    assert args.tree() == EngineConfig()
    assert EngineArgs("m", max_num_seqs=3).max_num_seqs == 3
    assert repr(EngineArgs("m", max_num_seqs=3)) == "EngineArgs(model='m', max_num_seqs=3)"
    assert EngineArgs("m") == EngineArgs(model="m") != EngineArgs()
    a, b = EngineArgs(), EngineArgs()
    a.kernels["rms_norm"] = "reference"
    assert b.kernels == {}


def test_the_directory_of_packed_weights(model, monkeypatch, tmp_path) -> None:
    def resolved(value: str | None) -> str | None:
        args = EngineArgs(model, packed_weights_cache=value)
        return args.create_engine_config().load_config.packed_weights_cache

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/of/a/user")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert resolved(None) is None and resolved("packed") == str(tmp_path / "packed")
    assert resolved("~/packed") == "/of/a/user/packed"
    assert resolved("auto") == "/of/a/user/.cache/quire/packed_weights"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert resolved("auto") == "/cache/quire/packed_weights"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"max_model_length": 5},
            "max_model_length: there is no such argument; did you mean max_model_len?",
        ),
        ({"zzz": 5}, "zzz: there is no such argument"),
        ({"hf_config": {}}, "hf_config: there is no such argument"),
        ({"max_model_len": 0}, "max_model_len: must be an integer, at least 1, or None, got 0"),
        ({"max_num_seqs": True}, "max_num_seqs: must be an integer, at least 1, got True"),
        ({"max_num_seqs": "4"}, "max_num_seqs: must be an integer, at least 1, got '4'"),
        (
            {"seed": 2**63},
            f"seed: must be an integer, at least 0, at most {2**63 - 1}, got {2**63}",
        ),
        (
            {"dtype": "int4"},
            "dtype: must be one of 'auto', 'bfloat16', 'float16', 'float32', got 'int4'",
        ),
        ({"block_size": 7}, "block_size: must be one of 8, 16, 32, 64, 128, got 7"),
        (
            {"gpu_memory_utilization": 1.5},
            "gpu_memory_utilization: must be a number, more than 0.0, at most 1.0, got 1.5",
        ),
        (
            {"gpu_memory_utilization": float("nan")},
            "gpu_memory_utilization: must be a number, more than 0.0, at most 1.0, got nan",
        ),
        ({"startup_timeout_s": -1}, "startup_timeout_s: must be a number, more than 0, got -1"),
        ({"enforce_eager": 1}, "enforce_eager: must be True or False, got 1"),
        ({"kernels": {1: "a"}}, "kernels: must be a dict with string keys, got {1: 'a'}"),
        *(
            (
                {"limit_mm_per_prompt": limits},
                "limit_mm_per_prompt: must be a dict with keys of audio, image, video, each an "
                f"integer, at least 0, got {limits}",
            )
            for limits in ({"image": -1}, {"images": 4})
        ),
        ({"model": None}, "model: must be a string, got None"),
    ],
)
def test_bad_arguments_name_the_parameter_and_its_range(arguments, message) -> None:
    with pytest.raises(InvalidParameterError) as raised:
        EngineArgs(**arguments)
    assert str(raised.value) == message
    assert raised.value.parameter == next(iter(arguments))


def test_every_type_has_a_description() -> None:
    for name, field in config_fields().items():
        assert "different type" not in describe_type(field.type), name


# drawn for each request; resolved by the engine from what is built; same as dtype
DECIDED_LATER = ("preemption_mode", "cpu_isa", "kv_cache_dtype", "model_impl")


def test_no_auto_remains_after_resolution(model) -> None:
    config = EngineArgs(model).create_engine_config()
    assert config.model_config.model == config.model_config.tokenizer == model
    assert config.model_config.served_model_name == model
    assert config.model_config.max_model_len == 2048
    assert config.model_config.hf_config["vocab_size"] == 100
    assert config.model_config.dtype in ("bfloat16", "float32")
    assert config.load_config.load_format == "safetensors"
    assert config.device_config.device == "cpu"
    assert config.device_config.num_threads is None  # the engine counts the cores it may use
    assert config.scheduler_config.max_num_batched_tokens == 2048
    values = [
        getattr(getattr(config, field.section), name)
        for name, field in config_fields().items()
        if name not in DECIDED_LATER
    ]
    assert "auto" not in values
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


def test_the_bundled_model_is_the_default() -> None:
    if not (Path(engine_args.__file__).parent / "bundled_model" / "config.json").exists():
        pytest.skip("the bundled model is not there yet")
    config = EngineArgs().create_engine_config()
    assert config.model_config.served_model_name == "bundled"
    assert config.model_config.max_model_len >= 2048


@pytest.mark.parametrize(("is_faster", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_dtype_depends_on_the_processor_and_its_kernels(
    model, monkeypatch, is_faster, dtype
) -> None:
    asked = []
    monkeypatch.setattr(
        engine_args, "prefers_bfloat16", lambda cpu_isa: asked.append(cpu_isa) or is_faster
    )
    assert EngineArgs(
        model, cpu_isa="none"
    ).create_engine_config().model_config.dtype == dtype and asked == ["none"]
    assert EngineArgs(model, dtype="float16").create_engine_config().model_config.dtype == "float16"


def test_context_length(model) -> None:
    assert (
        EngineArgs(model, max_model_len=2048).create_engine_config().model_config.max_model_len
        == 2048
    )
    with pytest.raises(
        InvalidParameterError,
        match="max_model_len: must be at most 2048, the context of the model, got 2049",
    ):
        EngineArgs(model, max_model_len=2049).create_engine_config()
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert (
        EngineArgs(model, hf_overrides=scaled).create_engine_config().model_config.max_model_len
        == 4096
    )
    unknown = EngineArgs(model, hf_overrides={"max_position_embeddings": None})
    with pytest.raises(InvalidParameterError, match="max_model_len: .* must be given"):
        unknown.create_engine_config()
    with pytest.raises(ModelLoadError, match="max_position_embeddings"):
        EngineArgs(model, hf_overrides={"max_position_embeddings": "long"}).create_engine_config()


def test_scheduler_budget(model) -> None:
    def scheduler(**arguments):
        return EngineArgs(model, **arguments).create_engine_config().scheduler_config

    assert scheduler(max_num_batched_tokens=16).max_num_batched_tokens == 16
    assert scheduler(enable_chunked_prefill=False, max_model_len=100).max_num_batched_tokens == 2048
    long = {"hf_overrides": {"max_position_embeddings": 5000}, "enable_chunked_prefill": False}
    assert scheduler(**long).max_num_batched_tokens == 5000
    with pytest.raises(
        InvalidParameterError,
        match="max_num_batched_tokens: must be at least max_model_len=5000 .* got 4999",
    ):
        scheduler(**long, max_num_batched_tokens=4999)
    with pytest.raises(
        InvalidParameterError, match="long_prefill_token_threshold: .*enable_chunked_prefill"
    ):
        scheduler(enable_chunked_prefill=False, long_prefill_token_threshold=5)


def test_an_interval_of_checkpoints_ends_with_a_block(model) -> None:
    with pytest.raises(
        InvalidParameterError,
        match="state_checkpoint_interval: must be a multiple of block_size=32, got 48",
    ):
        EngineArgs(model, state_checkpoint_interval=48, block_size=32).create_engine_config()
    args = EngineArgs(model, state_checkpoint_interval=48, state_cache_memory_bytes=0)
    cache = args.create_engine_config().cache_config
    assert (cache.state_checkpoint_interval, cache.state_cache_memory_bytes) == (48, 0)


def test_more_stages_than_layers_are_refused(model) -> None:
    with pytest.raises(InvalidParameterError, match="pipeline_parallel_size: must be"):
        EngineArgs(model, pipeline_parallel_size=200).create_engine_config()


def test_a_separate_tokenizer(model, tmp_path_factory) -> None:
    other = str(tmp_path_factory.mktemp("other"))
    assert EngineArgs(model, tokenizer=other).create_engine_config().model_config.tokenizer == other
    with pytest.raises(ModelLoadError, match="'/nowhere'"):
        EngineArgs(model, tokenizer="/nowhere").create_engine_config()
    with pytest.raises(ModelLoadError, match="has no config.json"):
        EngineArgs(other).create_engine_config()


def test_attaching_to_a_daemon(model, tmp_path_factory) -> None:
    theirs = EngineArgs(model, max_num_seqs=7, served_model_name="tiny").create_engine_config()
    assert EngineArgs().attach_to(theirs) == theirs
    assert (
        EngineArgs(model).attach_to(theirs)
        == EngineArgs("tiny", max_num_seqs=7).attach_to(theirs)
        == theirs
    )
    for arguments, words in (
        ({"max_num_seqs": 8}, "max_num_seqs: .* runs with 7, not 8"),
        ({"model": "other"}, "model: .*not 'other'"),
        ({"dtype": "float16"}, "dtype"),
    ):
        with pytest.raises(InvalidParameterError, match=words):
            EngineArgs(**arguments).attach_to(theirs)
    tokenizer = str(tmp_path_factory.mktemp("tokenizer"))
    own = EngineArgs(seed=5, tokenizer=tokenizer, shutdown_timeout_s=1.0).attach_to(theirs)
    assert (
        own.model_config.seed,
        own.model_config.tokenizer,
        own.service_config.shutdown_timeout_s,
    ) == (5, tokenizer, 1.0)
    assert own.scheduler_config == theirs.scheduler_config and own.model_config.model == model


def test_generation_config_is_a_directory_or_none(model, tmp_path) -> None:
    assert EngineArgs(model).create_engine_config().model_config.generation_config == model
    assert (
        EngineArgs(model, generation_config="none")
        .create_engine_config()
        .model_config.generation_config
        == "none"
    )
    mine = tmp_path / "mine"
    mine.mkdir()
    with pytest.raises(
        InvalidParameterError,
        match="generation_config: .*or a directory that holds generation_config.json",
    ):
        EngineArgs(model, generation_config=str(mine)).create_engine_config()
    (mine / "generation_config.json").write_text("{}")
    theirs = EngineArgs(model, override_generation_config={"top_k": 3}).create_engine_config()
    attached = EngineArgs(generation_config=str(mine)).attach_to(theirs).model_config
    assert (attached.generation_config, attached.override_generation_config) == (
        str(mine),
        {"top_k": 3},
    )
    assert EngineArgs(override_generation_config={"top_k": 5}).attach_to(
        theirs
    ).model_config.override_generation_config == {"top_k": 5}


def test_from_engine_args_takes_arguments_or_engine_args(monkeypatch) -> None:
    from quire.frontend import async_llm

    seen = []

    async def connect(engine_args, engine):
        seen.append((engine_args, engine))
        raise InterruptedError

    monkeypatch.setattr(async_llm, "connect_async", connect)
    for call in (
        lambda: AsyncLLM.from_engine_args(model="m", max_num_seqs=3, engine="inproc"),
        lambda: AsyncLLM.from_engine_args(EngineArgs("m", max_num_seqs=3), "inproc"),
    ):
        with pytest.raises(InterruptedError):
            call()
    assert seen == [(EngineArgs("m", max_num_seqs=3), "inproc")] * 2
    with pytest.raises(TypeError, match="not both"):
        AsyncLLM.from_engine_args(EngineArgs("m"), max_num_seqs=3)


def test_the_package_is_marked_as_typed_and_types_every_name_it_exports() -> None:
    source = Path(quire.__file__)
    assert (source.parent / "py.typed").is_file()
    imports = [node for node in ast.walk(ast.parse(source.read_text())) if is_relative(node)]
    typed = {alias.name: node.module for node in imports for alias in node.names}
    assert typed == quire._HOME


def is_relative(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.level == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"device": "cpu"}, False),
        ({"device": "cuda"}, True),
        ({"device": "cuda", "async_scheduling": False}, False),
        ({"device": "cuda", "num_scheduler_steps": 4}, False),
        ({"device": "cuda", "tensor_parallel_size": 2}, False),
        ({"device": "cuda", "speculative_config": {"method": "ngram"}}, False),
        ({"device": "cpu", "async_scheduling": True}, True),
    ],
)
def test_steps_overlap_by_default_where_they_are_launched(arguments, expected):
    config = EngineArgs("bundled", **arguments).create_engine_config()
    assert config.scheduler_config.async_scheduling is expected
