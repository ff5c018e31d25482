"""HTTP itself: connections and their limits, bodies, keys, errors and streams of events, the same for every API.
May know: starlette, uvicorn, ServerConfig, the engine's errors.
Must not know: routes, the shapes of an API, how a request is run."""
