"""Events of the Trace Event Format."""

from quire.frontend.telemetry.chrome_trace import event, label


def test_spans_moments_and_labels():
    assert event("a", "c", 1, 2, 10.00049, 12.5, step=3) == {
        "name": "a",
        "cat": "c",
        "pid": 1,
        "tid": 2,
        "ts": 10.0,
        "ph": "X",
        "dur": 2.5,
        "args": {"step": 3},
    }
    moment = event("a", "c", 1, 2, 10.0)
    assert (moment["ph"], moment["s"]) == ("i", "t") and "dur" not in moment
    assert event("a", "c", 1, 2, 10.0, 9.0)["dur"] == 0
    assert label("thread_name", 1, 2, name="x")["args"] == {"name": "x"}
