"""Functions of plugins, compiled from C with plugin.h alone, in native programs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from quire import LLM, SamplingParams
from quire.kernels.cpu.native.external import NativeFunction, include_path
from quire.kernels.cpu.native.library import library
from quire.kernels.registry import register, unregister
from quire.kernels.testing import check_operation
from torch import Tensor

ROOT = Path(__file__).resolve().parents[3]
COMPILER = shutil.which(os.environ.get("CC", "gcc").split()[-1])
pytestmark = [
    pytest.mark.skipif(library is None, reason="native kernels are not built here"),
    pytest.mark.skipif(COMPILER is None, reason="no C compiler"),
]
SOURCE = """
#include <math.h>
#include <quire/plugin.h>

/* x [rows, 2 * n], out [rows, n] in fp32: silu(first half) * second half */
void silu_and_mul(const quire_arguments* a, int64_t first, int64_t count) {
    for (int64_t row = first; row < first + count; row++) {
        const float* x = (const float*)a->data[0] + row * a->row[0];
        float* out = (float*)a->data[1] + row * a->row[1];
        for (int64_t i = 0; i < a->size[1]; i++)
            out[i] = x[i] / (1 + expf(-x[i])) * x[i + a->size[1]];
    }
}

/* x [rows, n] = numbers[0] * weight [n] + row * numbers[1] */
void fill(const quire_arguments* a, int64_t first, int64_t count) {
    if (a->dtype[0] != QUIRE_F32 || a->dtype[1] != QUIRE_F32 || a->row[1] != 0) return;
    for (int64_t row = first; row < first + count; row++)
        for (int64_t i = 0; i < a->size[0]; i++)
            ((float*)a->data[0])[row * a->row[0] + i] = (float)(
                a->numbers[0] * ((const float*)a->data[1])[i] + (double)row * a->numbers[1]);
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("plugin")
    (directory / "plugin.c").write_text(SOURCE)
    for flags in (["-std=c99", "-pedantic", "-shared", "-fPIC"], ["-x", "c++", "-fsyntax-only"]):
        command = [COMPILER, "-Wall", "-Werror", "-O2", "-I", include_path(), *flags]
        subprocess.run(
            [*command, directory / "plugin.c", "-o", directory / "plugin.so", "-lm"]
            if "-shared" in flags
            else [*command, directory / "plugin.c"],
            check=True,
        )
    return directory / "plugin.so"


@pytest.mark.slow
def test_the_example_of_the_docs_has_an_effect(tmp_path):
    """docs/extending.md: compiled as it says, checked against the reference, and traced by name."""
    page = (ROOT / "docs" / "extending.md").read_text()
    blocks = re.findall(r"^(<!-- [^\n]* -->)\n```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for above, code in blocks:
        if name := re.fullmatch(r"<!-- file: (my_norm\.\w+) -->", above):
            (tmp_path / name[1]).write_text(code)
    [compile_it] = [code for _, code in blocks if "my_norm.c -o" in code]
    [use_it] = [code for _, code in blocks if "import my_norm" in code]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run = partial(subprocess.run, cwd=tmp_path, env=environment, check=True, timeout=120)
    run(["bash", "-ec", compile_it])
    done = run([sys.executable, "-c", use_it], capture_output=True, text=True)
    # "native": the model stays one native call
    assert "layers[i].input_layernorm: rms_norm, mine_in_c, native" in done.stdout


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_weights_and_numbers_arrive(compiled, threads):
    fill = NativeFunction(compiled, "fill")
    assert library is not None
    wide, weight = torch.zeros(5000, 7), torch.randn(5)
    library.set_num_threads(threads)
    try:
        fill([wide[:, 1:6]], [weight], [2.0, 0.5])
    finally:
        library.set_num_threads(1)
    expected = 2 * weight + 0.5 * torch.arange(5000.0)[:, None]
    torch.testing.assert_close(wide[:, 1:6], expected)
    assert not wide[:, ::6].any()


def test_other_tensors_are_refused(compiled):
    fill = NativeFunction(compiled, "fill")
    with pytest.raises(ValueError, match=r"tensor 0 has shape \[4, 3\].* contiguous"):
        fill([torch.zeros(3, 4).T], [torch.zeros(3)])
    with pytest.raises(ValueError, match=r"tensor 1 has shape \[2, 4\]"):
        fill([torch.zeros(3, 4), torch.zeros(2, 4)])
    with pytest.raises(ValueError, match="at most 4 numbers, not 1 \\+ 0 and 5"):
        fill([torch.zeros(3, 4)], numbers=range(5))
    with pytest.raises(AttributeError, match="missing"):
        NativeFunction(compiled, "missing")


def test_a_model_that_calls_it_stays_one_native_call(compiled):
    function = NativeFunction(compiled, "silu_and_mul")

    @register("silu_and_mul", name="from_c", priority=-1, is_native=True)
    def silu_and_mul(x: Tensor) -> Tensor:
        out = function.empty(len(x), x.shape[1] // 2, dtype=x.dtype)
        function([x, out])
        return out

    params = SamplingParams(temperature=0, max_tokens=16)
    prompts = ["Once upon a time", "12 + 30 ="]
    try:
        check_operation("silu_and_mul", "from_c", [(torch.randn(5, 64),)], rows=(0,))
        answers = []
        for kernels in ({}, {"silu_and_mul": "from_c"}):
            with LLM(engine="inproc", dtype="float32", kernels=kernels) as llm:
                runner = llm.llm_engine.client._engine.core.executor.runner
                assert runner.program is not None
                names = {type(call).__name__ for call in runner.program.calls}
                assert ("External" in names) == bool(kernels)
                with llm.trace(steps=1) as trace:
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                traced = {(one.op, one.implementation) for one in trace.kernels()}
                assert (("silu_and_mul", "from_c, native") in traced) == bool(kernels)
                assert "external" not in dict(traced)
                answers.append([output.outputs[0].token_ids for output in outputs])
        assert answers[0] == answers[1]
    finally:
        unregister("silu_and_mul", "from_c")
