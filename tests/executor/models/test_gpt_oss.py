"""gpt-oss with its experts in MXFP4, as OpenAI publishes them: transformers' own unpacking is the
oracle, and memory holds the blocks of the file.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quire.frontend.engine_args import EngineArgs
from quire.frontend.model_info.plan import make_plan
from quire.ipc.errors import ModelLoadError
from quire.kernels import registry
from quire.tests.executor.driver import Driver, generate, greedy, start_executor
from quire.tests.executor.models.fallback.test_gguf import start
from quire.tests.executor.models.test_experts import PROMPT
from quire.tests.gguf_fallbacks import write_fallback_gguf
from quire.tests.quantized_checkpoints import write_mxfp4
from quire.tests.tiny_fallbacks import save_tiny_fallback
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

needs_native = pytest.mark.skipif(
    registry.select("cpu", torch.bfloat16).chosen["fused_moe"] != "native",
    reason="the native library is not built",
)
NUM_TOKENS = 8
FP32 = ("norm.weight", "sinks")  # in every model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """With experts in MXFP4, and with the weights that they stand for in fp32."""
    root = tmp_path_factory.mktemp("gpt_oss")
    plain, packed = root / "plain", root / "mxfp4"
    save_tiny_fallback(plain, "gpt_oss")
    meant = write_mxfp4(packed, plain)
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    return packed, plain


def test_greedy_tokens_are_those_of_transformers(checkpoints: tuple[Path, Path]) -> None:
    packed, plain = checkpoints
    oracle: Any = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    )
    (row,) = generate(start_executor(packed), [PROMPT], NUM_TOKENS, greedy(logprobs=3))
    with torch.inference_mode():
        logits = oracle(torch.tensor([row.prompt + row.output]), use_cache=False).logits[0]
    expected = logits.float().log_softmax(-1)[len(PROMPT) - 1 : -1]
    assert row.output == expected.argmax(-1).tolist()
    for (ids, logprobs, _), reference in zip(row.logprobs, expected, strict=True):
        torch.testing.assert_close(
            torch.from_numpy(logprobs), reference[ids.tolist()], atol=2e-4, rtol=0
        )


@needs_native
def test_experts_stay_blocks_and_take_the_bytes_of_the_file(
    checkpoints: tuple[Path, Path],
) -> None:
    packed, plain = checkpoints
    executor = start_executor(packed, dtype="bfloat16")
    assert executor.runner.program is not None
    stored, meant = (load_file(path / "model.safetensors") for path in checkpoints)
    of_blocks = {name for name in stored if name.endswith(("_blocks", "_scales"))}
    num_bytes = sum(
        tensor.nbytes if name in of_blocks or name.endswith(FP32) else tensor.nbytes // 2
        for name, tensor in stored.items()
    )
    assert executor._builder.weights_bytes == num_bytes
    plan = make_plan(EngineArgs(str(packed), dtype="bfloat16", max_model_len=128))
    assert plan.keeps_blocks and plan.weights_bytes == num_bytes
    held = 0
    for index, layer in enumerate(executor.model.layers):
        experts = layer.mlp.experts
        for packed_layer in (*experts.gate_up, *experts.down):
            [part] = packed_layer.parts
            assert part.type == "MXFP4"
            held += part.numbers.nbytes + part.scales.nbytes
        whole = meant[f"model.layers.{index}.mlp.experts.gate_up_proj"]
        weight = whole[1].T[::2]  # the gates of expert 1
        identity = torch.eye(64, dtype=torch.bfloat16)
        product = experts.gate_up[1].logits(identity)[:, : len(weight)]
        bias = experts.gate_up[1].bias[: len(weight)].float()
        torch.testing.assert_close(product - bias, weight.T, atol=0.02, rtol=0.02)
    assert held == sum(stored[name].nbytes for name in of_blocks)


@needs_native
@pytest.mark.parametrize("form", ["safetensors", "gguf", "int8"])
def test_bits_depend_neither_on_the_batch_nor_on_chunks(form, checkpoints, tmp_path) -> None:
    if form == "gguf":
        write_fallback_gguf(tmp_path / "m.gguf", save_tiny_fallback(tmp_path, "gpt_oss"), "MXFP4")
        executor = start(tmp_path / "m.gguf", dtype="bfloat16")
        experts = executor.model.layers[-1].mlp.experts
        for layer in (*experts.gate_up, *experts.down):
            assert [part.type for part in layer.parts] == ["MXFP4"]
    else:
        quantization = "int8" if form == "int8" else None
        executor = start_executor(checkpoints[0], dtype="bfloat16", quantization=quantization)
    assert executor.runner.program is not None
    prompts = [PROMPT, PROMPT[:2], PROMPT[3:8]]
    params = greedy(logprobs=3)
    together = generate(executor, prompts, NUM_TOKENS, params, lambda row: 3)
    for prompt, expected in zip(prompts, together):
        driver = Driver(executor)
        alone = driver.add("alone", prompt, params)
        driver.run(NUM_TOKENS)
        assert alone.output == expected.output
        for mine, other in zip(alone.logprobs, expected.logprobs, strict=True):
            assert mine[1].tobytes() == other[1].tobytes()


def test_numbers_and_scales_may_lie_in_different_files(checkpoints, tmp_path) -> None:
    packed, _ = checkpoints
    shutil.copytree(packed, split := tmp_path / "split")
    stored = load_file(split / "model.safetensors")
    parts = [{n: t for n, t in stored.items() if n.endswith("_scales") == of} for of in (0, 1)]
    (split / "model.safetensors").unlink()
    index: dict[str, str] = {}
    for number, part in enumerate(parts):
        name = f"model-{number}.safetensors"
        save_file(part, split / name, metadata={"format": "pt"})
        index |= dict.fromkeys(part, name)
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    rows = [generate(start_executor(path), [PROMPT], 4)[0] for path in (packed, split)]
    assert rows[0].output == rows[1].output


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"_scales": None}, "no file has the tensor .*gate_up_proj_scales"),
        ({"_blocks": None}, "no file has the tensor model.layers.0.mlp.experts.0.gate_proj.weight"),
        ({"_scales": torch.zeros(4, 128, 3, dtype=torch.uint8)}, r"has shape \[4, 128, 3\]"),
        ({"_scales": torch.zeros(4, 128, 2)}, "is of type F32; supported: U8"),
    ],
    ids=["scales", "blocks", "shape", "type"],
)
def test_what_is_missing_or_wrong_is_named(change, problem, checkpoints, tmp_path) -> None:
    shutil.copytree(checkpoints[0], broken := tmp_path / "broken")
    stored = load_file(broken / "model.safetensors")
    for ending, tensor in change.items():
        name = f"model.layers.0.mlp.experts.gate_up_proj{ending}"
        del stored[name]
        stored |= {} if tensor is None else {name: tensor}
    save_file(stored, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=problem):
        start_executor(broken)
