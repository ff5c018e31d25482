"""What tests of bits in the interpreter need."""

import pytest


@pytest.fixture
def ordered_dots(monkeypatch):
    """numpy's matrix products add in an order that depends on a row's place; these do not."""
    import numpy as np
    from quire.tests.kernels.triton.guard import as_f32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self, a, b, total, *rest):
        left, right = as_f32(a).data, as_f32(b).data
        result = total.data.copy()
        for k in range(left.shape[1]):
            result += np.outer(left[:, k], right[k])
        return TensorHandle(result, total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
