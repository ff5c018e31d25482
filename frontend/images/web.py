"""Fetches images over http and https from hosts that the operator allows.

Must not know: images, requests. A URL comes from outside and names a host that may resolve to
anything, so that the address is checked that is connected to, and each redirect anew. Proxies of
the environment are not used: they would choose the address.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from ...ipc.checks import require, shown
from ...ipc.errors import InvalidParameterError

TIMEOUT_S = 10.0  # for everything, from the first lookup to the last byte
MAX_REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
CHUNK_BYTES = 2**16
NAT64 = ipaddress.ip_network("64:ff9b::/96")
HEADERS = {"User-Agent": "quire", "Accept": "image/*", "Accept-Encoding": "identity"}


class Place(NamedTuple):
    """Where a URL leads."""

    is_encrypted: bool
    host: str
    port: int
    target: str  # path and query

    @property
    def name(self) -> str:
        """The host, with the port where it is not 80 or 443."""
        return self.host if self.port in PORTS.values() else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Web:
    """`allowed_domains`: hosts as names, with the port where it is not 80 or 443. `resolve` and
    `connect` are those of the socket module. Raises InvalidParameterError for what is no host.
    """

    allowed_domains: Sequence[str]
    timeout_s: float = TIMEOUT_S
    resolve: Callable[..., Any] = socket.getaddrinfo
    connect: Callable[..., socket.socket] = socket.create_connection

    def __post_init__(self) -> None:
        for domain in self.allowed_domains:
            problem = (
                f"must have hosts, such as example.com or example.com:8080, got {shown(domain)}"
            )
            is_host = domain and not any(mark in domain for mark in "/*@ ")
            require(is_host, "allowed_media_domains", problem)

    def fetch(self, url: str, parameter: str, max_bytes: int) -> bytes:
        """Returns the body. Raises InvalidParameterError."""
        deadline = time.monotonic() + self.timeout_s
        try:
            for _ in range(MAX_REDIRECTS + 1):
                place = self._place_of(url, parameter)
                location, body = self._get(place, parameter, max_bytes, deadline)
                if location is None:
                    return body
                url = urljoin(url, location)
        except InvalidParameterError:
            raise
        # OSError, HTTPException, ValueError of headers that cannot be: the server selects
        except Exception as error:
            if time.monotonic() >= deadline:
                raise InvalidParameterError(parameter, self._too_late()) from error
            problem = f"cannot be fetched: {type(error).__name__}: {error!s:.200}"
            raise InvalidParameterError(parameter, problem) from error
        raise InvalidParameterError(parameter, f"redirects more than {MAX_REDIRECTS} times")

    def _too_late(self) -> str:
        return f"could not be fetched in {self.timeout_s:g} s"

    def _place_of(self, url: str, parameter: str) -> Place:
        """Requires an allowed host."""
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").encode("idna").decode().lower().rstrip(".")
            port = parts.port or PORTS.get(parts.scheme, 0)
        except ValueError as error:  # UnicodeError is one
            raise InvalidParameterError(parameter, f"is no URL: {error!s:.100}") from error
        require(parts.scheme in PORTS, parameter, f"must be http or https, got {shown(url)}")
        require(parts.username is None, parameter, "must not contain a user name")
        place = Place(parts.scheme == "https", host, port, _target(parts))
        require(
            place.name in {domain.lower() for domain in self.allowed_domains},
            parameter,
            f"names the host {shown(place.name)}, from which no images may be fetched; "
            f"allowed_media_domains: {', '.join(self.allowed_domains) or 'none'}",
        )
        return place

    def _get(
        self, place: Place, parameter: str, max_bytes: int, deadline: float
    ) -> tuple[str | None, bytes]:
        """(where it redirects to, body)"""
        addresses = self._addresses_of(place, parameter, deadline)
        with self._connected(addresses, place, parameter, deadline) as stream:
            connection = _Connection(place, stream)
            connection.request("GET", place.target, headers=HEADERS | {"Host": place.name})
            with connection.getresponse() as response:
                if response.status in (301, 302, 303, 307, 308):
                    return response.headers["Location"] or "", b""
                problem = f"cannot be fetched: the server answered {response.status}"
                require(response.status == 200, parameter, problem)
                body = _read(response, parameter, max_bytes)
            # closing the socket at the deadline looks like the end of a body without a length
            require(time.monotonic() < deadline, parameter, self._too_late())
            return None, body

    def _addresses_of(self, place: Place, parameter: str, deadline: float) -> list[str]:
        """The addresses of the host, if all are public."""
        found: Future[Any] = Future()

        def look_up() -> None:
            try:
                found.set_result(self.resolve(place.host, place.port, type=socket.SOCK_STREAM))
            except Exception as error:  # raised by result()
                found.set_exception(error)

        # a lookup has no time limit of its own
        threading.Thread(target=look_up, name="quire-lookup", daemon=True).start()
        entries = found.result(max(0.0, deadline - time.monotonic()))
        addresses = [sockaddr[0] for *_, sockaddr in entries]
        for address in addresses:
            require(
                is_public(address),
                parameter,
                f"names the host {shown(place.host)}, which has an address that is not public",
            )
        require(addresses, parameter, f"names the host {shown(place.host)}, which has no address")
        return addresses

    def _connect(
        self, addresses: list[str], place: Place, parameter: str, deadline: float
    ) -> socket.socket:
        """To the first address that answers."""
        for i, address in enumerate(addresses):
            remaining = deadline - time.monotonic()
            require(remaining > 0, parameter, self._too_late())
            try:
                return self.connect((address, place.port), timeout=remaining)
            except OSError:
                if i == len(addresses) - 1:
                    raise
        raise AssertionError("a host has an address")

    @contextmanager
    def _connected(
        self, addresses: list[str], place: Place, parameter: str, deadline: float
    ) -> Iterator[socket.socket]:
        """A socket, which is shut down at the deadline: a server that sends a byte now and then
        never runs into a timeout of the socket.
        """
        stream = self._connect(addresses, place, parameter, deadline)
        if place.is_encrypted:
            stream = ssl.create_default_context().wrap_socket(
                stream, server_hostname=place.host, do_handshake_on_connect=False
            )
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), _shut_down, [stream])
        timer.daemon = True
        timer.start()
        try:
            if isinstance(stream, ssl.SSLSocket):
                stream.do_handshake()
            yield stream
        finally:
            timer.cancel()
            stream.close()


class _Connection(http.client.HTTPConnection):
    """HTTP over a socket that is connected already."""

    def __init__(self, place: Place, stream: socket.socket):
        super().__init__(place.host, place.port)
        self._stream = stream

    def connect(self) -> None:
        self.sock = self._stream


def _read(response: http.client.HTTPResponse, parameter: str, max_bytes: int) -> bytes:
    problem = f"is a file of more than {max_bytes:,} bytes, the most that an image can have"
    require((response.length or 0) <= max_bytes, parameter, problem)
    body = bytearray()
    while chunk := response.read(CHUNK_BYTES):
        body += chunk
        require(len(body) <= max_bytes, parameter, problem)
    return bytes(body)


def is_public(address: str) -> bool:
    """Whether the address, and each IPv4 address that an IPv6 address contains, is one of the
    public network.
    """
    try:
        outer = ipaddress.ip_address(address)
    except ValueError:  # with a zone, such as fe80::1%eth0
        return False
    contained = [outer]
    if isinstance(outer, ipaddress.IPv6Address):
        inner = [outer.ipv4_mapped, outer.sixtofour, *(outer.teredo or ())]
        if outer in NAT64:
            inner.append(ipaddress.IPv4Address(int(outer) & 0xFFFFFFFF))
        contained = [*(ip for ip in inner if ip is not None)] or contained
    return all(ip.is_global and not ip.is_multicast and not ip.is_reserved for ip in contained)


def _target(parts: SplitResult) -> str:
    """Path and query in ASCII without spaces or line ends, which http.client refuses."""
    kept = "/%:@!$&'()*+,;=-._~?"
    path = quote(parts.path or "/", safe=kept)
    return f"{path}?{quote(parts.query, safe=kept)}" if parts.query else path


def _shut_down(stream: socket.socket) -> None:
    try:
        stream.shutdown(socket.SHUT_RDWR)
    except OSError:  # already closed
        pass
