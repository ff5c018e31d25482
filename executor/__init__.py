"""The executor: runs the model over the slots and blocks that the core scheduled.
May know: torch, the model's weights, slots, block ids, token ids.
Must not know: text, requests' lives, who asked; no scheduling is decided here."""

import os

# Set before torch is imported, which is when OpenMP reads it; a user's own value stays. By default its threads spin at the end of every
# operation: where others want the cores too, each operation then waits for a thread that was put aside while the rest burn their share
# (two threads on two busy cores, a decode step of the bundled model: 435 ms against 4). Asleep they also leave an idle engine idle.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
