"""The plan's figures equal the engine's: bytes of weights and cache, what does not fit, and the
largest value that does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from quire import LLM, EngineArgs, InvalidParameterError, ModelLoadError
from quire.executor import device
from quire.executor.worker import Worker
from quire.frontend.cli.plan import render
from quire.frontend.diagnosis.model import check_model, check_plan
from quire.frontend.model_info import gguf_header
from quire.frontend.model_info import plan as planning
from quire.frontend.model_info.plan import (
    CUDA_BYTES,
    RUNTIME_BYTES,
    Plan,
    States,
    make_plan,
    round_down,
)
from quire.ipc.errors import NotEnoughMemoryError
from quire.ipc.models.memory_plan import free_of_share
from quire.tests.bundled_model.heads import trained
from quire.tests.executor.driver import start_executor
from quire.tests.executor.weights.test_gguf import needs_native
from quire.tests.frontend.cli.command import call
from quire.tests.gguf_hybrids import write_hybrid_gguf
from quire.tests.mtp_checkpoints import save_with_head
from quire.tests.quantized_checkpoints import write_quantized
from quire.tests.tiny_encoders import save_tiny_encoder
from quire.tests.tiny_models import GEMMA4_EXPERTS, save_tiny_model

GIB = 2**30
# 11.6 GiB of weights and 128 KiB of KV cache per token, both in bfloat16.
BIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
}


def save_big(directory: Path) -> str:
    """A config.json alone, which is all that a plan needs."""
    (directory / "config.json").write_text(json.dumps(BIG))
    return str(directory)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_big(tmp_path_factory.mktemp("big"))


def plan(model: str, memory_bytes: int | None = None, **arguments: Any) -> Plan:
    return make_plan(EngineArgs(model, **arguments), memory_bytes, arguments)


SLOW = {"pack_quantized_linear": "reference"}  # present even without the native library


@pytest.mark.parametrize(
    ("kind", "config", "arguments"),
    [
        ("bundled", {}, {"max_num_seqs": 4}),
        ("qwen2", {"tie_word_embeddings": True}, {"kv_cache_memory_bytes": 2**22}),
        ("qwen3", {}, {"num_gpu_blocks_override": 77, "dtype": "bfloat16", "max_model_len": 500}),
        (
            "llama",
            {"attention_bias": True, "mlp_bias": True},
            {"max_num_seqs": 3, "dtype": "float32", "block_size": 32},
        ),
        (
            "qwen2",
            {"tie_word_embeddings": True},
            {"quantization": "int4", "dtype": "bfloat16", "kernels": SLOW},
        ),
        ("qwen3", {}, {"quantization": "int8", "kernels": SLOW}),
        # windows that return blocks: of all layers, and of two thirds
        ("mistral", {}, {"max_num_seqs": 3, "max_num_batched_tokens": 64}),
        ("gemma3_text", {}, {"max_num_seqs": 3, "max_num_batched_tokens": 64}),
        ("gemma3_text", {}, {"max_num_seqs": 3, "disable_hybrid_kv_cache_manager": True}),
        ("bundled", {}, {"speculative_config": {"method": "draft_model", "model": "bundled"}}),
        # a type for which the plan and the loader once disagreed
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, {}),
        # layers whose parts of a block differ in size; a table that stays in the file
        ("gemma4_text", {}, {"max_num_seqs": 3, "dtype": "float32"}),
        ("gemma4_text", {}, {"max_num_seqs": 3, "max_num_batched_tokens": 64}),
        ("gemma4_text", GEMMA4_EXPERTS, {"max_num_seqs": 3, "kv_cache_dtype": "int8"}),
        # layers that keep states beside keys and values, and instead of them
        ("falcon_h1", {}, {"max_num_seqs": 3}),
        ("mamba2", {}, {"max_num_seqs": 3}),
    ],
)
def test_the_engine_allocates_what_the_plan_predicts(
    kind: str, config: dict[str, Any], arguments: dict[str, Any], tmp_path: Path
) -> None:
    model = kind if kind == "bundled" else str(save_tiny_model(tmp_path, kind, **config))
    stated = plan(model, **arguments)
    with LLM(model, engine="inproc", **arguments) as llm:
        [usage] = llm.collective_rpc("memory_usage")
        ready = llm.llm_engine.client.ready
    assert (stated.weights_bytes, stated.kv_cache_bytes) == (
        usage["weights_bytes"],
        usage["kv_cache_bytes"],
    )
    assert (stated.num_blocks, stated.kv_cache_bytes) == (ready.num_blocks, ready.kv_cache_bytes)
    assert (stated.dtype, stated.max_model_len) == (
        ready.config.model_config.dtype,
        ready.config.model_config.max_model_len,
    )


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("qwen3_5_text", {}),
        ("qwen3_5_moe_text", {"quantization": "int8", "kernels": SLOW, "dtype": "float32"}),
        ("glm4_moe_lite", {"dtype": "bfloat16"}),
        ("nemotron_h", {"dtype": "bfloat16"}),
        ("deepseek_v3", {"dtype": "bfloat16"}),  # a chain of heads
        ("eagle3", {"max_num_seqs": 7, "max_num_batched_tokens": 100}),
        pytest.param("gguf", {"dtype": "bfloat16"}, marks=needs_native),
        pytest.param("awq", {"dtype": "bfloat16"}, marks=needs_native),
    ],
)
def test_heads_that_draft_are_counted(kind: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    drafting: dict[str, Any] = {"method": "mtp"}
    if kind == "eagle3":
        model, drafting = "bundled", {"method": kind, "model": trained(kind)}
    elif kind == "gguf":
        checkpoint = save_with_head(tmp_path, "qwen3_5_text", linear_value_head_dim=16)
        model = str(tmp_path / "m.gguf")
        write_hybrid_gguf(Path(model), checkpoint, "Q8_0")
    elif kind == "awq":
        checkpoint = save_with_head(tmp_path / "plain", "qwen3_5_text", linear_num_value_heads=8)
        model = str(tmp_path / "quantized")
        write_quantized(Path(model), checkpoint, kind, unnamed=r"mtp\.(fc|layers\.0\.mlp)")
    else:
        model = str(save_with_head(tmp_path, kind, num_heads=1 + (kind == "deepseek_v3")))
    arguments = arguments | {"speculative_config": drafting | {"adaptive": False}}
    stated = plan(model, **arguments)
    with LLM(model, engine="inproc", **arguments) as llm:
        [usage] = llm.collective_rpc("memory_usage")
    assert (stated.weights_bytes, stated.kv_cache_bytes) == (
        usage["weights_bytes"],
        usage["kv_cache_bytes"],
    )


def test_states_of_requests_and_their_checkpoints_are_counted(tmp_path: Path) -> None:
    model = str(save_tiny_model(tmp_path, "granitemoehybrid"))
    arguments = {"dtype": "float32", "max_num_seqs": 3, "state_cache_memory_bytes": 2**18}
    stated, executor = plan(model, GIB, **arguments), start_executor(model, **arguments)
    num_bytes = 2 * (128 * 8 + 3 * 160) * 4  # of two mixers, in fp32
    assert stated.states == States(num_bytes, 3, 2**18 // num_bytes)
    assert (executor.max_num_seqs, executor.num_state_checkpoints) == (3, 2**18 // num_bytes)
    assert "states of 3 requests" in render(stated) and "checkpoints of states" in render(stated)
    # a quarter of what is left is for states of requests
    few = plan(model, stated.weights_bytes + RUNTIME_BYTES + 8 * num_bytes + 3, **arguments)
    assert few.states is not None and few.states.num_requests == 2
    assert set(few.concurrency.values()) <= {0, 1, 2}
    assert plan(str(save_tiny_model(tmp_path / "other")), GIB).states is None


def test_windows_multiply_the_requests_that_fit(tmp_path: Path) -> None:
    """The shape of Gemma 3 270M: 15 of 18 layers have a window of 512."""
    shape = {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 262_144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "max_position_embeddings": 32_768,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    arguments = {"dtype": "bfloat16", "kv_cache_memory_bytes": GIB}
    stated = plan(str(tmp_path), 40 * GIB, **arguments)
    whole = plan(str(tmp_path), 40 * GIB, **arguments, disable_hybrid_kv_cache_manager=True)
    assert stated.kv_bytes_per_token == whole.kv_bytes_per_token == 18 * 2 * 256 * 2
    assert (stated.num_window_layers, whole.num_window_layers) == (15, 0)
    assert whole.concurrency == {1024: 56, 4096: 14, 16_384: 3, 32_768: 1}
    assert stated.concurrency == {1024: 56, 4096: 20, 16_384: 11, 32_768: 7}
    assert stated.blocks_per_sequence * 3 < 0.24 * whole.blocks_per_sequence * 18
    assert "15 of 18 layers keep a window" in render(stated)


def test_memory_is_divided(big: str) -> None:
    stated = plan(big, 40 * GIB, dtype="bfloat16")
    room = int(0.4 * (40 * GIB - stated.weights_bytes - RUNTIME_BYTES)) // (16 * 2**17)
    assert stated.kv_bytes_per_token == 2**17 and stated.num_blocks == room
    assert stated.longest_context == stated.model_context == 32_768
    assert stated.concurrency == {
        1024: (room - 1) // 64,
        4096: (room - 1) // 256,
        16_384: (room - 1) // 1024,
        32_768: (room - 1) // 2048,
    }
    assert stated.flags == ["--dtype", "bfloat16", "--kv-cache-memory-bytes", str(room * 2**21)]
    assert plan(big, 40 * GIB, dtype="bfloat16", max_num_seqs=2).concurrency == {
        1024: 2,
        4096: 2,
        16_384: 2,
        32_768: 2,
    }


def test_a_standby_takes_its_process_and_its_weights(big: str) -> None:
    one, two = plan(big, 48 * GIB), plan(big, 48 * GIB, standby=True)
    assert two.runtime_bytes == 2 * one.runtime_bytes + one.weights_bytes
    assert two.free_bytes == one.free_bytes - RUNTIME_BYTES - one.weights_bytes
    assert one.fits and not plan(big, 16 * GIB, standby=True).fits


def test_on_a_gpu_a_standby_takes_nothing_of_its_memory(big: str) -> None:
    arguments = {"device": "cuda", "dtype": "bfloat16"}
    one, two = (plan(big, 80 * GIB, **arguments, standby=standby) for standby in (False, True))
    assert (two.runtime_bytes, two.num_blocks) == (one.runtime_bytes, one.num_blocks)


def test_a_shorter_context_fits(big: str) -> None:
    stated = plan(big, 16 * GIB, dtype="bfloat16")
    assert 0 < stated.longest_context < 32_768 and not stated.fits and stated.num_blocks == 0
    assert stated.flags[2:4] == ["--max-model-len", str(stated.longest_context)]
    fitting = plan(big, 16 * GIB, dtype="bfloat16", max_model_len=stated.longest_context)
    assert fitting.fits and fitting.concurrency[stated.longest_context] == 1
    assert not plan(big, 16 * GIB, dtype="bfloat16", max_model_len=stated.longest_context + 1).fits


@pytest.mark.parametrize("length", [1, 1000, 32_768])
def test_the_minimum_memory_is_exact(big: str, length: int) -> None:
    least = plan(big, GIB, dtype="bfloat16", max_model_len=length).least_memory_bytes
    assert plan(big, least, dtype="bfloat16", max_model_len=length).fits
    assert not plan(big, least - 16, dtype="bfloat16", max_model_len=length).fits


def test_if_nothing_fits_half_the_bytes_may(big: str) -> None:
    stated = plan(big, 20 * GIB, dtype="float32")
    assert (stated.longest_context, stated.num_blocks, stated.concurrency, stated.fits_as) == (
        0,
        0,
        {},
        "bfloat16",
    )
    assert stated.flags[:2] == ["--dtype", "bfloat16"]
    nothing = plan(big, 2 * GIB, dtype="float32")
    assert (nothing.flags, nothing.fits_as, nothing.free_bytes < 0) == ([], None, True)


def test_the_flags_contain_the_chosen_values(big: str) -> None:
    stated = plan(
        big,
        60 * GIB,
        dtype="bfloat16",
        enable_prefix_caching=False,
        kernels={"rms_norm": "reference"},
        logits_processors=["a:b"],
    )
    assert stated.flags[:7] == [
        "--dtype",
        "bfloat16",
        "--no-enable-prefix-caching",
        "--kernels",
        '{"rms_norm":"reference"}',
        "--logits-processors",
        "a:b",
    ]
    assert [round_down(length) for length in (16, 1023, 1025, 8191, 8192, 20_000)] == [
        16,
        1023,
        1024,
        7936,
        8192,
        19_456,
    ]


def test_memory_defaults_to_what_is_free(big: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "free_memory_bytes", lambda: 16 * GIB)
    here, named = plan(big, dtype="bfloat16"), plan(big, 16 * GIB, dtype="bfloat16")
    assert not here.memory_is_named and here.longest_context == named.longest_context
    assert here.flags == [
        "--dtype",
        "bfloat16",
        "--max-model-len",
        str(round_down(named.longest_context)),
    ]


@pytest.mark.parametrize(
    ("arguments", "fitting"),
    [({"kv_cache_memory_bytes": 20 * 768 * 16}, 304), ({"num_gpu_blocks_override": 9}, 128)],
)
def test_the_engines_error_suggests_the_largest_value_that_works(
    arguments: dict[str, Any], fitting: int, tmp_path: Path
) -> None:
    # in float32 a token takes 3 layers x 2 x 2 heads x 16 x 4 bytes
    model = str(save_tiny_model(tmp_path, "qwen2"))
    arguments["dtype"] = "float32"
    with pytest.raises(NotEnoughMemoryError, match=f"lower max_model_len to at most {fitting}$"):
        LLM(model, engine="inproc", **arguments)
    assert plan(model, **arguments).longest_context == fitting
    with LLM(model, engine="inproc", **arguments, max_model_len=fitting):
        pass


@pytest.mark.parametrize(
    ("size", "copies", "status"),
    [
        ({"kv_cache_memory_bytes": 2**26}, 1, "pass"),
        ({"kv_cache_memory_bytes": 3 * 2**29}, 1, "warn"),
        ({"kv_cache_memory_bytes": 2**31 + 2**20}, 1, "fail"),
        ({"kv_cache_memory_bytes": 40 * 10**12}, 1, "fail"),
        ({"num_gpu_blocks_override": 2**31 // (768 * 16) + 1}, 1, "fail"),
        ({"kv_cache_memory_bytes": 3 * 2**29}, 2, "fail"),  # engines that share the memory
    ],
)
def test_plan_doctor_and_engine_agree_on_a_cache_of_a_given_size(
    size: dict[str, int],
    copies: int,
    status: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture,
) -> None:
    """On a machine with 2 GiB, of which 1.4 are free."""
    model = str(save_tiny_model(tmp_path, "qwen2"))
    for module in (planning, device):
        monkeypatch.setattr(module, "free_memory_bytes", lambda: 1433 * 2**20)
        monkeypatch.setattr(module, "total_memory_bytes", lambda: 2**31)
    arguments = {"dtype": "float32", **size}
    of_engine = arguments | {"data_parallel_size": copies}
    finding = check_plan(EngineArgs(model, **of_engine))
    assert finding.status == status, finding
    [(name, value)] = size.items()
    flags = f"--{name.replace('_', '-')} {value} --dtype float32 --data-parallel-size {copies}"
    code, _, err = call(capsys, "plan", model, *flags.split())
    assert (code != 0, name in err) == (status == "fail", status != "pass"), err
    engine_config = EngineArgs(model, **of_engine).create_engine_config()
    worker = Worker(engine_config)
    worker.load_model(lambda stage, fraction: None)
    caplog.clear()
    if status == "fail":
        with pytest.raises(NotEnoughMemoryError, match=f"{name}: .* has 2,147,483,648 bytes"):
            worker.determine_num_blocks()
        assert f"{name}: " in finding.detail and "2,147,483,648 bytes (2.0 GiB)" in finding.detail
        return
    worker.determine_num_blocks()
    assert (f"{name}: the KV cache would take" in caplog.text) == (status == "warn")


def test_refused_models_have_no_plan(big: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**BIG, "quantization_config": {"quant_method": "gptq"}})
    )
    with pytest.raises(ModelLoadError, match="quantization_config"):
        plan(str(tmp_path))
    with pytest.raises(InvalidParameterError, match="max_model_len: must be at most 32768"):
        plan(big, max_model_len=40_000)
    assert plan(big, 80 * GIB, device="cuda", quantization="int8")
    with pytest.raises(
        InvalidParameterError, match="kv_cache_dtype: fp8 is supported by the NVIDIA GPU kernels"
    ):
        plan(big, kv_cache_dtype="fp8")
    assert plan(big, 80 * GIB, device="cuda", kv_cache_dtype="int8")
    overrides = {"head_dim": 72}
    for kind in ("cpu", "cuda"):
        with pytest.raises(
            InvalidParameterError,
            match="kv_cache_dtype: int8 needs a head_dim that is a multiple of 16 up to 512, the "
            "model has 72; use auto",
        ):
            plan(big, 80 * GIB, device=kind, kv_cache_dtype="int8", hf_overrides=overrides)
    with pytest.raises(InvalidParameterError, match="dtype: float16 is not supported on a CPU"):
        plan(big, dtype="float16")
    with pytest.raises(ModelLoadError, match="no such directory"):
        plan("./nowhere")


def test_a_model_in_the_hubs_cache_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--big"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "b1").write_text(json.dumps(BIG))
    (snapshot / "config.json").symlink_to(repository / "blobs" / "b1")
    monkeypatch.setattr(gguf_header, "find_model_directory", None)  # would access the network
    assert plan("somebody/big", 60 * GIB, dtype="bfloat16").model == "somebody/big"


# ---------------------------------------------------------------- GPUs


def test_a_gpus_memory_is_divided_as_the_worker_does_it(
    big: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in executor/worker.py: the free part of the share once the weights are loaded, less the
    largest step and the largest graph.
    """
    monkeypatch.setattr(planning, "gpu_memory_bytes", lambda: (60 * GIB, 80 * GIB))
    for share in (0.9, 0.5):
        stated = plan(big, device="cuda", gpu_memory_utilization=share, max_num_seqs=64)
        free = free_of_share(60 * GIB - stated.weights_bytes, 80 * GIB, share) - stated.step_bytes
        assert (stated.memory_bytes, stated.runtime_bytes, stated.memory_is_named) == (
            80 * GIB,
            0,
            False,
        )
        assert stated.num_blocks == free // (16 * 2**17) and stated.free_bytes == free
        assert stated.flags == [
            "--device",
            "cuda",
            "--gpu-memory-utilization",
            str(share),
            "--max-num-seqs",
            "64",
        ]
    # no more than all requests need
    assert plan(big, device="cuda", max_num_seqs=2).num_blocks == 1 + 2 * 32_768 // 16
    assert stated.dtype == "bfloat16" and set(stated.weights_bytes_by_dtype) == {
        "bfloat16",
        "float32",
    }


