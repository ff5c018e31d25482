"""A tokenizer.json is tried out under limits. tests/test_hostile_models.py has files that exceed
them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import quire
from quire.frontend.text import tokenizer_trial
from quire.ipc.errors import ModelLoadError

FILE = Path(quire.__file__).parent / "frontend" / "bundled_model" / "tokenizer.json"


def test_expressions_are_found_at_any_depth() -> None:
    inner = {"type": "Split", "pattern": {"Regex": "b"}}
    outer = {"type": "Sequence", "pretokenizers": [inner, {"pattern": {"String": "c"}}]}
    assert tokenizer_trial.regular_expressions([{"Regex": "a"}, outer, None, 1]) == {"a", "b"}


def test_a_good_file_passes_and_so_does_what_the_library_refuses() -> None:
    tokenizer_trial.try_out(FILE, FILE.read_bytes())
    tokenizer_trial.try_out(FILE, b"{}")


def test_the_memory_of_the_process_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = FILE.read_bytes() + b" " * 2**22
    monkeypatch.setattr(tokenizer_trial, "MEMORY_LIMIT_BYTES", 2**20 - 64 * len(contents))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: loading it "):
        tokenizer_trial.try_out(FILE, contents)
