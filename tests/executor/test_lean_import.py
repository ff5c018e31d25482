"""The import of torch in the engine's own process: deferred parts load on demand, and unmapped
pages come back unchanged.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import subprocess
import sys

import psutil
import pytest
from quire import LLM, SamplingParams
from quire.executor import lean_import
from quire.ipc import platform_tuning

IMPORT = """
import json, sys
from quire.executor import lean_import
from quire.frontend.engine_args import EngineArgs
assert "torch" not in sys.modules
lean_import.import_torch(EngineArgs(logits_processors=json.loads(sys.argv[1])).create_engine_config())
import torch
def runs():
    is_deferred = hasattr(sys.modules["torch._meta_registrations"], "__getattr__")
    return is_deferred, "torch._decomp.decompositions" in sys.modules
before = runs()
import torch._export, torch.distributions.normal, torch.optim.lr_scheduler
assert torch.optim.lr_scheduler is sys.modules["torch.optim"].lr_scheduler
assert torch.vmap(lambda row: row + 1)(torch.ones(2)).tolist() == [2, 2]
assert torch.export.export.__module__ == "torch.export"
assert (torch.ones(2, 3) @ torch.ones(3, 2)).argmax().item() == 0
assert torch.empty(4, device="meta").shape == (4,)
function = torch._meta_registrations.meta_index_Tensor
print(json.dumps([before, runs(), function.__module__]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "processors, is_deferred", [("[]", "true"), ('["some.package:factory"]', "false")]
)
def test_kernels_of_meta_tensors_load_on_first_use(processors, is_deferred):
    """If other code is in the process, nothing is deferred."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, processors], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    is_run = "false" if is_deferred == "true" else "true"
    assert (
        done.stdout.strip()
        == f'[[{is_deferred}, {is_run}], [false, true], "torch._meta_registrations"]'
    )


RUN = """
import json, sys
from quire.executor import lean_import
lean_import.import_torch()
from quire import LLM, SamplingParams
def deferred():
    return sorted(name for name, m in list(sys.modules.items())
                  if getattr(type(vars(m).get("__getattr__")), "__name__", "") == "function"
                  and vars(m)["__getattr__"].__module__ == lean_import.__name__)
before = deferred()
with LLM(engine="inproc") as llm:
    params = [SamplingParams(max_tokens=8, seed=1), SamplingParams(max_tokens=8, logprobs=2)]
    llm.generate(["Once upon a time"] * 2, params, use_tqdm=False)
assert deferred() == before, set(before) - set(deferred())
lean_import.run_deferred()
assert deferred() == []
import torchgen.model, unittest.mock
assert torchgen.model.FunctionSchema and unittest.mock.patch and unittest.TestCase
print(json.dumps(before))
"""


def test_a_native_model_runs_none_of_what_is_deferred():
    """What the import leaves out is left out until other code asks for it."""
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    deferred = set(json.loads(done.stdout.splitlines()[-1]))
    assert deferred == set(lean_import.deferred_modules())


EARLY = """
import sys
from quire.executor import lean_import
from quire.frontend.engine_args import EngineArgs
lean_import.import_torch()
import torch
assert hasattr(sys.modules["torch._meta_registrations"], "__getattr__")
lean_import.import_torch(EngineArgs().create_engine_config())
assert hasattr(sys.modules["torch._meta_registrations"], "__getattr__")
lean_import.import_torch(EngineArgs(logits_processors=["some.package:f"]).create_engine_config())
assert not hasattr(sys.modules["torch._meta_registrations"], "__getattr__")
"""


def test_a_configuration_that_follows_brings_back_what_other_code_needs():
    subprocess.run([sys.executable, "-c", EARLY], check=True)


def test_nothing_is_allocated_if_torch_is_already_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", object())
    lean_import.import_torch(None)


def test_library_pages_are_released_and_read_again_and_changed_ones_stay(tmp_path):
    path = tmp_path / "some.so.1"
    path.write_bytes(b"A" * 2**20)
    with path.open("rb") as file:
        unchanged = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
        changed = mmap.mmap(
            file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE
        )
    assert unchanged[:] == changed[:] == b"A" * 2**20
    changed[5] = ord("B")
    address = ctypes.addressof(ctypes.c_char.from_buffer(changed))
    # as the loader does for relocations
    assert (
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(2**20), mmap.PROT_READ)
        == 0
    )
    before = resident(path)
    assert platform_tuning.unmap_unchanged() >= 2**20
    assert before == 2**21 and resident(path) == 2**20
    assert unchanged[:] == b"A" * 2**20 and changed[:8] == b"AAAAABAA"


def resident(path) -> int:
    return sum(
        region.rss
        for region in psutil.Process().memory_maps(grouped=False)
        if region.path == str(path)
    )


@pytest.mark.slow
def test_random_weights_in_a_process_of_the_engine():
    """torch without its compiler makes no generators."""
    tokens = []
    for engine in ("process", "inproc"):
        with LLM(engine=engine, load_format="dummy") as llm:
            params = SamplingParams(temperature=0, max_tokens=4)
            tokens.append(llm.generate("x", params, use_tqdm=False)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1] and len(tokens[0]) == 4
