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
