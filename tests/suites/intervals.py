"""How far a score may be from what more questions would show."""

from __future__ import annotations

from math import sqrt

Z = 1.96  # 95 %


def wilson(num_right: int, num_asked: int) -> tuple[float, float]:
    """Return Wilson's interval of a share, which is sensible for few questions, 0 and 1, too."""
    share, z2 = num_right / num_asked, Z * Z / num_asked
    middle = share + z2 / 2
    half = Z * sqrt(share * (1 - share) / num_asked + z2 / (4 * num_asked))
    return max((middle - half) / (1 + z2), 0.0), min((middle + half) / (1 + z2), 1.0)
