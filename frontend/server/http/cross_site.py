"""CrossSite: prevents web pages of other sites from using a server that requires no key.

Must not know: routes, keys, the responses.

A browser sends a page's requests to 127.0.0.1 like any other request, and a page whose name
resolves to 127.0.0.1 has the same origin as the server. So, for a connection over loopback to a
server without keys, three headers are checked:

    Host            a name that is not this machine's, nor in --allowed-hosts      403
    Origin          not the server's own, and not in --allowed-origins             403
    Content-Type    text/plain or multipart/form-data, or a form from a browser    415

A form (application/x-www-form-urlencoded) from another program is accepted: `curl -d` sends this
type for any data. So is multipart/form-data where files are uploaded. Requests without these
headers come from programs other than browsers and pass.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from .errors import ApiError

LOCAL_SUFFIXES = (".localhost", ".internal")  # .internal: host.docker.internal
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# A page can send these content types to another origin without a preflight request.
PLAIN_TYPES = frozenset({b"text/plain", b"multipart/form-data"})
FORM_TYPE = b"application/x-www-form-urlencoded"
UPLOADS = {"/v1/files": b"multipart/form-data"}  # paths that take a form, and its type


class CrossSite:
    """Checks the headers of requests.

    With `has_keys`, keys protect the server, so only the host is checked, and only if hosts were
    configured. Patterns of `allowed_hosts` are names, "*.example.com", or "*".
    """

    def __init__(
        self, allowed_hosts: Iterable[str], allowed_origins: Iterable[str], *, has_keys: bool
    ):
        self._hosts = [host.lower() for host in allowed_hosts]
        self._origins = frozenset(normal_origin(origin).encode() for origin in allowed_origins)
        self._has_keys = has_keys
        self._is_known_host = lru_cache(1024)(self._find_host)

    def check(self, scope: Any) -> None:
        """Raises ApiError 403 or 415."""
        is_exposed = not self._has_keys and is_loopback((scope.get("server") or ("",))[0])
        if not is_exposed and not self._hosts:
            return
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"")
        if not self._is_known_host(host):
            raise ApiError(
                403,
                f"The host {host.decode('latin-1')!r:.80} is not this server's; --allowed-hosts "
                f"names others.",
                code="host_not_allowed",
            )
        if is_exposed:
            self._check_origin(scope["method"], headers, host)
            _check_type(headers, scope["path"])

    def _find_host(self, host: bytes) -> bool:
        """Returns the pattern that matches the host. An IP address is always accepted: DNS
        rebinding needs a name.
        """
        name = _host_name(host.decode("latin-1"))
        if name is None:
            return False
        return (
            name in ("", "localhost", socket.gethostname().lower())
            or name.endswith(LOCAL_SUFFIXES)
            or _address(name) is not None
            or any(_matches(name, pattern) for pattern in self._hosts)
        )

    def _check_origin(self, method: str, headers: dict[bytes, bytes], host: bytes) -> None:
        origin = headers.get(b"origin")
        if origin is None:
            # Without this header, a page cannot read the response to its GET, and a GET changes
            # nothing here.
            is_foreign = (
                headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
                and method not in SAFE_METHODS
            )
        else:
            is_own = origin.partition(b"://")[2].lower() == host.lower()
            is_foreign = not (is_own or b"*" in self._origins or origin in self._origins)
        if is_foreign:
            shown = "another site" if origin is None else repr(origin.decode("latin-1"))
            raise ApiError(
                403,
                f"A web page of {shown:.80} may not call this server; --allowed-origins names "
                f"those that may.",
                code="origin_not_allowed",
            )


def _check_type(headers: dict[bytes, bytes], path: str) -> None:
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    is_from_browser = b"origin" in headers or b"sec-fetch-site" in headers
    is_form = kind in (FORM_TYPE, UPLOADS.get(path))
    if (kind in PLAIN_TYPES or is_form) and (is_from_browser or not is_form):
        raise ApiError(
            415,
            f"The body must be sent as application/json, not {kind.decode()}.",
            code="unsupported_media_type",
        )


def normal_origin(origin: str) -> str:
    """Returns the origin in the form that a browser sends."""
    return origin.rstrip("/")


@lru_cache(1024)
def is_loopback(host: str) -> bool:
    """Tells whether the address belongs to this machine and is reachable only from it."""
    address = _address(host)
    if address is None:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _host_name(host: str) -> str | None:
    """Returns the Host header without its port, in lower case, and None for an invalid host."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return None
    return (name or "").rstrip(".") if name or not host else None


def _matches(name: str, pattern: str) -> bool:
    return pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:]))
