"""Durations as Ollama writes them: "5m", "1h30m", "90s", a number of seconds; negative: for ever.

Must not know: what lasts so long.
"""

from __future__ import annotations

import math
import re

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)(ms|s|m|h)")
FORMS = 'must be a duration such as "5m", "1h30m" or a number of seconds; -1: for ever'


def parse_duration(value: float | str) -> float:
    """Returns seconds, and -1.0 for every negative duration. Raises ValueError with a sentence."""
    if isinstance(value, str):
        text = value.strip()
        sign, unsigned = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
        parts = PART.findall(unsigned)
        if parts and "".join(map("".join, parts)) == unsigned:
            value = sign * sum(float(number) * UNITS[unit] for number, unit in parts)
        else:
            try:
                value = float(text)
            except ValueError:
                raise ValueError(f"{FORMS}, got {text!r:.40}") from None
    if not math.isfinite(value):
        raise ValueError(f"{FORMS}, got {value!r}")
    return float(value) if value >= 0 else -1.0
