"""YAML for settings files: a duplicate key is an error, 1e6 is a number, and every value that is
written is read back unchanged.

Must not know: settings, files. It is imported only where YAML is read or written.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

# YAML 1.2 has numbers such as 1e6. The library follows 1.1 and reads them as text unless they
# contain a decimal point.
_FLOAT = (
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Builds a mapping as YAML does, but rejects duplicate keys."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.constructor.ConstructorError(
                problem=f"{twice[0]} occurs twice", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that the loader would read as a number."""


_Loader.add_implicit_resolver(*_FLOAT)
_Dumper.add_implicit_resolver(*_FLOAT)


def load(text: str) -> Any:
    """Parses the text. Raises ValueError with a sentence."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        # ValueError: a date such as 2026-99-99
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise ValueError(f"{getattr(error, 'problem', None) or error}{where}") from None


def dump(value: Any) -> str:
    """Returns one value in ASCII, for use after a key and before a comment."""
    # The value is dumped inside a list, so that texts are quoted as required within brackets.
    return yaml.dump(
        [value], Dumper=_Dumper, default_flow_style=True, width=float("inf"), sort_keys=False
    ).strip()[1:-1]
