"""The memory of images whose requests wait or run."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from quire.frontend.server.held_pixels import HeldPixels
from quire.frontend.server.http.errors import ApiError


def test_images_are_refused_above_the_limit_and_taken_again_below_it() -> None:
    pixels = HeldPixels(100)
    with ExitStack() as first:
        first.enter_context(pixels.holding("a", 60))
        first.enter_context(pixels.holding("a", 40))
        with pytest.raises(ApiError) as raised, pixels.holding("a", 1):
            pass
        assert raised.value.status == 429 and raised.value.retry_after_s
        assert "take 100 bytes already" in raised.value.message
        with pixels.holding("a", 0):  # text only
            assert pixels.num_bytes == 100
    assert pixels.num_bytes == 0
    with pixels.holding("a", 100):
        assert pixels.num_bytes == 100


def test_another_key_has_its_share() -> None:
    pixels = HeldPixels(100)
    with pixels.holding("a", 60), pixels.holding("a", 40), pixels.holding("b", 30):
        with pixels.holding("b", 20):
            assert pixels.num_bytes == 150
            with pytest.raises(ApiError), pixels.holding("b", 1):
                pass
        with pytest.raises(ApiError), pixels.holding("a", 1):
            pass


def test_one_request_is_taken_whatever_its_size() -> None:
    pixels = HeldPixels(100)
    with pixels.holding("a", 500):
        assert pixels.num_bytes == 500
