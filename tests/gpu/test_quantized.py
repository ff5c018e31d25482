"""Layers of int8, int4 and blocks on a GPU: the CPU's bits and tokens, and with FP8 sums near the
reference's. Skipped without a GPU.
"""

from __future__ import annotations

import pytest
import torch
from quire.kernels import registry
from quire.kernels.reference.gguf_blocks import FP8_TYPES
from quire.kernels.reference.gguf_linear import TYPES
from quire.tests.gpu.test_engine import run
from quire.tests.kernels.case import random_blocks
from quire.tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICE = "cuda"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_results_have_the_specified_bits(bits: int, dtype: torch.dtype) -> None:
    """Weights packed on the GPU, for decodes and prompts of many sizes."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(300, 1100, generator=generator) / 33).to(dtype)
    x = torch.randn(200, 1100, generator=generator).to(dtype)
    made = {one.name: one.function for one in registry.implementations("pack_quantized_linear")}
    wanted = made["reference"](weight, None, bits).logits(x)
    registry.import_implementations("cuda")
    made = {one.name: one.function for one in registry.implementations("pack_quantized_linear")}
    multiply = made["triton"](weight.to(DEVICE), None, bits)
    for count in (1, 2, 16, 17, 64, 65, 200):
        found = multiply.logits(x[:count].to(DEVICE)).cpu()
        assert torch.equal(found, wanted[:count]), count


@pytest.mark.parametrize("type", TYPES)
def test_blocks_have_the_specified_bits(type: str) -> None:
    torch.manual_seed(0)
    blocks, x = random_blocks(300, 1024, type), torch.randn(200, 1024).bfloat16()
    made = {one.name: one.function for one in registry.implementations("pack_gguf_linear")}
    wanted = made["reference"]([blocks], [type], None, torch.bfloat16).logits(x)
    registry.import_implementations("cuda")
    made = {one.name: one.function for one in registry.implementations("pack_gguf_linear")}
    multiply = made["triton"]([blocks.to(DEVICE)], [type], None, torch.bfloat16)
    for count in (1, 16, 17, 65, 200):
        found = multiply.logits(x[:count].to(DEVICE)).cpu()
        assert torch.equal(found, wanted[:count]), count


@pytest.mark.parametrize("type", FP8_TYPES)
def test_fp8_is_the_reference(type: str) -> None:
    """Up to the order of sums, of which the tensor cores keep fewer bits in FP8; each row's error
    is independent of the others'.
    """
    if type not in ("FP8_32", "FP8_128") and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products in FP8")
    torch.manual_seed(0)
    blocks, x = random_blocks(300, 1024, type), torch.randn(200, 1024).bfloat16()
    registry.import_implementations("cuda")
    made = {one.name: one.function for one in registry.implementations("pack_gguf_linear")}
    wanted = made["reference"]([blocks], [type], None, torch.bfloat16).logits(x)
    multiply = made["triton_fp8"]([blocks.to(DEVICE)], [type], None, torch.bfloat16)
    for count in (1, 16, 17, 64, 65, 200):
        found = multiply.logits(x[:count].to(DEVICE)).cpu()
        assert (found - wanted[:count]).abs().max() < 4e-3 * wanted.std(), count


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_tokens_are_near_the_cpus(quantization: str, kind: str, tmp_path) -> None:
    """Products have the CPU's bits, but what lies between them has not, and an activation at the
    limit of two of its 255 steps takes the other one. So a token may differ where two are nearly as
    probable; most requests have all of the CPU's tokens.
    """
    model = save_tiny_model(tmp_path, kind, seed=3)
    expected = run(model, device="cpu", quantization=quantization)
    found = run(model, device=DEVICE, quantization=quantization)
    num_equal = 0
    for (tokens, logprobs), (theirs, their_logprobs) in zip(found, expected, strict=True):
        agrees = [one == other for one, other in zip(tokens, theirs, strict=True)]
        same = (*agrees, False).index(False)
        num_equal += same == len(tokens)
        assert logprobs[:same] == pytest.approx(their_logprobs[:same], abs=0.1)
    assert num_equal >= 0.75 * len(found)
