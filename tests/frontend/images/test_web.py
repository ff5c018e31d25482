"""Images are fetched from allowed hosts at public addresses, and from nowhere else."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.images.web import Web, is_public
from quire.ipc.errors import InvalidParameterError
from quire.tests.frontend.server.test_tls import make_certificate

PUBLIC = "93.184.216.34"
OTHER = "other.example.com:8080"
BODY = b"the contents of an image"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append((self.headers["Host"], self.path))  # type: ignore[attr-defined]
        getattr(self, f"serve_{self.path.strip('/').split('?')[0].split('/')[0]}")()

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def serve_image(self) -> None:
        self.answer(200, BODY)

    def serve_missing(self) -> None:
        self.answer(404)

    def serve_redirect(self) -> None:
        self.answer(302, Location=self.path.partition("?")[2])

    def serve_loop(self) -> None:
        self.answer(302, Location="/loop")

    def serve_says_large(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(10**12))
        self.end_headers()

    def serve_is_large(self) -> None:
        """Without a length."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"x" * 200_000)

    def serve_drips(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.drip()

    def serve_drips_header(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        self.drip()

    def drip(self) -> None:
        try:
            while True:
                self.wfile.write(b"x")
                time.sleep(0.02)
        except OSError:  # the client is gone
            pass

    def serve_nonsense(self) -> None:
        self.wfile.write(b"\x00\x01 nonsense\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def make_web(
    server: ThreadingHTTPServer | None = None,
    addresses: dict[str, list[str]] | None = None,
    allowed: tuple[str, ...] = ("example.com", OTHER),
    timeout_s: float = 5.0,
) -> Web:
    """addresses: those of each host, instead of a public one. All lead to `server`."""

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        found = (addresses or {}).get(host, [PUBLIC])
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in found]

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        assert server is not None, f"nothing may be connected to {address}"
        assert address[0] == PUBLIC
        return socket.create_connection(server.server_address[:2], timeout)

    return Web(allowed, timeout_s, resolve, connect)


def refused(web: Web, url: str, max_bytes: int = 10**6) -> str:
    with pytest.raises(InvalidParameterError) as caught:
        web.fetch(url, "image_url", max_bytes)
    assert caught.value.parameter == "image_url"
    return caught.value.problem


@pytest.mark.parametrize(
    ("url", "host", "path"),
    [
        ("http://example.com/image", "example.com", "/image"),
        ("HTTP://EXAMPLE.com./image", "example.com", "/image"),
        ("http://example.com/image?a=b&c=d#end", "example.com", "/image?a=b&c=d"),
        ("http://example.com/image/%41 b\u00e9", "example.com", "/image/%41%20b%C3%A9"),
        (f"http://{OTHER}/image", OTHER, "/image"),
        ("http://example.com/redirect?/image", "example.com", "/image"),
        (f"http://example.com/redirect?http://{OTHER}/image", OTHER, "/image"),
    ],
)
def test_fetch(server: Any, url: str, host: str, path: str) -> None:
    assert make_web(server).fetch(url, "image_url", 10**6) == BODY
    assert server.asked[-1] == (host, path)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://evil.com/", "names the host 'evil.com', from which no images may be fetched"),
        ("http://sub.example.com/", "names the host 'sub.example.com'"),
        ("http://example.com.evil.com/", "names the host 'example.com.evil.com'"),
        ("http://example.com:8080/", "names the host 'example.com:8080'"),
        ("http://other.example.com/", "names the host 'other.example.com'"),
        ("http://example.com@evil.com/", "must not contain a user name"),
        ("http://evil.com\\@example.com/", "must not contain a user name"),
        ("http://127.0.0.1/", "names the host '127.0.0.1'"),
        ("http://[::1]/", "names the host '::1'"),
        ("http://2130706433/", "names the host '2130706433'"),
        ("http:///image", "names the host ''"),
        ("ftp://example.com/", "must be http or https"),
        ("http://example.com:99999/", "is no URL"),
        ("http://[::1/", "is no URL"),
        (f"http://{'a' * 300}.com/", "is no URL"),
    ],
)
def test_host_that_is_not_allowed(url: str, problem: str) -> None:
    assert refused(make_web(), url).startswith(problem)


def test_no_host_is_allowed_by_default() -> None:
    assert "allowed_media_domains: none" in refused(make_web(allowed=()), "http://example.com/")


ADDRESSES = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
    *("100.64.0.1", "224.0.0.1", "239.1.1.1", "255.255.255.255", "240.0.0.1", "198.18.0.1"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "2002:7f00:1::"),
    *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2001:0:4136:e378:8000:63bf:80ff:fffe", "no"),
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_address_that_is_not_public(address: str) -> None:
    """Also where the host has a public address beside it."""
    assert not is_public(address)
    for addresses in ([address], [PUBLIC, address], [address, PUBLIC]):
        problem = refused(make_web(addresses={"example.com": addresses}), "http://example.com/x")
        assert problem == "names the host 'example.com', which has an address that is not public"


