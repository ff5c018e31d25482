"""Traces travel as plain values, and places are lines of the package."""

import functools

import msgspec
from quire.ipc import trace
from quire.ipc.trace import EngineTrace, Kernel, RankTrace, StepTrace, place_of, place_of_function

KERNEL = Kernel("layers.0.mlp", "add", "native", "[1, 8]", "float32", 1.0, 0.5, threads=[(0, 1, 2)])
STEP = StepTrace(
    3,
    1.0,
    0.1,
    1.1,
    0.5,
    0.1,
    64,
    [],
    [],
    [],
    [],
    [5, 4, 4],
    1,
    [RankTrace(1.1, 0.5, [], [], [KERNEL])],
)


def test_a_trace_survives_the_wire():
    sent = EngineTrace("m", "float32", "cpu", 1, "avx2", "Llama", 7, [STEP])
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(sent))
    assert plain["steps"][0]["ranks"][0]["kernels"][0]["module"] == "layers.0.mlp"
    assert msgspec.convert(plain, EngineTrace) == sent


def test_places_name_no_folder_of_this_machine():
    place = place_of_function(place_of)
    file, line = place.split(":")
    assert file == "ipc/trace.py"
    source = open(trace.__file__).read().splitlines()
    assert source[int(line) - 1].startswith("def place_of(")
    assert place_of("/x/site-packages/torch/nn/a.py", 3) == "torch/nn/a.py:3"
    assert place_of("/somewhere/script.py", 3) == "script.py:3"


def test_methods_and_wrapped_functions_have_their_own_place():
    @functools.wraps(place_of)
    def wrapped(*args):
        return place_of(*args)

    assert place_of_function(wrapped) == place_of_function(place_of)
    assert place_of_function(len) == ""
