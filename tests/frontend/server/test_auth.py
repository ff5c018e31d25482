"""Keys: who gets in, in which header, and what is never asked for one.
May know: auth.py, ASGI scopes.
Must not know: routes."""

import pytest

from quire.frontend.server.auth import Keys
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.errors import ApiError
from quire.ipc.errors import InvalidParameterError


def scope(path: str = "/v1/models", **headers: str) -> dict:
    return {"path": path, "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]}


def test_without_keys_everybody_is_one_tenant() -> None:
    assert Keys(ServerConfig()).check(scope()) == ""


def test_each_key_is_a_tenant_in_either_header() -> None:
    keys = Keys(ServerConfig(api_key=["one", "two"]))
    tenants = {keys.check(scope(authorization="Bearer one")), keys.check(scope(x_api_key="two"))}
    assert len(tenants) == 2 and not any("one" in tenant or "two" in tenant for tenant in tenants)
    assert keys.check(scope(authorization="bearer one")) in tenants


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "one"}, {"authorization": "Bearer "}, {"x_api_key": "one "[:2]}])
def test_all_others_are_refused(headers: dict) -> None:
    with pytest.raises(ApiError) as caught:
        Keys(ServerConfig(api_key=["one"])).check(scope(**headers))
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_health_needs_no_key() -> None:
    keys = Keys(ServerConfig(api_key=["one"]))
    assert keys.check(scope("/health")) == keys.check(scope("/health/ready")) == ""


def test_keys_from_a_file(tmp_path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\none\n\n two  # the second\n")
    keys = Keys(ServerConfig(api_key_file=str(path)))
    assert keys.check(scope(x_api_key="two"))
    for content in ("", "# nothing\n"):
        path.write_text(content)
        with pytest.raises(InvalidParameterError, match="api_key_file"):
            Keys(ServerConfig(api_key_file=str(path)))
    with pytest.raises(InvalidParameterError, match="cannot be read"):
        Keys(ServerConfig(api_key_file=str(tmp_path / "none")))
