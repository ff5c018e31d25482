"""The frontend's stages are lines of the package."""

from quire.frontend.trace.stages import frontend_places


def test_every_stage_has_a_line():
    places = frontend_places()
    assert places["LLM.generate"].startswith("frontend/llm.py:")
    assert all(place.startswith("frontend/") for place in places.values())
