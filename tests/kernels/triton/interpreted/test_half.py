"""fp16, which GPUs support and Quire's CPU kernels do not: the kernels that no other test runs in
fp16, against torch in fp64.
"""

import dataclasses

import pytest
import torch
from quire.kernels import registry
from quire.tests.kernels import cases
from quire.tests.kernels.case import on_gpu
from quire.tests.kernels.test_parity import check_close

OPS = (
    "embedding",
    "rms_norm",
    "fused_add_rms_norm",
    "silu_and_mul",
    "reshape_and_cache",
    "fused_qk_rope_reshape_and_cache",
    "copy_blocks",
)

# half of the largest change by one rounding: rms_norm rounds twice, as transformers does, and
# torch's own once
ROUNDING = 2.0**-12


@pytest.mark.parametrize("op", OPS)
def test_agrees_with_torch_in_fp64(op):
    torch.manual_seed(0)
    registry.import_implementations("cuda")
    implementation = next(i for i in registry.implementations(op) if i.name == "triton")
    implementation = dataclasses.replace(implementation, function=on_gpu(implementation.function))
    for case in cases.MODEL_OPS[op](torch.float16):
        check_close(case, implementation, torch.float16, ROUNDING)
