"""HTTP itself: connections and their limits, bodies, keys, errors and streams of events, the same
for every API.

Must not know: routes, the shapes of an API, how a request is run.
"""
