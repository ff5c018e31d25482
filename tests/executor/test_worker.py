"""The cache that the worker allocates, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from quire import LLM
from quire.executor.runner.step_inputs import NULL_BLOCK
from quire.executor.worker import Worker
from quire.frontend import bundled_model
from quire.ipc.errors import InvalidParameterError, ModelLoadError
from quire.kernels import registry
from quire.tests.executor.driver import generate, greedy, make_config, start_executor

BUNDLED = Path(bundled_model.__file__).parent


@pytest.mark.parametrize(
    ("kind", "dtype", "per_token"),
    [("qwen2", "float32", 3 * 2 * 2 * 16 * 4), ("qwen3", "bfloat16", 3 * 2 * 2 * 24 * 2)],
)
def test_cache_has_the_size_it_says(tiny, kind, dtype, per_token):
    worker = Worker(make_config(tiny(kind), dtype=dtype, block_size=32))
    worker.load_model(lambda stage, fraction: None)
    assert worker.block_bytes == 32 * per_token
    assert worker.initialize_kv_cache(21) == 21 * 32 * per_token
    tensors = [
        tensor
        for layer in worker.model.attention_layers()
        for tensor in (layer.key_cache, layer.value_cache)
    ]
    assert sum(tensor.nbytes for tensor in tensors) == 21 * 32 * per_token
    assert len({tensor.data_ptr() for tensor in tensors}) == 6
    for tensor in tensors:
        assert (
            tensor.shape == (21, 32, 2, 16 if kind == "qwen2" else 24)
            and tensor.is_contiguous()
            and tensor.dtype == getattr(torch, dtype)
        )
        # except the null block, which kernel trials may have written
        assert not tensor[NULL_BLOCK + 1 :].any()


SLOW = {"reshape_and_cache": "reference", "paged_attention": "reference"}


@pytest.mark.parametrize(
    ("kv_cache_dtype", "head_bytes", "dtype"),
    [("fp8", 16, torch.float8_e4m3fn), ("int8", 16 + 4, torch.int8)],
)
def test_a_small_cache_has_one_byte_per_number(tiny, kv_cache_dtype, head_bytes, dtype):
    executor = start_executor(
        tiny(),
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        kernels=SLOW,
        kv_cache_memory_bytes=2**20,
    )
    worker = executor
    assert worker.block_bytes == 16 * 3 * 2 * 2 * head_bytes
    assert (
        worker.memory_usage()["kv_cache_bytes"]
        == worker.determine_num_blocks() * worker.block_bytes
        == 2**20 // worker.block_bytes * worker.block_bytes
    )
    worker.initialize_swap_space()
    host = worker._mover._host_caches
    caches = [
        cache
        for layer in worker.model.attention_layers()
        for cache in (layer.key_cache, layer.value_cache)
    ]
    assert {cache.dtype for cache in (*caches, *host)} == {dtype} and host


def test_fp8_without_fast_kernels_is_refused_before_the_weights_are_read(tiny, tmp_path):
    shutil.copy(tiny() / "config.json", tmp_path)
    for kernels in ({}, {"paged_attention": "reference"}):
        with pytest.raises(
            InvalidParameterError,
            match="kv_cache_dtype: fp8 is served by the kernels for NVIDIA GPUs; use auto, or set "
            "kernels=",
        ):
            start_executor(tmp_path, kv_cache_dtype="fp8", kernels=kernels)
    with pytest.raises(
        InvalidParameterError, match="kernels: implementation 'cpu' of paged_attention does not run"
    ):
        start_executor(tmp_path, kv_cache_dtype="fp8", kernels={"paged_attention": "cpu"})


def test_int8_without_native_kernels_is_refused(tiny, tmp_path):
    shutil.copy(tiny("qwen3") / "config.json", tmp_path)
    message = (
        r"kv_cache_dtype: int8 is served by the native CPU kernels and those for NVIDIA GPUs for a "
        r"head_dim that is a multiple of 16 .* use auto, or set kernels="
    )
    for arguments in ({}, {"cpu_isa": "none"}):  # heads of 24
        with pytest.raises(InvalidParameterError, match=message):
            start_executor(tmp_path, kv_cache_dtype="int8", **arguments)
    shutil.copy(tiny() / "config.json", tmp_path)
    with pytest.raises(InvalidParameterError, match=message):
        start_executor(tmp_path, kv_cache_dtype="int8", cpu_isa="none")


@pytest.mark.parametrize(
    ("kv_cache_dtype", "most", "bias"), [("fp8", 0.4, 0.1), ("int8", 0.1, 0.02)]
)
def test_a_small_cache_changes_likely_tokens_little(tiny, kv_cache_dtype, most, bias):
    """On the bundled model, which is trained: logits of a typical prompt, with a cache of 4 or 8
    significant bits.
    """
    prompt, scores = list(range(300, 360)), []
    for name in ("auto", kv_cache_dtype):
        executor = start_executor(BUNDLED, kv_cache_dtype=name, kernels=SLOW)
        (row,) = generate(executor, [prompt], 8, greedy(prompt_logprobs=0))
        scores.append(
            torch.tensor([float(logprobs[0]) for _, logprobs, _ in row.prompt_logprobs.values()])
        )
    difference = scores[1] - scores[0]
    assert 0 < difference.abs().mean() < most and difference.mean().abs() < bias


def test_dummy_weights_need_no_files(tiny, tmp_path):
    shutil.copy(tiny() / "config.json", tmp_path)
    executors = [start_executor(tmp_path, load_format="dummy", seed=seed) for seed in (3, 3, 4)]
    first, again, other = (
        generate(executor, [[1, 2, 3]], 8, greedy(logprobs=0))[0] for executor in executors
    )
    assert first.output == again.output and first.error is None
    assert first.logprobs[0][1] != other.logprobs[0][1]


def test_a_kernel_that_cannot_run_fails_at_start(tiny):
    @registry.register("rms_norm", name="broken", priority=-1)
    def rms_norm(x, weight, eps):
        raise ArithmeticError("no norm today")

    try:
        with pytest.raises(ArithmeticError, match="no norm today"):
            start_executor(tiny(), kernels={"rms_norm": "broken"})
    finally:
        registry.unregister("rms_norm", "broken")


def test_threads_are_set(tiny):
    assert Worker(make_config(tiny(), num_threads=1)).num_threads == torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            {"device": "cuda"},
            "device: cuda: PyTorch",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        ({"dtype": "float16"}, "dtype: float16 is not supported on a CPU"),
    ],
)
def test_what_the_device_lacks_is_refused_before_loading(tiny, arguments, message):
    with pytest.raises(InvalidParameterError, match=message):
        Worker(make_config(tiny(), **arguments))


def test_unknown_kernel_and_architecture(tiny):
    def load(hf_overrides=None, **arguments):
        Worker(make_config(tiny(), hf_overrides, **arguments)).load_model(
            lambda stage, fraction: None
        )

    with pytest.raises(InvalidParameterError, match="kernels: .*no_such_kernel"):
        load(kernels={"rms_norm": "no_such_kernel"})
    with pytest.raises(ModelLoadError, match="architecture GPT2LMHeadModel is not supported"):
        load({"architectures": ["GPT2LMHeadModel"]})


def test_unread_keys_of_the_configuration_are_logged_once(tiny, tmp_path, caplog):
    """Frontend and engine both read config.json; only one of them logs, and only keys that could
    change results. A config without `architectures` is loaded by its model_type.
    """
    directory = shutil.copytree(tiny("qwen2"), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    del config["architectures"]
    config |= {"_model_name_or_path": "x", "unk_token_id": 0, "mup_scale": 8.0}
    (directory / "config.json").write_text(json.dumps(config))
    with LLM(str(directory), engine="inproc", kv_cache_memory_bytes=2**20, max_model_len=64):
        pass
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert messages == ["config.json: keys that Quire does not use: mup_scale"]
