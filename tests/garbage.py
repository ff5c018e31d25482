"""Garbage collections in the process of pytest skip what it has collected and imported. These are
a million objects, which take half a second each time that an engine of this process sleeps, loads
other weights or leaves a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_unfreeze = gc.unfreeze


def begin_collection() -> None:
    """Collects no garbage while pytest collects tests, which makes objects and no garbage."""
    gc.disable()


def end_collection() -> None:
    """Makes all objects permanent, also where `executor.device.release_memory` would look through
    what is frozen.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None


def end_run() -> None:
    """The interpreter ends as usual: libraries report objects that are left."""
    gc.unfreeze = _unfreeze
    gc.unfreeze()


@contextmanager
def nothing_frozen() -> Iterator[None]:
    """For a test of what is frozen: it begins with nothing, and gc.unfreeze has an effect."""
    before = gc.unfreeze
    gc.unfreeze = _unfreeze
    gc.unfreeze()
    try:
        yield
    finally:
        gc.unfreeze = before
        gc.freeze()
