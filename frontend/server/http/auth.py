"""API keys. With keys configured, every route requires one, except those that report whether the
server is alive.

Must not know: what a route does with a tenant.
"""

from __future__ import annotations

import hmac
import re
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ....ipc.checks import require_weight
from ....ipc.errors import InvalidParameterError
from ..config import ServerConfig
from .errors import ApiError

# All other routes require a key. This includes /metrics, which shows how busy other tenants are
# (Prometheus sends a key with `authorization: credentials:`). The page at / is a static file whose
# data come from routes that require a key; /docs is the same on every server.
OPEN_PATHS = frozenset({"/health", "/health/ready", "/ping", "/docs"})
KEY_IN_URL = re.compile(rb"(?i)(^|&)(api[-_]?key|key|token|access_token|authorization)=")


class ApiKeys:
    """Raises InvalidParameterError when the key file cannot be read."""

    def __init__(self, config: ServerConfig):
        self._config = config
        self._open_paths = OPEN_PATHS | ({"/"} if config.page else set())
        self._digests: list[bytes] = []
        self._weights: dict[str, float] = {}  # by tenant
        self.read()

    def read(self) -> None:
        """Reads the key file. May be called again. If reading fails, the keys stay as they are."""
        keys = dict.fromkeys(self._config.api_key, 1.0) | _read_keys(self._config.api_key_file)
        self._digests = [_digest(key.encode()) for key in keys]
        self._weights = dict(zip(map(_tenant, self._digests), keys.values(), strict=True))

    @property
    def are_required(self) -> bool:
        return bool(self._digests)

    def weight(self, tenant: str) -> float:
        """Returns the tenant's part of the engine, relative to others'."""
        return self._weights.get(tenant, 1.0)

    def check(self, scope: Any) -> str:
        """Returns the tenant of the request, or "" if no keys are configured.

        Raises ApiError 401. Compares every key in constant time.
        """
        if not self._digests or scope["path"] in self._open_paths:
            return ""
        presented = _presented(scope["headers"])
        if presented is None:
            message = "You didn't provide an API key. Send it as 'Authorization: Bearer KEY'."
            if KEY_IN_URL.search(scope.get("query_string", b"")):
                message = (
                    "A key in the URL is ignored, since URLs are logged. "
                    "Send it as 'Authorization: Bearer KEY'."
                )
            raise ApiError(401, message, code="invalid_api_key")
        digest = _digest(presented)
        if not any([hmac.compare_digest(digest, known) for known in self._digests]):  # noqa: C419
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
        return _tenant(digest)


def _presented(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """Returns the key from OpenAI's header, or from Anthropic's."""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
    return None


def _digest(key: bytes) -> bytes:
    """Maps keys of any length to digests of one length: the keys are not kept in memory."""
    return blake2b(key, digest_size=32).digest()


def _tenant(digest: bytes) -> str:
    return digest.hex()[:16]


def _read_keys(path: str | None) -> dict[str, float]:
    """Reads the keys with their weights. Each line is KEY, or KEY weight=NUMBER."""
    if path is None:
        return {}
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError("api_key_file", f"cannot be read: {error}") from error
    keys = {}
    for number, line in enumerate(lines, start=1):
        if words := line.split("#")[0].split():
            keys[words[0]] = _read_weight(number, words[1:])
    if not keys:
        raise InvalidParameterError(
            "api_key_file", "contains no key; without keys every client would have access"
        )
    return keys


def _read_weight(line_number: int, words: list[str]) -> float:
    name = f"api_key_file, line {line_number}"
    if not words:
        return 1.0
    key, _, value = words[0].partition("=")
    if len(words) > 1 or key != "weight":
        raise InvalidParameterError(name, "must be KEY, or KEY weight=NUMBER")
    try:
        weight = float(value)
    except ValueError:
        weight = value
    require_weight(f"{name}, weight", weight)
    return float(weight)
