"""Finds attributes that are set on another object after its construction.

Inside a class's own methods `self` may change. From outside, only the declared fields of a record
may: a dataclass or a msgspec.Struct that is not frozen. A component, a callable or a mode is an
argument of the constructor. `python -m quire.tests.setters` prints what it finds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from quire.kernels.cpu.native import calls
from quire.tests.syntax import nodes_of

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("frontend", "core", "executor", "kernels", "ipc")
# attributes of objects of the standard library and of other packages
FOREIGN = {
    *("__cause__", "__class__", "__getattr__", "__name__", "__signature__", "stderr"),
    *("argtypes", "restype", "func", "daemon"),  # ctypes, functools, threading
    *("loader", "loader_state", "__loader__", "__spec__"),  # importlib
    *("linger", "sndhwm", "rcvhwm", "maxmsgsize", "ipv6", "sndtimeo", "rcvtimeo"),  # ZMQ
    *("router_mandatory", "immediate", "heartbeat_ivl", "heartbeat_timeout"),
    *("curve_server", "curve_publickey", "curve_secretkey", "curve_serverkey"),
    *("filters", "tests", "globals", "iter"),  # jinja2
    *("_devices", "_threads", "_timeout"),  # torch.distributed's options
    *("_modules", "_parameters"),  # torch.nn.Module
    # of torch.backends.cuda.matmul
    *("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"),
    *("sum", "origin"),  # of a Prometheus histogram; Call.origin, no member of the struct
    *("writeable", "monitor_interval", "min_width", "enable_cpr", "samples"),
    *("more_body", "transport", "chunked_encoding", "expected_content_length"),  # uvicorn's cycle
    "timeout_graceful_shutdown",  # uvicorn's configuration
    "quire_window",  # of a mask that transformers passes on
}

# argparse's result, threading.local, an object that a classmethod makes of its own class, a native
# struct by names of members, a class that a module completes, a model of transformers
FREE = {
    "self",
    "cls",
    "args",
    "_thread",
    "layer",
    "call",
    "_Unknown",
    "model.get_submodule(parent)",
}


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def record_fields(nodes: Iterable[ast.AST]) -> set[str]:
    """The names of all fields of the records that the package declares."""
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    bases = [(node.name, {_last_name(base) for base in node.bases}) for node in classes]
    records = {"Struct", "Structure"}
    for _ in range(4):  # subclasses of records are records
        records |= {name for name, of_class in bases if of_class & records}
    return {
        statement.target.id
        for node in classes
        if not _is_frozen(node) and (node.name in records or _is_dataclass(node))
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def native_fields() -> set[str]:
    """The members of the structs that are passed to the native library."""
    return {name for one in vars(calls).values() for name in getattr(one, "names", ())}


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).split("[")[0].split(".")[-1]


def _called_name(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _is_frozen(node: ast.ClassDef) -> bool:
    calls = [d for d in node.decorator_list if isinstance(d, ast.Call)]
    keywords = [*node.keywords, *(keyword for call in calls for keyword in call.keywords)]
    return any(k.arg == "frozen" and ast.unparse(k.value) == "True" for k in keywords)


def setters(nodes: Iterable[ast.AST], allowed: set[str]) -> Iterator[tuple[int, str]]:
    """Yields (line, target) of each assignment to an attribute of something other than `self`."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr):
            targets = [node.target]
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            targets = [node.optional_vars]
        elif isinstance(node, ast.Call) and _called_name(node) == "setattr":
            if ast.unparse(node.args[0]) not in FREE:
                yield node.lineno, ast.unparse(node)
            continue
        else:
            continue
        while targets:
            target = targets.pop()
            if isinstance(target, ast.Tuple | ast.List):
                targets += target.elts
            elif isinstance(target, ast.Attribute) and target.attr not in allowed:
                if ast.unparse(target.value) not in FREE:
                    yield target.lineno, ast.unparse(target)


def probes(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yields (line, call) of each hasattr of a model, and each getattr with a literal name."""
    for node in nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        is_probe = node.func.id == "hasattr" or (
            node.func.id == "getattr" and isinstance(node.args[1], ast.Constant)
        )
        if is_probe and _last_name(node.args[0]) in ("model", "_model", "decoder", "encoder"):
            yield node.lineno, ast.unparse(node)


def found() -> list[str]:
    nodes = (node for path in sources() for node in nodes_of(path))
    allowed = record_fields(nodes) | FOREIGN | native_fields()
    return [
        f"{path.relative_to(ROOT).as_posix()}:{line}: {target}"
        for path in sources()
        for line, target in setters(nodes_of(path), allowed)
    ]


if __name__ == "__main__":
    print("\n".join(found()))
