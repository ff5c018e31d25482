"""The package's imports as a graph of files and of rooms: which run up, and which form circles.

A room is a file or a subfolder of one top-level folder. The rooms of a folder are put in the order
in which the fewest imports run from a lower room to a higher one. All imports count, also those
inside a function and those for types alone. `python -m quire.tests.import_graph` prints both.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from quire.tests.syntax import nodes_of

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("frontend", "core", "executor", "kernels", "ipc")

Graph = dict[str, set[str]]


def file_graph(root: Path = ROOT) -> Graph:
    """For each file of the package, the files that it imports. A package's `__init__.py` that only
    hands names on is no node.
    """
    files = {
        path.relative_to(root).as_posix(): path
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*.py"))
    }
    return {
        name: {target for target in _imports(name, path, files) if target != name}
        for name, path in files.items()
        if not name.endswith("__init__.py")
    }


def _imports(name: str, path: Path, files: dict[str, Path]) -> Iterable[str]:
    package = Path(name).parts[:-1]
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) + 1 - node.level], *(node.module or "").split(".")]
            base = [part for part in base if part]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quire."):
            base = (node.module or "").split(".")[1:]
        else:
            continue
        for alias in node.names:
            for parts in ([*base, alias.name], base):
                target = "/".join(parts) + ".py"
                if target in files:
                    yield target
                    break


def room_graph(graph: Graph, folder: str) -> Graph:
    """For each room of `folder`, the other rooms of the same folder that its files import."""
    rooms: Graph = {}
    for name, targets in graph.items():
        if (room := _room(name, folder)) is None:
            continue
        others = {_room(target, folder) for target in targets} - {None, room}
        rooms.setdefault(room, set()).update(other for other in others if other)
    return rooms


def _room(name: str, folder: str) -> str | None:
    prefix, _, rest = name.partition("/")
    return rest.split("/")[0] if prefix == folder else None


def order(graph: Graph) -> list[str]:
    """The rooms from the top down. Rooms move one at a time to where the fewest arrows run up,
    until no move helps.
    """
    found = sorted(graph, key=lambda room: (-len(graph[room]), room))
    importers = {room: {other for other in graph if room in graph[other]} for room in graph}
    is_better = True
    while is_better:
        is_better = False
        for room in sorted(graph):
            rest = [other for other in found if other != room]
            # arrows that run up with `room` above the first n of the rest
            counts = [
                sum(other in graph[room] for other in rest[:n])
                + sum(other in importers[room] for other in rest[n:])
                for n in range(len(rest) + 1)
            ]
            best, now = min(counts), counts[found.index(room)]
            if best < now:
                found = [*rest[: counts.index(best)], room, *rest[counts.index(best) :]]
                is_better = True
    return found


def upward(graph: Graph) -> list[tuple[str, str]]:
    """The arrows (from, to) that run up in the best order of the rooms."""
    place = {room: number for number, room in enumerate(order(graph))}
    return sorted(
        (room, target)
        for room in graph
        for target in graph[room]
        if target in place and place[target] < place[room]
    )


def circles(graph: Graph) -> list[list[str]]:
    """The sets of two or more files that import one another, directly or not (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(graph.get(name, ())):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1:
                found.append(sorted(members))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def main() -> None:
    graph = file_graph()
    for folder in FOLDERS:
        rooms = room_graph(graph, folder)
        arrows = upward(rooms)
        print(f"{folder}: {len(rooms)} rooms, {len(arrows)} arrows run up")
        print("".join(f"    {room} -> {target}\n" for room, target in arrows), end="")
    for members in circles(graph):
        print("circle:", ", ".join(members))


if __name__ == "__main__":
    main()
