"""Fixtures that every test may use."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The root holds packages called core, ipc and kernels: on sys.path they would shadow others'
# (transformers probes `kernels`).
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]

# How OpenMP's threads wait is decided when torch is first imported, which tests do by other ways
# than the engine.
import quire.executor  # noqa: E402, F401
