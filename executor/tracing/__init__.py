"""Records what a rank does in a step: for traces."""
