"""`quire top`: live view of a server's engine in the terminal.

Must not know: how it is drawn (top_view.py), any part of an engine.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from ...ipc.errors import InvalidParameterError, QuireError
from .parser import Parser

if TYPE_CHECKING:
    import urllib.error

USAGE = "[URL] [--json]"
DESCRIPTION = (
    "Shows the engine of a running server; q or Ctrl-C exits. Without a terminal: prints one "
    "observation as text."
)
TIMEOUT_S = 5.0
STATE = "/v1/engine/state"


class ServerError(QuireError):
    """The server does not answer, or its answer is unexpected. `is_loading` tells whether the model
    is being loaded.
    """

    def __init__(self, sentence: str, *, is_loading: bool = False):
        super().__init__(sentence)
        self.is_loading = is_loading


def make_parser(argv: list[str]) -> Parser:
    parser = Parser("top", USAGE, DESCRIPTION, argv)
    add = parser.add
    add("url", "URL", "the server, with or without /v1", "http://127.0.0.1:8000", nargs="?")
    add("--api-key", "KEY", "API key [$OPENAI_API_KEY]")
    add("--interval", "S", "seconds between updates", 0.5)
    add.switch("--json", "print one observation as the server's JSON")
    return parser


def main(argv: list[str]) -> int:
    args = make_parser(argv).parse(argv)
    if not 0.05 <= args.interval <= 3600:
        raise InvalidParameterError(
            "--interval", f"must be between 0.05 and 3600 seconds, got {args.interval:g}"
        )
    server = Server(args.url, args.api_key or os.environ.get("OPENAI_API_KEY"))
    if args.json:
        print(msgspec.json.encode(server.state()).decode())
        return 0
    if sys.stdout.isatty():
        return watch(server, args.interval)
    print_once(server)
    return 0


class Server:
    """The server that is observed."""

    def __init__(self, url: str, api_key: str | None = None):
        url = url if "://" in url else f"http://{url}"
        if not url.startswith(("http://", "https://")):
            raise InvalidParameterError("URL", f"must begin with http:// or https://, got {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def state(self) -> dict[str, Any]:
        """Returns the current state of the engine, with all steps in its history.

        Raises ServerError with a sentence.
        """
        answer = self.ask(STATE)
        try:
            return msgspec.json.decode(answer, type=dict[str, Any])
        except ValueError as error:
            raise self._strange(error) from None

    def ask(
        self, path: str, body: dict[str, Any] | None = None, timeout_s: float = TIMEOUT_S
    ) -> bytes:
        """Returns the answer to a GET, or to a POST of `body`. Raises ServerError with a
        sentence.
        """
        import urllib.error
        import urllib.request

        data = None if body is None else msgspec.json.encode(body)
        headers = self._headers | ({"Content-Type": "application/json"} if data else {})
        try:
            request = urllib.request.Request(f"{self.url}{path}", data, headers)
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            raise self._refusal(error, path) from None
        except urllib.error.URLError as error:
            raise ServerError(
                f"no server answers at {self.url}: "
                f"{getattr(error.reason, 'strerror', None) or error.reason}"
            ) from None
        except (OSError, ValueError) as error:
            # a broken connection, an invalid address, an answer that is not JSON
            raise self._strange(error) from None

    def _strange(self, error: Exception) -> ServerError:
        return ServerError(f"{self.url} does not answer like a Quire server: {error}")

    def _refusal(self, error: urllib.error.HTTPError, path: str) -> ServerError:
        try:
            problem = msgspec.json.decode(error.read())["error"]
            message, code = problem["message"], problem.get("code")
        except (
            OSError,
            msgspec.DecodeError,
            UnicodeDecodeError,
            KeyError,
            TypeError,
            AttributeError,
        ):
            return ServerError(
                f"{self.url} is not a Quire server: it answers {path} with {error.code} "
                f"{error.reason}"
            )
        hint = " (--api-key KEY)" if error.code == 401 else ""
        return ServerError(f"{self.url}: {message}{hint}", is_loading=code == "model_loading")


def print_once(server: Server) -> None:
    from rich.console import Console

    from .top_view import screen

    state, console = server.state(), Console(width=110, highlight=False)
    console.print(screen(state, server.url, width=console.width))


def watch(server: Server, interval_s: float) -> int:
    """Runs until q or Ctrl-C.

    A server that cannot be reached at first ends it. If the server fails later, or is loading, it
    is asked again.
    """
    from rich.console import Console
    from rich.live import Live

    from .top_view import screen, trouble

    console = Console(highlight=False)
    is_first = True
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live, keys() as pressed:
            while True:
                try:
                    shown = screen(
                        server.state(), server.url, width=console.width, height=console.height
                    )
                except ServerError as error:
                    if is_first and not error.is_loading:
                        raise
                    shown = trouble(server.url, str(error))
                is_first = False
                live.update(shown, refresh=True)
                if pressed(interval_s) in ("q", "Q", "\x03", "\x04"):
                    return 0
    except KeyboardInterrupt:
        return 0


@contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Yields a function: `pressed(timeout_s)` waits for a key and returns it, or "" after the
    timeout.

    The terminal does not echo keys and does not wait for the end of a line.
    """
    if not sys.stdin.isatty():

        def nothing(timeout_s: float) -> str:
            time.sleep(timeout_s)
            return ""

        yield nothing
        return
    import termios
    import tty

    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)

    def pressed(timeout_s: float) -> str:
        ready, _, _ = select.select([stdin], [], [], timeout_s)
        return os.read(stdin, 1).decode("latin-1") if ready else ""

    try:
        tty.setcbreak(stdin)
        yield pressed
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
