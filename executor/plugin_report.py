"""What each installed plugin registers: a program of its own, which `quire doctor` runs.

Must not know: what is done with the report.

Standard output is a JSON object per line. Before a plugin is imported, its name; afterwards what it
has registered, or "error". So the last line names a plugin that ends the process.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import EntryPoint
from typing import Any

from ..ipc.errors import ModelLoadError
from ..ipc.plugins import installed_plugins
from ..kernels import registry
from .models import registered_models
from .models.layer_registry import replacements
from .plugins import load_plugin


def main() -> None:
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a plugin may print
    for plugin in installed_plugins():
        print(json.dumps({"name": plugin.name}), file=report, flush=True)
        print(json.dumps({"name": plugin.name, **registered_by(plugin)}), file=report, flush=True)


def registered_by(plugin: EntryPoint) -> dict[str, Any]:
    """Imports the plugin. Returns "operations", "implementations" (by operation), "layers" (what
    replaces which) and "models", each without those that were there before; or "error", a sentence.
    """
    before = _registered()
    try:
        load_plugin(plugin)
    except ModelLoadError as error:
        return {"error": str(error)}
    added = {
        kind: [one for one in now if one not in before[kind]] for kind, now in _registered().items()
    }
    implementations: dict[str, list[str]] = {}
    for op, name in added["implementations"]:
        implementations.setdefault(op, []).append(name)
    for op in added["operations"]:
        if "reference" not in implementations.get(op, []):
            problem = f"its operation {op} has no implementation named 'reference'"
            return {"error": f"the plugin {plugin.name} = {plugin.value} is incomplete: {problem}"}
    layers = [f"{built_in} by {layer.__name__}" for built_in, layer in added["layers"]]
    models = [architecture for architecture, _ in added["models"]]
    return {
        "operations": added["operations"],
        "implementations": implementations,
        "layers": layers,
        "models": models,
    }


def _registered() -> dict[str, list[Any]]:
    return {
        "operations": list(registry.CONTRACTS),
        "implementations": [
            (op, one.name)
            for op in registry.CONTRACTS
            for one in registry.implementations(op)
            if not one.function.__module__.startswith("quire.")  # imported on demand
        ],
        "layers": replacements(),
        "models": list(registered_models().items()),
    }


if __name__ == "__main__":
    main()
