"""The executor: runs the model over the slots and blocks that the core scheduled.
May know: torch, the model's weights, slots, block ids, token ids.
Must not know: text, requests' lives, who asked; no scheduling is decided here."""
