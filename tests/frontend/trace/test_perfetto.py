"""The Chrome trace: its rows, and events that lie within each other."""

import json
from itertools import pairwise

from quire.frontend.trace.perfetto import (
    ENGINE,
    KERNELS,
    OUTPUTS,
    REQUESTS,
    STAGES,
    STEPS,
    chrome_trace,
)
from quire.tests.frontend.trace.made import made


def test_one_row_per_thread_and_nested_events(tmp_path):
    made().to_perfetto(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    names = {one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert {"steps", "stages", "kernels, thread 0", "kernels, thread 1"} <= names
    spans = [one for one in events if one["ph"] == "X"]
    assert {one["tid"] for one in spans if one["pid"] == ENGINE} == {
        STEPS,
        STAGES,
        KERNELS,
        KERNELS + 1,
    }
    for row in (STEPS, KERNELS, KERNELS + 1):
        mine = sorted(
            (one for one in spans if (one["pid"], one["tid"]) == (ENGINE, row)),
            key=lambda one: one["ts"],
        )
        for one, following in pairwise(mine):
            assert one["ts"] + one["dur"] <= following["ts"] + 0.002
    hops = [one for one in spans if one["cat"] == "hop"]
    # a request that is encoded at once, and outputs that wait at both ends
    parts = ["serialise", "socket", "deserialise", "wait"]
    assert [one["name"] for one in hops] == [*parts, "wait", *parts]
    assert [one["tid"] for one in hops] == [REQUESTS] * 4 + [OUTPUTS] * 5
    kernel = next(one for one in spans if one["cat"] == "kernel")
    assert kernel["args"]["shape"] == "[4, 64]" and kernel["args"]["weight_bytes"] == 40_000


def test_a_kernel_without_threads_has_the_first_row():
    trace = made()
    for step in trace.steps:
        for rank in step.ranks:
            for kernel in rank.kernels:
                kernel.threads.clear()
    rows = {one["tid"] for one in chrome_trace(trace)["traceEvents"] if one.get("cat") == "kernel"}
    assert rows == {KERNELS}
