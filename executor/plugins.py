"""Plugins: installed packages with an entry point in the group `quire.plugins`, and which of them
an exception comes from.

Must not know: what plugins register.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import EntryPoint

from ..ipc.errors import ModelLoadError, QuireError
from ..ipc.plugins import installed_plugins

_loaded: dict[str, str] = {}  # entry point -> the module that it names


def load_plugins() -> None:
    """Imports the plugins of installed packages, wherever the engine runs.

    A child process has none of its parent's imports. Raises ModelLoadError naming the entry point
    that fails: a model must not run on other kernels than the user installed.
    """
    for plugin in installed_plugins():
        load_plugin(plugin)


def load_plugin(plugin: EntryPoint) -> None:
    """Raises ModelLoadError."""
    try:
        plugin.load()
    except (Exception, SystemExit) as error:
        raise ModelLoadError(
            f"the plugin {plugin.name} = {plugin.value} cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    _loaded[plugin.name] = plugin.module


class PluginFault(QuireError):
    """What a plugin's code returned is wrong. The message is one sentence that names the plugin."""


def plugin_failure(error: BaseException) -> str | None:
    """One sentence that names the plugin whose code the exception went through, or None."""
    if isinstance(error, PluginFault):
        return str(error)
    traceback, found = error.__traceback__, None
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        if _root_of(module):
            found = f"{describe_module(module)} failed: {type(error).__name__}: {error}"
        traceback = traceback.tb_next
    return found


def describe_module(module: str) -> str:
    """The plugin that a module is part of, or the module, in words."""
    if root := _root_of(module):
        return f"the plugin {root[0]} = {root[1]}"
    return f"the module {module}"


def _root_of(module: str) -> tuple[str, str] | None:
    """(plugin, the module that it names)"""
    for name, root in _loaded.items():
        if module == root or module.startswith(f"{root}."):
            return name, root
    return None


@contextlib.contextmanager
def naming_plugins() -> Iterator[None]:
    """Within it, an exception from a plugin's code becomes a ModelLoadError that names it."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ModelLoadError) or (failure := plugin_failure(error)) is None:
            raise
        raise ModelLoadError(failure) from error
