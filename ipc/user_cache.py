"""Quire's folder for what can be made again, in the user's cache.

Must not know: what is kept there. It may not exist yet.
"""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """$XDG_CACHE_HOME/quire, or ~/.cache/quire."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"
