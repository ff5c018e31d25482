"""Runs the model over the slots and blocks that the core has scheduled.

Must not know: text, requests' lifecycles, clients; no scheduling is decided here.

`executor.py` is the interface. `worker.py` implements it in the engine's own process, and `ranks/`
with a worker in each of several processes. `model.py` says what a model is to those that use it. A
worker builds models (`model_builder.py`, `head_builder.py`), may have another one that drafts
(`draft.py`), and keeps evicted blocks (`offload/`).
"""

import os

# Read by OpenMP when torch is imported; a user's own values are kept. By default OpenMP's threads
# spin for milliseconds after every operation. If other processes need the cores, an operation then
# waits for a descheduled thread while the others spin (two threads on two busy cores, a decode step
# of the bundled model: 435 ms against 4). Without spinning, an idle machine is a quarter slower.
# 1000 turns, some microseconds, give most of the benefit; see tests/bench/LEDGER.md.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
