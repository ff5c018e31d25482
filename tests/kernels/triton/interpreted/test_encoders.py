"""Complete tiny encoders of texts and images on the GPU kernels in the interpreter: the results are
the reference's.
"""

import pytest
import torch
from quire.tests.kernels.triton.encoders import (
    fill,
    make_text_encoder,
    make_tower,
    text_inputs,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["MPNetModel", "ModernBertModel"])
def test_texts(name):
    found = []
    for device in ("cuda", "cpu"):
        model, make = make_text_encoder(name, device, CPU)
        fill(model, make)
        with torch.inference_mode():
            found.append(model(*text_inputs(model)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert found[0].std() > 0.3


# with windows and RMS norms, and with layer norms
@pytest.mark.parametrize(("kind", "sides"), [("qwen2_5_vl", (8, 32)), ("idefics3", (12, 12))])
def test_images(kind, sides):
    pixels = torch.randint(256, (*sides, 3), generator=torch.Generator().manual_seed(0)).byte()
    found = []
    for device in ("cuda", "cpu"):
        encoder, make = make_tower(kind, device, CPU)
        fill(encoder, make)
        found.append(encoder.encode([pixels]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert found[0].std() > 0.1
