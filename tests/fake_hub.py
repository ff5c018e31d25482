"""A small server with the endpoints of the Hugging Face hub that downloads use: a repository's
description, its tree, and its files with ranges. It can break connections and damage bytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "c0ffee" * 6 + "beef"
LARGE = 1000  # from this size on a file has a SHA-256, as files in LFS have


class FakeHub:
    """`files`: repository -> path -> content. `gated`: repositories whose files are refused.

    breaks_after: bytes after which the next response's connection ends; used once. damaged: paths
    of which the first byte is sent wrong. sizes: sizes that the hub claims. asked: (method, path,
    Range header) of every request for a file.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.breaks_after: list[int] = []
        self.damaged: set[str] = set()
        self.sizes: dict[str, int] = {}
        self.asked: list[tuple[str, str, str | None]] = []
        self.has_broken = threading.Event()  # a response has come to where its connection ends
        self.may_go_on = threading.Event()  # cleared: the connection stays open there
        self.may_go_on.set()
        self.has_ranges = True
        self.url = ""

    def describe(self, path: str, content: bytes) -> dict[str, Any]:
        size = self.sizes.get(path, len(content))
        sha1 = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        if len(content) < LARGE:
            return {"path": path, "size": size, "oid": sha1}
        sha256 = hashlib.sha256(content).hexdigest()
        lfs = {"oid": sha256, "sha256": sha256, "size": size, "pointerSize": 134}
        return {"path": path, "size": size, "oid": sha1, "lfs": lfs}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        words = unquote(urlsplit(self.path).path).strip("/").split("/")
        if words[:2] == ["api", "models"]:
            return self.describe("/".join(words[2:4]), words[4:])
        if len(words) < 5 or words[2] != "resolve":
            return self.refuse(404, "EntryNotFound")
        repository, path = "/".join(words[:2]), "/".join(words[4:])
        self.hub.asked.append((self.command, path, self.headers["Range"]))
        if repository in self.hub.gated:
            return self.refuse(403, "GatedRepo")
        if path not in self.hub.files.get(repository, {}):
            return self.refuse(404, "EntryNotFound")
        self.send_file(path, self.hub.files[repository][path])

    def describe(self, repository: str, words: list[str]) -> None:
        files = self.hub.files.get(repository)
        if files is None:
            return self.refuse(401, "RepoNotFound")
        if words[1:] not in ([], ["main"], [COMMIT]):
            return self.refuse(404, "RevisionNotFound")
        entries = [self.hub.describe(path, content) for path, content in files.items()]
        if words[:1] == ["tree"]:
            return self.send_json([{"type": "file", **entry} for entry in entries])
        siblings = [
            {"rfilename": e["path"], "size": e["size"], "blobId": e["oid"], "lfs": e.get("lfs")}
            for e in entries
        ]
        self.send_json({"id": repository, "sha": COMMIT, "siblings": siblings, "tags": []})

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"the hub says {code}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_file(self, path: str, content: bytes) -> None:
        hub, whole = self.hub, hub_checksum(self.hub, path, content)
        start, stop, wanted = 0, len(content), self.headers["Range"] if hub.has_ranges else None
        if wanted is not None:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1 if last else stop, stop)
        if path in hub.damaged:
            content = bytes([content[0] ^ 1]) + content[1:]
        body = content[start:stop]
        self.send_response(206 if wanted is not None else 200)
        self.send_header("ETag", f'"{whole}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        if wanted is not None:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if len(content) >= LARGE and hub.breaks_after:
            self.wfile.write(body[: hub.breaks_after.pop(0)])
            self.wfile.flush()
            hub.has_broken.set()
            hub.may_go_on.wait()
            self.close_connection = True
            return
        self.wfile.write(body)


class QuietServer(ThreadingHTTPServer):
    """A client that leaves is part of the tests."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def hub_checksum(hub: FakeHub, path: str, content: bytes) -> str:
    entry = hub.describe(path, content)
    return entry["lfs"]["sha256"] if "lfs" in entry else entry["oid"]


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class OfThisHub(Handler):
        pass

    OfThisHub.hub = hub
    server = QuietServer(("127.0.0.1", 0), OfThisHub)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.may_go_on.set()
        server.shutdown()
        server.server_close()


def use_hub(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points the hub client of this process, which reads its environment when imported, at `hub`
    and at an empty cache.
    """
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
