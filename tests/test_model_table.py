"""The tables of docs/models.md are those of the code."""

from __future__ import annotations

import re

import msgspec
import pytest
from quire.frontend.answer_format.formats import REASONING_FORMATS, TOOL_FORMATS
from quire.ipc.models import fallback_architectures
from quire.ipc.models.architectures import ARCHITECTURES, NATIVE
from quire.tests.model_table import NOTES, PAGE, PARSERS, updated


def test_the_tables_are_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == updated(page), "run python -m quire.tests.model_table"


def test_a_new_architecture_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        fallback_architectures.FALLBACKS,
        "novel",
        fallback_architectures.Fallback("NovelForCausalLM"),
    )
    monkeypatch.setitem(fallback_architectures.REFUSED, "odd", "it has no reason")
    page = updated(PAGE.read_text())
    assert "| `NovelForCausalLM` | `novel` |" in page and "| `odd` | it has no reason |" in page


def test_a_new_row_has_notes_and_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bloom = msgspec.structs.replace(ARCHITECTURES["LlamaForCausalLM"], model_type="bloom")
    page = updated(PAGE.read_text())
    assert re.search(r"^\| .*`bloom`.* \| its attention", page, re.MULTILINE)
    for table in (ARCHITECTURES, NATIVE):
        monkeypatch.setitem(table, "BloomForCausalLM", bloom)
    monkeypatch.setitem(NOTES, "bloom", ("BLOOM", "none"))
    page = updated(page)
    assert not re.search(r"^\| .*`bloom`.* \| its attention", page, re.MULTILINE)
    assert "| `BloomForCausalLM` | BLOOM | none |" in page


def test_parsers_and_model_types_exist() -> None:
    tools = {row.name for row in TOOL_FORMATS}
    of_pages = {known.model_type for known in ARCHITECTURES.values()}
    known = of_pages | fallback_architectures.FALLBACKS.keys()
    known |= fallback_architectures.REFUSED.keys()
    assert PARSERS.keys() | NOTES.keys() <= known
    for tool_calls, reasoning in PARSERS.values():
        assert set(tool_calls.split(", ")) <= tools
        assert reasoning in ("", *REASONING_FORMATS)


def test_a_page_without_its_tables_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs one table supported"):
        updated("nothing")
