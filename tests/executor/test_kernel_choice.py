"""Refusals and log lines that depend on the chosen kernels. test_quantization.py has the refusals
of quantized layers.
"""

from __future__ import annotations

import pytest
from quire.tests.executor.driver import start_executor

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
