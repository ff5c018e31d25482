"""Call: request ids, and bodies that are wrong in every way.
May know: call.py and a body of its own.
Must not know: routes, sockets."""

import asyncio

import msgspec
import pytest

from quire.frontend.server.call import Call, decode_body, new_request_id
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.errors import ApiError


class Inner(msgspec.Struct):
    size: int


class Body(msgspec.Struct, kw_only=True):
    name: str
    count: int | None = None
    inner: Inner | None = None


def decode(raw: bytes, **config: str) -> tuple[Body, Call]:
    async def run() -> tuple[Body, Call]:
        call = Call("req-1", 0.0, asyncio.current_task())
        return decode_body(raw, Body, ServerConfig(**config), call), call

    return asyncio.run(run())


def test_a_good_body() -> None:
    body, call = decode(b'{"name": "x", "count": null}')
    assert body == Body(name="x") and call.headers() == [(b"x-request-id", b"req-1")]


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b'{"name": "\xff"}', "invalid_json", None),
        (b"[1]", "invalid_type", None),
        (b"null", "invalid_type", None),
        (b"{}", "missing_required_parameter", "name"),
        (b'{"name": 3}', "invalid_type", "name"),
        (b'{"name": "x", "count": "3"}', "invalid_type", "count"),
        (b'{"name": "x", "inner": {"size": 1.5}}', "invalid_type", "inner.size"),
        (b'{"name": "x", "inner": {}}', "missing_required_parameter", "inner.size"),
        (b'{"name": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", None, None),
    ],
)
def test_bad_bodies(raw: bytes, code: str | None, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        decode(raw)
    assert caught.value.status == 400 and caught.value.message
    if code is not None:
        assert (caught.value.code, caught.value.param) == (code, param)


def test_unknown_fields_are_listed_refused_or_allowed() -> None:
    raw = b'{"name": "x", "zeta": 1, "alpha": 2}'
    _, call = decode(raw)
    assert (b"x-unknown-params", b"alpha,zeta") in call.headers()
    assert decode(raw, unknown_params="allow")[1].unknown_params == []
    with pytest.raises(ApiError, match="alpha") as caught:
        decode(raw, unknown_params="error")
    assert (caught.value.code, caught.value.param) == ("unknown_parameter", "alpha")


def test_request_ids() -> None:
    assert new_request_id([(b"x-request-id", b"mine-1")]) == "mine-1"
    for bad in (b"", b"a b", b"x" * 129, "ü".encode()):
        assert new_request_id([(b"x-request-id", bad)]).startswith("req-")
    assert new_request_id([]) != new_request_id([])
