"""The page is one file that loads nothing."""

import json
import re

from quire.frontend.trace.html import page
from quire.tests.frontend.trace.made import made


def test_the_page_has_everything_in_it(tmp_path):
    trace = made()
    trace.received[0].texts["a"] = "</script><b>"
    trace.to_html(tmp_path / "t.html")
    text = (tmp_path / "t.html").read_text()
    assert text == page(trace)
    assert not re.search(r"""(src|href)=|https?://|@import|url\(""", text)
    data = re.search(r'<script type="application/json" id="trace">(.*?)</script>', text)[1]
    assert json.loads(data) == json.loads(trace.to_json())
    assert "layers[i].mlp.down_proj → linear" in text and "flameChart(step" in text
    assert "&lt;/script&gt;&lt;b&gt;" in text
