"""Fixtures for all tests."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The repository root holds packages named core, ipc and kernels. On sys.path they would shadow
# packages of the same name (transformers probes for `kernels`).
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]

# OpenMP's wait policy is fixed when torch is first imported, and tests may import torch before the
# engine does.
import quire.executor  # noqa: E402, F401
