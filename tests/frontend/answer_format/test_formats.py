"""Which format a template shows, and what overrides it.
May know: formats.py.
Must not know: how formats are read."""

from __future__ import annotations

import pytest
from quire import InvalidParameterError
from quire.frontend.answer_format import detect


def test_a_template_without_marks_has_no_format() -> None:
    for template in (None, "", "{{ messages }}"):
        found = detect(template)
        assert (found.tool_name, found.reasoning_name, found.skip_special_tokens) == (None, None, True)


def test_flags_override() -> None:
    template = "<tool_call> </think>"
    assert (detect(template).tool_name, detect(template).reasoning_name) == ("hermes", "think")
    off = detect(template, "none", "none")
    assert (off.tool_name, off.reasoning_name) == (None, None)
    on = detect("", "hermes", "think")
    assert (on.tool_name, on.reasoning_name) == ("hermes", "think")
    for parameter in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(InvalidParameterError, match=f"{parameter}: must be one of auto, none, .*got 'x'"):
            detect(template, **{parameter: "x"})


