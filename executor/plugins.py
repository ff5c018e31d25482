"""Loads plugins, which are installed packages with an entry point in the group `quire.plugins`, and
tells which of them an exception comes from.

Must not know: what plugins register.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from importlib.metadata import EntryPoint

from ..ipc.errors import ModelLoadError, QuireError
from ..ipc.plugins import installed_plugins

_loaded: dict[str, str] = {}  # entry point -> the module that it names


def load_plugins() -> None:
    """Imports the plugins of installed packages, wherever the engine runs.

    A child process has none of its parent's imports, so it calls this again. Raises ModelLoadError
    naming the entry point that fails: a model must not run on other kernels than the user
    installed.
    """
    for plugin in installed_plugins():
        load_plugin(plugin)


def load_plugin(plugin: EntryPoint) -> None:
    """Imports one plugin. Raises ModelLoadError."""
    try:
        plugin.load()
    except (Exception, SystemExit) as error:
        raise ModelLoadError(
            f"the plugin {plugin.name} = {plugin.value} cannot be loaded: "
            f"{type(error).__name__}: {error}{place_in(plugin.module, error)}"
        ) from error
    _loaded[plugin.name] = plugin.module


class PluginFault(QuireError):
    """A plugin's code returned a wrong value. The message is one sentence that names the plugin."""


def plugin_failure(error: BaseException) -> str | None:
    """One sentence that names the plugin whose code the exception went through, or None."""
    if isinstance(error, PluginFault):
        return str(error)
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if _root_of(module):
            place = f"({frame.f_code.co_filename}:{line})"
            found = f"{describe_module(module)} failed: {type(error).__name__}: {error} {place}"
    return found


def place_in(root: str, error: BaseException) -> str:
    """ " (FILE:LINE)" of the last line of the module or package `root` that the exception went
    through or, where its text cannot be compiled, that is wrong; "" if there is none.
    """
    places = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_within(frame.f_globals.get("__name__", ""), root)
    ]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno or 0))
    return " ({}:{})".format(*places[-1]) if places else ""


def is_of_plugin(module: str) -> bool:
    """Whether a plugin that is loaded here has the module."""
    return _root_of(module) is not None


def describe_module(module: str) -> str:
    """Describes in words the plugin that a module is part of, or else the module."""
    if root := _root_of(module):
        return f"the plugin {root[0]} = {root[1]}"
    return f"the module {module}"


def _root_of(module: str) -> tuple[str, str] | None:
    """(plugin, the module that it names)"""
    for name, root in _loaded.items():
        if _is_within(module, root):
            return name, root
    return None


def _is_within(module: str, root: str) -> bool:
    return module == root or module.startswith(f"{root}.")


@contextlib.contextmanager
def naming_plugins() -> Iterator[None]:
    """A context in which an exception from a plugin's code becomes a ModelLoadError naming it."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ModelLoadError) or (failure := plugin_failure(error)) is None:
            raise
        raise ModelLoadError(failure) from error
