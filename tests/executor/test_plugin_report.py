"""The report of plugins has what each registers, and not what was there before."""

from __future__ import annotations

import sys

import pytest
from quire.executor import models
from quire.executor.models.layer_registry import replacements, unregister_layer
from quire.executor.plugin_report import registered_by
from quire.ipc.plugins import installed_plugins
from quire.kernels import registry
from quire.tests.installed_plugins import install_plugin

ALL_KINDS = """
import torch
from quire.executor.models import register_layer, register_model
from quire.executor.models.blocks import GatedMLP
from quire.kernels.registry import operation, register

@operation
def clamp_rows(x: torch.Tensor, limit: float) -> torch.Tensor:
    "x [T, H] -> [T, H]"

@register("clamp_rows", name="reference", priority=0)
def clamp_reference(x, limit):
    return x.clamp(-limit, limit)

@register("clamp_rows", name="fast")
def clamp_fast(x, limit):
    return x.clamp(-limit, limit)

@register("rms_norm", name="mine", priority=-1)
def rms_norm(x, weight, eps):
    return x

class MyMLP(GatedMLP):
    pass

register_layer("GatedMLP", MyMLP)
register_model("MyModelForCausalLM", MyMLP)
"""
NO_REFERENCE = """
from quire.kernels.registry import operation

@operation
def clamp_rows(x, limit):
    "x [T, H] -> [T, H]"
"""


@pytest.fixture
def clean(monkeypatch):
    """What plugins registered is removed again."""
    monkeypatch.setattr(models, "_MODELS", models.registered_models())
    operations, layers = set(registry.CONTRACTS), replacements()
    yield
    for op in set(registry.CONTRACTS) - operations:
        registry.withdraw(op)
    if any(one.name == "mine" for one in registry.implementations("rms_norm")):
        registry.unregister("rms_norm", "mine")
    for built_in, layer in replacements():
        if (built_in, layer) not in layers:
            unregister_layer(built_in, layer)
    sys.modules.pop("my_kernels", None)


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            ALL_KINDS,
            {
                "operations": ["clamp_rows"],
                "implementations": {"rms_norm": ["mine"], "clamp_rows": ["reference", "fast"]},
                "layers": ["GatedMLP by MyMLP"],
                "models": ["MyModelForCausalLM"],
            },
        ),
        (
            NO_REFERENCE,
            {
                "error": "the plugin mine = my_kernels is incomplete: its operation clamp_rows "
                "has no implementation named 'reference'"
            },
        ),
        (
            "1 / 0",
            {
                "error": "the plugin mine = my_kernels cannot be loaded: "
                "ZeroDivisionError: division by zero (my_kernels.py:1)"
            },
        ),
    ],
    ids=["all_kinds", "no_reference", "exception"],
)
def test_of_a_plugin(tmp_path, monkeypatch, code, expected):
    install_plugin(tmp_path, code)
    monkeypatch.syspath_prepend(str(tmp_path))
    [plugin] = installed_plugins()
    report = registered_by(plugin)
    if "error" in report:
        report["error"] = report["error"].replace(f"{tmp_path}/", "")
    assert report == expected
