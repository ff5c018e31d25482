"""Fixtures that every test may use.
May know: pytest, and quire as installed.
Must not know: one test's own needs."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The root holds packages called core, ipc and kernels: on sys.path they would shadow others' (transformers probes `kernels`).
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]

# As executor/__init__.py does for the engine's own process. Tests import torch by other ways first, and then it is too late.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
