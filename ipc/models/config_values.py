"""Checks of the values in a model's config.json.

Must not know: what a key means, which architectures there are.
"""

from __future__ import annotations

from typing import Any

from ..errors import ModelLoadError

MOST_OF_A_SIZE = 2**31 - 1  # far above any model: a larger value is a mistake


def malformed(key: str, wanted: str, value: Any, file: str = "config.json") -> ModelLoadError:
    """The error for a value that is not what `wanted` says, such as "true or false"."""
    return ModelLoadError(f"{file}: {key} must be {wanted}, got {value!r:.100}")


def integer(key: str, value: Any, most: int = MOST_OF_A_SIZE, least: int = 1) -> int:
    """Returns `value`. Raises ModelLoadError if it is None, not an integer or out of range."""
    if value is None:
        raise ModelLoadError(f"config.json lacks {key}")
    if type(value) is not int or not least <= value <= most:
        raise malformed(key, f"an integer from {least} to {most:,}", value)
    return value
