"""Operations that run in Triton on a GPU; a machine without one does not import Triton."""

import subprocess
import sys

import pytest
import torch
from quire.ipc.errors import InvalidParameterError
from quire.kernels import registry

# Operations without a kernel of Quire's on a GPU: torch's kernels run, as the reference calls them.
NOT_IN_TRITON = {"pack_linear"}
NOT_IN_TRITON |= {"expert_outputs", "weighted_sum"}  # of engines that share experts, on CPUs
NOT_IN_TRITON |= {"pack_head_linear", "soft_cap"}
NOT_IN_TRITON |= {"spread_logits"}  # of heads that draft


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_gpu_runs_triton_wherever_there_is_a_kernel(dtype):
    table = registry.select(
        "cuda", dtype, head_dim=128, num_heads=28, num_kv_heads=4, block_size=16
    )
    assert {op for op, name in table.chosen.items() if name != "triton"} == NOT_IN_TRITON
    assert {table.chosen[op] for op in NOT_IN_TRITON} <= {"reference", "cublas"}


def test_products_in_fp8_are_for_gpus_that_have_them():
    op = "pack_gguf_linear"
    chosen = [registry.select("cuda", torch.bfloat16, capability=c).chosen[op] for c in (80, 89)]
    assert chosen == ["triton", "triton_fp8"]
    with pytest.raises(InvalidParameterError, match="'triton_fp8' of .* does not run.*=86"):
        registry.select("cuda", torch.bfloat16, {op: "triton_fp8"}, capability=86)


def test_a_cpu_never_runs_triton_nor_imports_it():
    assert "triton" not in registry.select("cpu", torch.bfloat16).chosen.values()
    code = (
        "import sys, torch; from quire.kernels import registry; "
        "registry.select('cpu', torch.float32); print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
