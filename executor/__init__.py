"""The executor: runs the model over the slots and blocks that the core scheduled.

Must not know: text, requests' lives, who asked; no scheduling is decided here.
"""

import os

# Set before torch is imported, which is when OpenMP reads them; a user's own values stay. By
# default its threads spin for milliseconds at the end of every operation: where others want the
# cores too, an operation then waits for a thread that was put aside while the rest burn their share
# (two threads on two busy cores, a decode step of the bundled model: 435 ms against 4). Not
# spinning at all costs a quarter of the speed on an idle machine. 1000 turns, some microseconds,
# are most of what spinning gives; tests/bench/LEDGER.md has the figures.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
