"""Which installed packages extend the engine: those with an entry point in the group PLUGIN_GROUP.

Must not know: torch, what plugins register.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# the entry points name modules that register kernels, operations, layers or models on import
PLUGIN_GROUP = "quire.plugins"


def installed_plugins() -> list[EntryPoint]:
    """In the order in which every engine imports them."""
    from importlib.metadata import entry_points  # it imports zipfile, email and csv

    return list(entry_points(group=PLUGIN_GROUP))
