"""/health, over HTTP.
May know: the session's server.
Must not know: how it is answered."""

import httpx2 as httpx


def test_live_ready_version(server: httpx.Client) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/health/ready").json() == {"status": "ready", "model": "bundled"}
    assert set(server.get("/version").json()) == {"version"}
