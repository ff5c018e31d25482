"""A trace as one HTML file: the tree as text, and each step as a flame chart.

Must not know: where a trace comes from. The chart is that of the server's page.
"""

from __future__ import annotations

import html
from importlib.resources import files

from .recorded import RecordedTrace
from .tree import render, tree_of

WIDTH = 190  # columns of the tree
STYLE = "body { font: 15px system-ui, sans-serif; margin: 2em } pre { overflow-x: auto }"


def page(trace: RecordedTrace) -> str:
    """Returns the file's text. It loads nothing."""
    folder = files("quire.frontend.server.page")
    chart, style = ((folder / name).read_text("utf-8") for name in ("flame.js", "flame.css"))
    # "</" would end the script
    data = trace.to_json().decode().replace("</", "<\\/")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Quire trace</title>
<style>{STYLE}
{style}</style></head>
<body>
<h1>Quire trace</h1>
<div id="steps"></div>
<pre>{html.escape(render(tree_of(trace, WIDTH), WIDTH))}</pre>
<script type="application/json" id="trace">{data}</script>
<script>
{chart}
const trace = JSON.parse(document.getElementById("trace").textContent);
for (const step of trace.engine.steps) {{
  document.getElementById("steps").append(flameChart(step, trace.engine.limits));
}}
</script>
</body></html>
"""
