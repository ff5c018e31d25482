"""While torch's libraries load, an engine's other imports do not wait for them."""

import json
import subprocess
import sys

SCRIPT = """
import json, sys
import quire.core.early_start

def libraries():
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return {name for name, file in files.items() if file and file.endswith(".so")}

before = libraries()
import quire.core.engine_core
import quire.core.engine_proc
import quire.executor.weights.early_memory
from quire.executor import lean_import
lean_import.deferred_modules()
lean_import.installed_plugins()
print(json.dumps(sorted(libraries() - before)))
"""


def test_libraries_of_other_modules_are_loaded_before() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT], check=True, capture_output=True, text=True
    )
    assert json.loads(done.stdout) == []


WITHOUT_LIBRARIES = """
import importlib.util, sys
sys.modules["bz2"] = sys.modules["lzma"] = None  # as in a Python that was built without them
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "torch" else find_spec(name)
from quire.core import early_start
from quire.executor.torch_libraries import load_libraries
load_libraries()
print("libtorch" in open("/proc/self/maps").read())
"""


def test_a_python_without_some_libraries_and_without_torch_starts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARIES], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("False\n", "")
