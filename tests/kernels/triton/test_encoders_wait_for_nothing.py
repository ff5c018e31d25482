"""Encoders of texts and images launched with Triton's kernels, none of which runs. The device has
no memory that could be read, so that waiting for it raises an error, and so do copies to it that
would wait, and operations on tensors of both memories.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from quire.executor.models import layers
from quire.kernels.ops import AttentionMetadata
from quire.tests.kernels.triton.budget import AbsentGpu
from quire.tests.kernels.triton.encoders import (
    LENGTHS,
    TEXTS,
    make_text_encoder,
    make_tower,
    text_inputs,
)
from quire.tests.tiny_vision import KINDS, make_images
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver
from triton.runtime.jit import JITFunction

ABSENT = torch.device("meta")


class NoCopies(TorchDispatchMode):
    """Refuses operations that would copy a tensor to the device, or that would wait for a copy."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        flat = [one for arg in args for one in (arg if isinstance(arg, (list, tuple)) else [arg])]
        found = {one.device for one in flat if isinstance(one, torch.Tensor) and one.dim()}
        if func.overloadpacket in (torch.ops.aten.to, torch.ops.aten._to_copy):
            is_moved = kwargs.get("device", args[0].device) != args[0].device
            assert not is_moved or kwargs.get("non_blocking"), "a copy that waits"
        else:
            assert len(found) < 2, f"{func} reads host memory and the device's"
        return func(*args, **kwargs)


@pytest.fixture
def launched(monkeypatch) -> Counter[str]:
    """The kernels that are launched, by name. Their tensors are on the device."""
    names: Counter[str] = Counter()

    def run(kernel, *args, **options) -> None:
        assert all(arg.device == ABSENT for arg in args if isinstance(arg, torch.Tensor))
        names.update([kernel.__name__])

    monkeypatch.setattr(driver, "_active", AbsentGpu(90))
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(layers, "free_bytes", lambda device: 2**30)
    return names


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_one_sequence_of_launches(kind, launched):
    encoder, make = make_tower(kind, "cuda", ABSENT)
    for weight in encoder.tower.weights():
        make.fill(weight[1], torch.empty(weight[1].shape, device=ABSENT))
    images = make_images(kind)
    with NoCopies():
        rows = encoder.encode(images)
    assert rows.device == ABSENT and rows.shape[1] == encoder.width
    count = encoder.config.num_layers * len(images)
    assert launched["encoder_kernel"] == count
    assert launched["layer_norm_kernel"] + launched["rms_norm_kernel"] >= 2 * count


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_one_sequence_of_launches(name, launched):
    model, make = make_text_encoder(name, "cuda", ABSENT)
    for weight in model.weights():
        make.fill(weight[1], torch.empty(weight[1].shape, device=ABSENT))
    ids, positions, metadata, *types = text_inputs(model)
    starts = metadata.query_start_loc.to(ABSENT)
    step = AttentionMetadata(starts, starts, starts, starts, 0, LENGTHS, LENGTHS)
    inputs = ids.to(ABSENT), positions.to(ABSENT), step, *(one.to(ABSENT) for one in types)
    with NoCopies():
        hidden = model(*inputs)
    assert hidden.device == ABSENT and hidden.shape == (sum(LENGTHS), 64)
    assert launched["encoder_kernel"] == 2 and launched["fused_add_layer_norm_kernel"] >= 4
