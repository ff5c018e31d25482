"""HTTPS with certificates of a server and of clients, created by openssl."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest
from quire.tests.fake_engine import wait_until
from quire.tests.frontend.server.conftest import slow_engine

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def make_certificate(directory: Path, name: str) -> tuple[str, str]:
    """Create a self-signed certificate for localhost. Return (certificate, key), files in PEM."""
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    command = "openssl req -x509 -nodes -days 2 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1"
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(
        [*command.split(), "-keyout", key, "-out", certificate, *names],
        check=True,
        capture_output=True,
    )
    return str(certificate), str(key)


@contextmanager
def https_server(*flags: str) -> Iterator[str]:
    """Return the base URL of a server that has begun to listen."""
    with slow_engine(0.0) as (address, _), tempfile.NamedTemporaryFile("r") as log:
        command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--engine", address]
        with open(log.name, "w") as out:
            process = subprocess.Popen([*command, *flags], stderr=out)
        try:
            wait_until(lambda: "https://" in Path(log.name).read_text())
            text = Path(log.name).read_text()
            yield text[text.index("https://") :].split()[0]
        finally:
            process.terminate()
            assert process.wait(timeout=60) == 0


def trusting(certificate: str, *own: str) -> ssl.SSLContext:
    """Return a client's context; `own` is its certificate and key."""
    context = ssl.create_default_context(cafile=certificate)
    if own:
        context.load_cert_chain(*own)
    return context


def succeeds(call: Callable[[], httpx.Response]) -> bool:
    try:
        return call().status_code == 200
    except httpx.TransportError:
        return False


def test_https(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "server")
    with https_server("--ssl-certfile", certificate, "--ssl-keyfile", key) as url:
        with httpx.Client(base_url=url, verify=trusting(certificate)) as client:
            wait_until(lambda: succeeds(lambda: client.get("/health/ready")))
            body = {"prompt": [1, 2], "max_tokens": 3, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                assert list(answer.iter_lines())[-2] == "data: [DONE]"
        with pytest.raises(httpx.TransportError):  # an untrusted certificate
            httpx.get(f"{url}/health")


def test_certificates_of_clients(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "server")
    known, stranger = make_certificate(tmp_path, "known"), make_certificate(tmp_path, "stranger")
    flags = ("--ssl-certfile", certificate, "--ssl-keyfile", key)
    with https_server(*flags, "--ssl-ca-certs", known[0], "--ssl-cert-reqs", "2") as url:

        def accepts(*own: str) -> bool:
            context = trusting(certificate, *own)
            return succeeds(lambda: httpx.get(f"{url}/health", verify=context))

        assert accepts(*known)
        assert not accepts(*stranger) and not accepts()
