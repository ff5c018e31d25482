"""Encoders of images and texts on a GPU: the CPU's tokens and vectors, and nothing that waits.
Skipped without a GPU.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from quire.kernels.ops import AttentionMetadata
from quire.tests.executor.models.test_encoder import KINDS as TEXT_KINDS
from quire.tests.executor.models.test_encoder import TEXTS
from quire.tests.executor.pooling_core import pool, raw_rows, start_core
from quire.tests.test_images import answers, request_of, start
from quire.tests.tiny_encoders import save_tiny_encoder
from quire.tests.tiny_vision import WHOLE_KINDS, make_images, save_tiny_vision_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICE = "cuda"
SMALL = {"kv_cache_memory_bytes": 2**26, "num_gpu_blocks_override": None}


@pytest.fixture(scope="module", params=WHOLE_KINDS)
def seeing(request, tmp_path_factory) -> tuple[str, Path]:
    """The kind and the directory of a model that reads images."""
    directory = tmp_path_factory.mktemp(request.param)
    save_tiny_vision_model(directory, request.param)
    return request.param, directory


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_tokens_with_images_equal_the_cpus(seeing, enforce_eager) -> None:
    """Several images and none, and a second question about the same image."""
    kind, directory = seeing
    images, text = make_images(kind), [*range(5, 40)]
    prompts = {
        "one": [text, images[0], [7, 8]],
        "two": [[3], images[-1], text, images[0], [9]],
        "again": [text, images[0], [11]],
        "text": [text],
    }
    found = []
    for device in ("cpu", DEVICE):
        core = start(directory, device=device, enforce_eager=enforce_eager, **SMALL)
        first = answers(core, *(request_of(core, name, p) for name, p in prompts.items()))
        found.append((first, answers(core, request_of(core, "later", prompts["again"]))))
        core.shutdown()
    assert found[0] == found[1]


def test_an_image_is_encoded_without_waiting(seeing) -> None:
    """The rows are the CPU's, and the host launches all of them before the GPU has begun."""
    kind, directory = seeing
    images, found = make_images(kind), []
    for device in ("cpu", DEVICE):
        core = start(directory, device=device, **SMALL)
        encoder = core.executor.model.encoder
        encoder.encode(images)  # compiles kernels
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            rows = encoder.encode(images)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        found.append(rows.cpu())
        core.shutdown()
    assert (found[0] - found[1]).abs().max() < 1e-4 * found[0].abs().max()


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_vectors_of_texts_equal_the_cpus(kind, tmp_path) -> None:
    save_tiny_encoder(tmp_path, kind, **TEXT_KINDS[kind])
    found = []
    for device in ("cpu", DEVICE):
        core = start_core(tmp_path, device=device)
        found.append([*raw_rows(core, TEXTS), *pool(core, TEXTS)])
        core.shutdown()
    for mine, theirs in zip(found[1], found[0], strict=True):
        assert mine.shape == theirs.shape and np.abs(mine - theirs).max() < 1e-4


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_cross_encoders_give_the_cpus_scores(kind, tmp_path) -> None:
    """Their heads are computed on the host."""
    auto = "AutoModelForSequenceClassification"
    save_tiny_encoder(tmp_path, kind, auto, num_labels=1)
    found = []
    for device in ("cpu", DEVICE):
        core = start_core(tmp_path, device=device)
        found.append(pool(core, TEXTS[2:5], "classify", second_text_start=10))
        core.shutdown()
    for mine, theirs in zip(found[1], found[0], strict=True):
        assert np.abs(mine - theirs).max() < 1e-4


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("size", [64, 72, 80, 96, 128])
def test_attention_at_the_sizes_of_towers(size: int, window: int) -> None:
    """4096 patches in bfloat16, beside torch's own attention: its error against fp64 times 1.5."""
    from quire.kernels.triton.attention_encoder import encoder_attention

    length, heads = 4096, 2
    generator = torch.Generator(DEVICE).manual_seed(0)
    sizes = 3, length, heads, size
    q, k, v = torch.randn(sizes, device=DEVICE, generator=generator).bfloat16()
    starts = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
    step = AttentionMetadata(starts, starts, starts, starts, 0, [length], [length])
    place = torch.arange(length, device=DEVICE)
    mask = (place[None] - place[:, None]).abs() <= (window or length)

    def attend(dtype: torch.dtype) -> torch.Tensor:
        parts = [x.to(dtype).transpose(0, 1) for x in (q, k, v)]
        done = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask)
        return done.transpose(0, 1).double()

    truth = attend(torch.float64)
    mine = encoder_attention(q, k, v, step, size**-0.5, window).double()
    assert (mine - truth).square().mean() ** 0.5 <= 1.5 * (
        (attend(torch.bfloat16) - truth).square().mean() ** 0.5
    )
