"""Files with changed headers."""

from __future__ import annotations

import random
from struct import pack


def mutated(content: bytes, header_bytes: int, seed: int) -> bytes:
    """One to four changes of the header: random bytes, huge or small numbers, cuts, repetitions."""
    rng, out = random.Random(seed), bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(header_bytes, len(out)) or 1)
        change = rng.randrange(6)
        if change == 0:
            out[at : at + 1] = rng.randbytes(1)
        elif change == 1:
            out[at : at + 8] = pack("<Q", rng.choice([0, 1, 2**31, 2**32, 2**63, 2**64 - 1]))
        elif change == 2:
            out[at : at + 4] = pack("<I", rng.choice([0, 1, 8, 9, 13, 2**31, 2**32 - 1]))
        elif change == 3:
            del out[at:]
        elif change == 4:
            del out[at : at + rng.randint(1, 64)]
        else:
            out[at:at] = out[at : at + rng.randint(1, 64)]
        if not out:
            break
    return bytes(out)
