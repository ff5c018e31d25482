"""Loads torch's libraries into the process, before torch is imported.

Must not know: torch's modules. It imports little, so that loading can begin first of all.
"""

from __future__ import annotations

import ctypes
import os
import threading
from importlib.util import find_spec

# ctypes.CDLL(path) holds the GIL. The search for this function would do so, too, and wait, if
# another thread loaded a library.
_dlopen = ctypes.CDLL(None).dlopen
_dlopen.argtypes, _dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p


def begin_loading() -> None:
    """Does what load_libraries does, in a thread. Until that is done, the import of any module that
    is a library waits and holds the GIL.
    """
    threading.Thread(target=load_libraries, name="quire-torch-libraries", daemon=True).start()


def load_libraries() -> None:
    """Loads torch's libraries without the GIL. The import would hold it for 0.3 s, while another
    thread imports the core and handles the configuration.

    If another thread is loading them, this waits for it. Functions are found when they are called,
    since most never are; not those of CUDA, where torch tries other files if one lacks a function.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return
    directory = os.path.join(os.path.dirname(spec.origin), "lib")
    path = os.path.join(directory, "libtorch_python.so")
    if os.path.isfile(path):
        has_cuda = os.path.isfile(os.path.join(directory, "libtorch_cuda.so"))
        _dlopen(os.fsencode(path), os.RTLD_NOW if has_cuda else os.RTLD_LAZY)
