"""A model's step as one call: where it is made, what is said where it cannot be, and the same bits as operation by operation.
May know: the executor's worker and driver, tiny models, the registry.
Must not know: how a program is made."""
