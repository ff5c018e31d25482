"""The HTTP layer shared by all APIs: connections and their limits, bodies, keys, errors and event
streams.

Must not know: routes, the formats of an API, how a request is run.
"""
