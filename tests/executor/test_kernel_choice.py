"""Refusals and log lines that depend on the chosen kernels. test_quantization.py has the refusals
of quantized layers.
"""

from __future__ import annotations

import pytest
import torch
from quire import InvalidParameterError
from quire.executor.kernel_choice import INVARIANT_ON_A_GPU, chosen_kernels
from quire.executor.models import find_model
from quire.tests.executor.driver import make_config, start_executor

SLOW = {"reshape_and_cache": "reference", "paged_attention": "reference"}


@pytest.mark.parametrize(("head_dim", "kernels"), [(20, {}), (24, {}), (20, SLOW)])
def test_heads_without_native_attention_are_logged_once(tiny, caplog, head_dim, kernels):
    """Nothing is logged if native attention supports the heads, or if the user chose the
    kernels.
    """
    model = tiny("qwen3", head_dim=head_dim)
    with caplog.at_level("WARNING", "quire"):
        start_executor(model, dtype="bfloat16", kernels=kernels)
    warnings = [r.getMessage() for r in caplog.records if "head_dim=" in r.getMessage()]
    if head_dim == 20 and not kernels:
        [warning] = warnings
        assert warning.startswith("head_dim=20: native attention takes multiples of 8")
        assert "may depend on the requests beside it" in warning
    else:
        assert warnings == []


def test_batch_invariance_needs_native_kernels_on_a_cpu(tiny):
    model = tiny("qwen3", head_dim=16)
    start_executor(model, dtype="bfloat16", batch_invariant=True)
    with pytest.raises(InvalidParameterError, match="batch_invariant.*native.*paged_attention"):
        start_executor(model, dtype="bfloat16", batch_invariant=True, kernels=SLOW)


def kernels_on_a_gpu(model, **arguments) -> dict[str, str]:
    config = make_config(model, batch_invariant=True, **arguments)
    hf_config, impl = config.model_config.hf_config, config.model_config.model_impl
    shape = find_model(hf_config, impl).parse_config(hf_config)
    return chosen_kernels(config, shape, torch.device("cuda"))


def test_batch_invariance_chooses_kernels_of_a_gpu(tiny):
    model = tiny("qwen3", head_dim=16)
    others = {"rms_norm": "reference"}
    assert kernels_on_a_gpu(model, kernels=others) == INVARIANT_ON_A_GPU | others
    with pytest.raises(InvalidParameterError, match='"triton" for pack_linear, not "cublas"'):
        kernels_on_a_gpu(model, kernels={"pack_linear": "cublas"})


@pytest.mark.parametrize(
    ("kind", "impl", "words"),
    [
        ("deepseek_v3", "auto", "latent attention"),
        ("qwen2", "transformers", "transformers' code"),
    ],
)
def test_batch_invariance_is_refused_by_name(tiny, kind, impl, words):
    with pytest.raises(InvalidParameterError, match=f"batch_invariant: must be False.*{words}"):
        kernels_on_a_gpu(tiny(kind), model_impl=impl)