def test_a_named_gpu_counts_as_idle(big: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named = plan(big, 24 * GIB, device="cuda")
    monkeypatch.setattr(planning, "gpu_memory_bytes", lambda: (24 * GIB - CUDA_BYTES, 24 * GIB))
    assert (
        msgspec.structs.replace(
            plan(big, device="cuda"),
            memory_is_named=True,
            runtime_bytes=CUDA_BYTES,
            withheld_bytes=named.withheld_bytes,
        )
        == named
    )


def test_in_fp8_twice_as_much_fits(big: str) -> None:
    plain, small = (
        plan(big, 24 * GIB, device="cuda", kv_cache_dtype=name) for name in ("auto", "fp8")
    )
    assert (
        small.kv_bytes_per_token * 2 == plain.kv_bytes_per_token
        and small.num_blocks // 2 == plain.num_blocks
    )
    assert (
        small.concurrency[1024] == 2 * plain.concurrency[1024] + 1
        or small.concurrency[1024] == 2 * plain.concurrency[1024]
    )


def test_in_int8_nearly_twice_as_much_fits(big: str) -> None:
    plain, small = (
        plan(big, 24 * GIB, dtype="bfloat16", kv_cache_dtype=name) for name in ("auto", "int8")
    )
    assert 1.8 < plain.kv_bytes_per_token / small.kv_bytes_per_token < 2
    assert small.num_blocks * small.kv_bytes_per_token == pytest.approx(
        plain.num_blocks * plain.kv_bytes_per_token, rel=0.01
    )


def test_a_shorter_context_fits_a_smaller_gpu(big: str) -> None:
    stated = plan(big, 18 * GIB, device="cuda")
    assert (
        not stated.fits
        and stated.flags[:3] == ["--device", "cuda", "--max-model-len"]
        and 0 < int(stated.flags[3]) <= stated.longest_context
    )
    # without a given size of the cache the engine measures it
    assert plan(big, 18 * GIB, device="cuda", max_model_len=int(stated.flags[3])).fits
    assert plan(big, 12 * GIB, device="cuda").flags == []


@pytest.mark.parametrize("share", [0.9, 0.37, 1.0])
def test_the_minimum_gpu_is_exact(big: str, share: float) -> None:
    arguments = {"device": "cuda", "gpu_memory_utilization": share, "max_model_len": 5000}
    least = plan(big, GIB, **arguments).least_memory_bytes
    assert plan(big, least, **arguments).fits and not plan(big, least - 16, **arguments).fits


def test_the_estimate_grows_with_the_step(big: str) -> None:
    small, large = (
        plan(big, 80 * GIB, device="cuda", max_num_batched_tokens=tokens).step_bytes
        for tokens in (1000, 2000)
    )
    assert large - small == 1000 * (2 * 4096 + 3 * 11_008) * 2
    assert plan(big, 80 * GIB, device="cuda", max_num_seqs=1).step_bytes < small


def test_an_encoder_has_no_cache(tmp_path: Path) -> None:
    directory = save_tiny_encoder(tmp_path, "bert")
    plan = make_plan(EngineArgs(str(directory)), 2**30)
    assert plan.fits and plan.architecture == "BertModel"
    assert (plan.kv_cache_bytes, plan.kv_bytes_per_token, plan.block_bytes) == (0, 0, 0)
    assert (plan.model_context, plan.longest_context) == (512, 512)
    findings = {finding.name: finding for finding in check_model(EngineArgs(str(directory)))}
    assert findings.keys() == {"model", "weights", "fits", "tokenizer"}
    assert {finding.status for finding in findings.values()} == {"pass"}