@pytest.mark.parametrize(
    "address", [PUBLIC, "2606:2800:220:1::1", "::ffff:93.184.216.34", "64:ff9b::5db8:d822"]
)
def test_public_address(address: str) -> None:
    assert is_public(address)


def test_name_that_changes_its_address(server: Any) -> None:
    """What has been checked is what is connected to, and each redirect is checked anew."""
    answers = iter([[PUBLIC], ["127.0.0.1"]])

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [(0, 0, 0, "", (one, port)) for one in next(answers)]

    web = make_web(server)
    rebinding = Web(web.allowed_domains, web.timeout_s, resolve, web.connect)
    assert rebinding.fetch("http://example.com/image", "image_url", 10**6) == BODY
    answers = iter([[PUBLIC], ["127.0.0.1"]])
    assert "not public" in refused(rebinding, "http://example.com/redirect?/image")
    assert [path for _, path in server.asked] == ["/image", "/redirect?/image"]


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("http://evil.com/image", "names the host 'evil.com'"),
        ("//127.0.0.1/image", "names the host '127.0.0.1'"),
        ("file:///etc/passwd", "must be http or https"),
        ("gopher://example.com/", "must be http or https"),
    ],
)
def test_redirect_to_elsewhere(server: Any, target: str, problem: str) -> None:
    assert refused(make_web(server), f"http://example.com/redirect?{target}").startswith(problem)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("missing", "cannot be fetched: the server answered 404"),
        ("loop", "redirects more than 3 times"),
        ("says_large", "is a file of more than 100,000 bytes"),
        ("is_large", "is a file of more than 100,000 bytes"),
        ("nonsense", "cannot be fetched: BadStatusLine"),
    ],
)
def test_bad_answer(server: Any, path: str, problem: str) -> None:
    assert refused(make_web(server), f"http://example.com/{path}", 100_000).startswith(problem)


@pytest.mark.parametrize("path", ["drips", "drips_header"])
def test_slow_server(server: Any, path: str) -> None:
    began = time.monotonic()
    problem = refused(make_web(server, timeout_s=0.3), f"http://example.com/{path}")
    assert problem == "could not be fetched in 0.3 s"
    assert time.monotonic() - began < 3.0


def test_server_without_encryption(server: Any) -> None:
    assert "SSLError" in refused(make_web(server), "https://example.com/image")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_certificate(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must be trusted and name the host."""
    certificate, key = make_certificate(tmp_path, "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    web = make_web(server, allowed=("localhost", "example.com"))
    assert "certificate verify failed" in refused(web, "https://localhost/image")
    monkeypatch.setenv("SSL_CERT_FILE", certificate)
    assert web.fetch("https://localhost/image", "image_url", 10**6) == BODY
    assert server.asked == [("localhost", "/image")]
    assert "certificate is not valid for 'example.com'" in refused(web, "https://example.com/image")


def test_host_without_address() -> None:
    web = make_web(addresses={"example.com": []})
    assert refused(web, "http://example.com/").endswith("which has no address")

    def fail(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("unknown")

    web = Web(web.allowed_domains, 1.0, fail, web.connect)
    assert refused(web, "http://example.com/") == "cannot be fetched: gaierror: unknown"


def test_slow_lookup() -> None:
    released = threading.Event()
    web = make_web()
    slow = Web(web.allowed_domains, 0.1, lambda *_, **__: released.wait(20), web.connect)
    assert refused(slow, "http://example.com/") == "could not be fetched in 0.1 s"
    released.set()


def test_address_that_does_not_answer(server: Any) -> None:
    """The next one is tried."""
    asked = []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        asked.append(address[0])
        if address[0] != PUBLIC:
            raise ConnectionRefusedError("closed")
        return socket.create_connection(server.server_address[:2], timeout)

    both = make_web(server, {"example.com": ["93.184.216.1", PUBLIC]})
    web = Web(both.allowed_domains, 5.0, both.resolve, connect)
    assert web.fetch("http://example.com/image", "image_url", 10**6) == BODY
    assert asked == ["93.184.216.1", PUBLIC]
    none = make_web(server, {"example.com": ["93.184.216.1", "93.184.216.2"]})
    web = Web(none.allowed_domains, 5.0, none.resolve, connect)
    problem = "cannot be fetched: ConnectionRefusedError: closed"
    assert refused(web, "http://example.com/image") == problem
