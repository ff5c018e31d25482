"""The compiled code of a wrapper's launches, inspected without a GPU: registers, spills, shared
memory and instructions, on sm_80 and sm_90.

A budget is a call of a wrapper, as a model makes it, and the limits of its launches:

    BUDGETS = [
        Budget("rms_norm, 896", lambda: norm.rms_norm(bf16(4, 896), bf16(896), 1e-6), registers=40)
    ]

    @pytest.mark.parametrize(("budget", "arch"), combinations(BUDGETS), ids=str)
    def test_budget(budget, arch):
        budget.check(arch)

The tensors are in host memory and are never read: the launches are compiled as the wrapper requests
them, with its warps, stages and pointer alignments, and not run.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from quire.tests.kernels.triton.waiting import NothingWaits
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
# bytes that one program may have, by architecture
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
# The budgets that each run compiles: kernels of ordinary decoders, and some others that take a
# second or two. The older architecture is compiled once.
IN_EACH_RUN = {"rms_norm, H = 896": (80, 90)} | dict.fromkeys(
    (
        *("fused_add_rms_norm, H = 3584", "norm, 896 x 1152", "decode 7B", "prefill 7B"),
        *("silu_and_mul", "gather_rows", "rotary and cache, D = 64", "reshape_and_cache"),
        *("argmax", "sample_tokens, no filters", "random_gumbel"),
        *("apply_penalties", "apply_grammar_bitmask", "prepare_step_inputs"),
        *("append_sampled_tokens", "route_experts, E = 128", "count_experts"),
        *("selective_scan", "altup_predict"),
    ),
    (90,),
)
# 16 bytes per thread, or a tile by the copy engine
WIDE_LOAD = r"\b(?:LDG|LDGSTS)\S*\.128\b|\bUTMALDG\b"


class AbsentGpu:
    """Replaces Triton's driver: names the architecture to compile for.

    Launch caches are kept per device, so the device number is the architecture.
    """

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(self.arch, 10)


@dataclass(frozen=True)
class Compiled:
    kernel: str
    registers: int  # per thread
    stack: int  # bytes that a thread spills
    shared: int  # bytes per program
    sass: str

    def count(self, instruction: str) -> int:
        return len(re.findall(instruction, self.sass))

    def __str__(self) -> str:
        wide, narrow = self.count(WIDE_LOAD), self.count(r"\bLDG\S*")
        return (
            f"{self.kernel}: {self.registers} registers, {self.stack} B stack, "
            f"{self.shared} B shared, {wide} wide of {narrow} loads"
        )


def compile_launches(call: Callable[[], Any], arch: int) -> list[Compiled]:
    """Every launch that `call` makes, in order, compiled for `arch`.

    Fails if `call` reads a tensor.
    """
    return [_inspect(kernel) for kernel in compiled_kernels(call, arch)]


def compiled_kernels(call: Callable[[], Any], arch: int) -> list[Any]:
    """As compile_launches, but returns Triton's own objects, which have a `name`, and a `hash` that
    is equal for launches that share a compilation.
    """
    kernels = []

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    run = JITFunction.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", AbsentGpu(arch))
        patch.setattr(JITFunction, "run", compile_only)
        with NothingWaits():
            call()
    return kernels


def _inspect(kernel: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", "--dump-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
    return Compiled(kernel.name, registers, stack, kernel.metadata.shared, text)


@dataclass(frozen=True)
class Budget:
    """Limits of a call's launches. Nothing may spill.

    `contains`: patterns of instructions, by architecture, that some launch of the call must have.
    """

    name: str
    call: Callable[[], Any]
    registers: int = 255
    shared: int | None = None  # bytes; None: all that the architecture has
    launches: int = 1
    wide_loads: bool = True  # every launch loads 16 bytes at once: rows are contiguous
    contains: dict[int, tuple[str, ...]] = field(default_factory=dict)
    archs: tuple[int, ...] = tuple(SHARED_MEMORY)

    def __str__(self) -> str:
        return self.name

    def check(self, arch: int) -> list[Compiled]:
        launches = compile_launches(self.call, arch)
        assert len(launches) == self.launches, [launch.kernel for launch in launches]
        for launch in launches:
            assert launch.stack == 0, f"spills: {launch}"
            assert launch.registers <= self.registers, str(launch)
            assert launch.shared <= (self.shared or SHARED_MEMORY[arch]), str(launch)
            assert launch.count(WIDE_LOAD) or not self.wide_loads, f"no 16-byte loads: {launch}"
        for instruction in self.contains.get(arch, ()):
            assert any(launch.count(instruction) for launch in launches), (
                f"no {instruction}: {launches[0]}"
            )
        return launches


def combinations(budgets: Iterable[Budget]) -> list[Any]:
    """Pairs of a budget and an architecture. Those that are not IN_EACH_RUN are slow."""
    return [
        pytest.param(
            budget, arch, marks=[] if arch in IN_EACH_RUN.get(budget.name, ()) else pytest.mark.slow
        )
        for budget, arch in itertools.product(budgets, SHARED_MEMORY)
        if arch in budget.archs
    ]


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def f32(*shape: int) -> torch.Tensor:
    return torch.empty(shape)


def i64(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64)


def i32(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32)
