"""/docs: the OpenAPI description as a page of HTML without scripts or outside resources.

Must not know: what a route does.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; padding: .3rem 0; }
code, pre { font: 14px/1.4 ui-monospace, monospace; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid; border-radius: .4rem; }
b { display: inline-block; min-width: 5rem; }
"""
HEADERS = {
    "content-security-policy": "default-src 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "form-action 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    + "'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def reference_page(description: dict[str, Any]) -> str:
    """Renders `description`, as returned by openapi.describe."""
    info = description["info"]
    operations = [
        _operation(method, path, operation)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = [
        _details(f'<code id="{escape(name)}">{escape(name)}</code>', _json(schema))
        for name, schema in description["components"]["schemas"].items()
    ]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>{title}</h1><p>{escape(info['description'])} As OpenAPI: "
        f'<a href="openapi.json">openapi.json</a>.</p>'
        f"<h2>Routes</h2>{''.join(operations)}<h2>Schemas</h2>{''.join(schemas)}</body></html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    """Renders one route: its summary, and the schemas of its body and its response."""
    head = (
        f"<b>{method.upper()}</b> <code>{escape(path)}</code> "
        f"{escape(operation.get('summary', ''))}"
    )
    parts = [
        f"<p>{name}, {escape(kind)}</p>{_json(content.get('schema', {}))}"
        for name, contents in (
            ("Body", operation.get("requestBody", {}).get("content", {})),
            ("Answer", operation["responses"]["200"].get("content", {})),
        )
        for kind, content in contents.items()
    ]
    return _details(head, "".join(parts) or "<p>No body is described.</p>")


def _details(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>{body}</details>"


def _json(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2, ensure_ascii=False))}</pre>"
