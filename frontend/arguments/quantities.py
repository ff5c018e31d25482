"""Numbers with units, such as "24GiB" and "16k", from text and as text.

Must not know: what is counted.
"""

from __future__ import annotations

import re

UNITS = {
    "": 1,
    **{f"{p}i": 2 ** (10 * k) for k, p in enumerate("KMGT", start=1)},
    **{p: 10 ** (3 * k) for k, p in enumerate("KMGT", start=1)},
}


def parse_bytes(text: str) -> int:
    """Parses "24GiB" (powers of 1024, also 24Gi), "24GB" (powers of 1000, also 24G), or a plain
    number of bytes.

    Raises ValueError with a sentence.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", text.strip(), re.IGNORECASE)
    unit = (match[2] or "").capitalize() if match else ""
    if match is None or unit not in UNITS:
        raise ValueError(f"must be a number of bytes such as 24GiB, 500MB or 1048576, got {text!r}")
    return int(float(match[1]) * UNITS[unit])


def parse_count(text: str) -> int | str:
    """Parses "16k" (16,000) and "16K" (16,384), as vLLM does: lower-case suffixes are powers of
    1000, and upper-case suffixes are powers of 1024. Any other text is returned unchanged.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", text.strip())
    if match is None:
        return text
    base, unit = (1000 if match[2].islower() else 1024), match[2].upper()
    return int(float(match[1]) * base ** ("KMGT".index(unit) + 1))


def format_count(number: int) -> str:
    """Writes a number of parameters in the form used in model names, such as "8.19B"."""
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"


def format_bytes(num_bytes: float) -> str:
    """Writes a size such as "1.5 GiB", with at most four digits before the unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
