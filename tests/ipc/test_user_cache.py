"""Where what can be made again is kept."""

from pathlib import Path

import pytest
from quire.ipc.user_cache import user_cache


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/of/a/user")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache() == Path("/of/a/user/.cache/quire")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert user_cache() == Path("/cache/quire")
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # as unset
    assert user_cache() == Path("/of/a/user/.cache/quire")
