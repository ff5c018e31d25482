"""The members of uvicorn that are not its public API and that the server uses: all are listed here,
and the installed version has them. pyproject.toml pins the versions with which the whole suite has
run; a newer one is tried with this test first.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from packaging.requirements import Requirement
from quire.frontend.server import serving
from quire.frontend.server.http import acceptor, protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

ROOT = Path(__file__).resolve().parents[4]
# By uvicorn's class: what a subclass here overrides or calls, and what else is read or set.
OVERRIDDEN = {
    HttpToolsProtocol: {
        *("connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing"),
        *("on_message_begin", "on_url", "on_header", "on_headers_complete", "on_message_complete"),
        *("_start_asgi_task", "on_response_complete", "timeout_keep_alive_handler", "shutdown"),
    },
    RequestResponseCycle: {"send"},
    uvicorn.Server: {"startup", "serve", "shutdown", "on_tick", "handle_exit"},
}
USED = {
    HttpToolsProtocol: {
        *("_unset_keepalive_if_required", "connections", "cycle", "flow", "headers", "loop"),
        *("parser", "pipeline", "scope", "timeout_keep_alive", "timeout_keep_alive_task"),
        "transport",
    },
    RequestResponseCycle: {
        *("chunked_encoding", "disconnected", "expected_content_length", "flow", "keep_alive"),
        *("message_event", "more_body", "response_complete", "response_started", "scope", "send"),
        "transport",
    },
    uvicorn.Server: {
        *("_captured_signals", "config", "force_exit", "lifespan", "run", "server_state"),
        *("servers", "should_exit", "started"),
    },
}
CYCLES = {"cycle", "active", "_cycle", "_active"}  # names of a RequestResponseCycle
SUBCLASSES = {
    HttpToolsProtocol: ((protocol, "Protocol"),),
    uvicorn.Server: ((acceptor, "AcceptingServer"), (serving, "EngineServer")),
}


def instances() -> dict[type, Any]:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    config = uvicorn.Config(app, lifespan="off", log_config=None)
    loop = asyncio.new_event_loop()
    try:
        made = HttpToolsProtocol(config, ServerState(), {}, loop)
        cycle = RequestResponseCycle(
            *(None,) * 8, expect_100_continue=False, keep_alive=True, on_response=lambda: None
        )
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)  # as `serve` does
        server.servers = []  # as `startup` does
    finally:
        loop.close()
    return {HttpToolsProtocol: made, RequestResponseCycle: cycle, uvicorn.Server: server}


@pytest.mark.parametrize("kind", USED, ids=lambda kind: kind.__name__)
def test_the_installed_uvicorn_has_what_the_server_uses(kind: type) -> None:
    missing = (USED[kind] | OVERRIDDEN[kind]) - set(dir(instances()[kind]))
    assert not missing, (
        f"uvicorn {version('uvicorn')} has no {kind.__name__}.{', '.join(sorted(missing))}: "
        "adapt frontend/server/http/ to it, or keep the version that pyproject.toml pins"
    )


def test_the_installed_uvicorn_is_one_that_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [pin] = [r for r in map(Requirement, project["dependencies"]) if r.name == "uvicorn"]
    bounds = {specifier.operator for specifier in pin.specifier}
    assert bounds == {">=", "<"} and version("uvicorn") in pin.specifier


@pytest.mark.parametrize("kind", USED, ids=lambda kind: kind.__name__)
def test_every_member_that_is_used_is_listed(kind: type) -> None:
    if kind is RequestResponseCycle:
        used = set(members_of_cycles(ast.parse(inspect.getsource(protocol))))
        assert used == USED[kind]
        return
    used, own = set(), set()
    for module, name in SUBCLASSES[kind]:
        tree = ast.parse(inspect.getsource(getattr(module, name)))
        used |= {node.attr for node in ast.walk(tree) if is_of_self(node)}
        own |= {
            n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        own |= set(assigned_in_init(tree))
    overridden = own & set(dir(kind)) - set(dir(object))
    assert overridden - {"__init__"} == OVERRIDDEN[kind]
    assert used - own - OVERRIDDEN[kind] <= USED[kind]


def members_of_cycles(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            holder = node.value
            name = holder.id if isinstance(holder, ast.Name) else getattr(holder, "attr", "")
            if name in CYCLES or name == "RequestResponseCycle":
                yield node.attr


def is_of_self(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def assigned_in_init(tree: ast.AST) -> Iterator[str]:
    """The attributes that a class sets on itself and that uvicorn's do not have."""
    known = set().union(*USED.values())
    for node in ast.walk(tree):
        if is_of_self(node) and isinstance(node.ctx, ast.Store) and node.attr not in known:
            yield node.attr
