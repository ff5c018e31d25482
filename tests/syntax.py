"""Syntax trees of the repository's files, parsed once for all rules that read them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of the tree, in the order of ast.walk()."""
    return list(ast.walk(tree_of(path)))
