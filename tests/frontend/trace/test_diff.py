"""Two traces side by side."""

from quire.frontend.trace.diff import compare
from quire.tests.frontend.trace.made import made


def test_a_slower_kernel_shows():
    text = compare(made(), made(slowness=2.0))
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    down = lines["layers[i].mlp.down_proj → linear"]
    assert down[-7:] == ["2", "20.0", "40.0", "2.00", "41%,", "20%"][-7:] or "2.00" in down
    assert lines["schedule"][1:] == ["0.400", "0.400", "1.00"]
    assert lines["execute"][3] == "2.00"


def test_kernels_of_one_trace_only():
    a, b = made(), made()
    b.engine.steps.pop()
    text = compare(a, b)
    assert "only A" in text and "only B" not in text and "only B" in compare(b, a)
