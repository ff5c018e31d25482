"""The frontend's stages are lines of the package, in a request's order."""

from quire.frontend.clients.inproc_client import InprocClient
from quire.frontend.trace.stages import async_places, blocking_places


def test_every_stage_has_a_line():
    client = InprocClient.__new__(InprocClient)
    for places, first in (
        (blocking_places(client), "LLM.generate"),
        (async_places(client), "AsyncLLM.generate"),
    ):
        names = list(places)
        assert names[0] == first and "InprocClient.add_request" in names
        assert names[-1] == "IncrementalDetokenizer.update"
        assert all(place.startswith("frontend/") for place in places.values())
