"""The CPU implementations here call torch's own kernels. They need no compiler on the user's
machine.

Must not know: models, requests.

A decode step of a small model makes about a hundred small torch calls of a few microseconds each.
The number of calls therefore matters more than the amount of arithmetic. Operations without a
module here use the reference, which is fast enough for them.
"""

from . import activation, attention, encoder, grammar, kv_cache, linear, norm, rotary, sampling

# isort: split
from . import native
