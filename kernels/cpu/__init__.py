"""Fast implementations for CPUs, out of torch's own kernels: no compiler is needed on the user's
machine.

Must not know: models, requests.

A decode step of a small model is a hundred small torch calls of a few microseconds each, so here
the number of calls counts before the amount of arithmetic. Operations without a file here are fast
enough as the reference has them.
"""

from . import activation, attention, grammar, kv_cache, linear, norm, rotary, sampling

# isort: split
from . import native
