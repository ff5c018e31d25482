"""The example plugin examples/sonic_moe: its wheel, installed beside Quire, in a child process."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from quire.executor.models.layer_registry import unregister_layer
from quire.kernels import registry
from quire.kernels.testing import check_operation

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "sonic_moe"
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
GENERATE = """
import json, sys
from quire import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=24)
prompts = ["Once upon a time", "12 + 30 =", "The little fox"]
with LLM(engine="process", dtype="float32") as llm:
    together = llm.generate(prompts, params, use_tqdm=False)
    alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    with llm.trace(steps=1) as trace:
        llm.generate("The sun", params, use_tqdm=False)
    of_layer = [k for k in trace.kernels() if k.module == "layers[i].mlp"]
    kernels = [f"{k.op} {k.implementation} {k.count}" for k in of_layer]
tokens = [[one.outputs[0].token_ids for one in some] for some in (together, alone)]
print(json.dumps([*tokens, kernels]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder that holds the wheel's contents, as pip installs them."""
    pytest.importorskip("setuptools")
    directory = tmp_path_factory.mktemp("sonic_moe")
    source = directory / "source"
    source.mkdir()
    for path in EXAMPLE.iterdir():
        if path.is_file():
            (source / path.name).write_bytes(path.read_bytes())
    subprocess.run(
        [sys.executable, "-c", BUILD, directory], cwd=source, check=True, capture_output=True
    )
    [wheel] = directory.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(directory / "site")
    return directory / "site"


def run_child(
    site: Path | None, **environment: str
) -> tuple[list[list[int]], list[list[int]], list[str]]:
    """The tokens of three requests together, and of each alone; kernels of layers' MLPs."""
    environment = {**os.environ, **environment}
    if site is not None:
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{site}{os.pathsep}{before}" if before else str(site)
    done = subprocess.run(
        [sys.executable, "-c", GENERATE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return tuple(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_all_experts_are_the_dense_model_and_fewer_are_not(installed):
    dense, *_ = run_child(None)
    together, alone, kernels = run_child(installed)
    assert together == alone == dense
    # a trace names the router's product and what the plugin's operation packed
    assert kernels == ["linear native 5", "route_experts native 5", "sonic_moe cpu 5"]
    together, alone, _ = run_child(installed, SONIC_MOE_TOP_K="6")
    assert together == alone != dense


def test_it_is_small_and_imports_nothing_private():
    lines = [line for path in EXAMPLE.glob("*.py") for line in path.read_text().splitlines()]
    assert len(lines) <= 150
    imported = [line for line in lines if re.match(r"\s*(from|import) ", line)]
    assert not [line for line in imported if re.search(r"[. ]_", line.replace("__future__", ""))]


@pytest.fixture(scope="module")
def plugin() -> Iterator[ModuleType]:
    """The module, registered in this process."""
    spec = importlib.util.spec_from_file_location("sonic_moe", EXAMPLE / "sonic_moe.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sonic_moe"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["sonic_moe"]
    unregister_layer("GatedMLP", module.SonicMoE)
    registry.withdraw("pack_sonic_moe")


@pytest.mark.parametrize("top_k", [1, 3, 10])
def test_the_cpu_kernel_equals_the_reference(plugin, top_k):
    torch.manual_seed(0)
    experts, hidden, inner = 10, 48, 32
    weights = torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(7)]).int()
    all_on_one = torch.arange(top_k).repeat(7, 1).int()
    for chosen in (ids, all_on_one):
        packed = torch.randn(7, hidden), chosen
        check_operation(
            "pack_sonic_moe", "cpu", [weights], packed=packed, rows=(0, 1), rtol=1e-4, atol=1e-3
        )


TRITON = """
import sys, torch, triton
sys.path.insert(0, sys.argv[1])
import sonic_moe
import sonic_moe_triton
from quire.kernels.testing import check_operation
from quire.kernels.registry import register

if sys.argv[2] == "interpret":
    torch.manual_seed(0)
    register("pack_sonic_moe", name="interpreted", priority=-1)(sonic_moe_triton.pack)
    weights = torch.randn(5, 48, 40), torch.randn(5, 40, 24)
    for top_k in (1, 3, 5):
        ids = torch.stack([torch.randperm(5)[:top_k] for _ in range(19)]).int()
        packed = torch.randn(19, 40), ids
        check_operation(
            "pack_sonic_moe", "interpreted", [weights], packed=packed, rtol=1e-4, atol=1e-3
        )
else:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict.fromkeys(("x", "w", "out"), "*bf16") | dict.fromkeys(("order", "starts"), "*i64")
    types |= dict.fromkeys(("n", "k", "per_row"), "i32")
    source = ASTSource(sonic_moe_triton.grouped_gemm, types)
    assert "sm_90" in triton.compile(source, GPUTarget("cuda", 90, 32)).asm["ptx"]
print("passed")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interpret", "compile"])
def test_the_triton_kernel(how):
    """In Triton's interpreter it equals the reference; it compiles for an H100."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": str(int(how == "interpret"))}
    done = subprocess.run(
        [sys.executable, "-c", TRITON, EXAMPLE, how],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("passed\n"), done.stderr[-3000:]
