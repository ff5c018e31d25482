"""The specification: every operation in plain torch, as plainly as it can be written, on any
device.

Must not know: speed. Loops are welcome here.
"""

from . import activation, attention, grammar, linear, norm, quantized, rotary, sampling, slots
