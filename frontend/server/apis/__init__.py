"""Each API's shapes: what its bodies ask for, and what its answers and streams look like.
May know: how a request is run, and HTTP's bodies, errors and events.
Must not know: URLs."""
