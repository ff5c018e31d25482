"""The specification: every operation in plain torch, as plainly as it can be written, on any device.
May know: torch, the contracts.
Must not know: speed. Loops are welcome here."""

from . import activation, attention, grammar, linear, norm, quantized, rotary, sampling, slots  # noqa: F401
