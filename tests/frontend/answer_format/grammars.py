"""Tokenizers with marks as single tokens, and what a grammar accepts, for the tests of forced
calls.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from quire import StructuredOutputsParams
from quire.executor.sampling.grammar_compiler import GrammarCompiler, normalize
from quire.frontend.text.tokenizer import Tokenizer
from quire.tests.tiny_models import save_tiny_tokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

_HOLDERS: list[TemporaryDirectory] = []  # removed when the test run ends


@cache
def marked_tokenizer(marks: tuple[str, ...] = (), special: bool = True) -> Tokenizer:
    """Return the tiny byte-level tokenizer with `marks` added."""
    holder = TemporaryDirectory(prefix="quire-test-")
    _HOLDERS.append(holder)
    save_tiny_tokenizer(Path(holder.name))
    path = Path(holder.name) / "tokenizer.json"
    backend = Backend.from_file(str(path))
    tokens = [AddedToken(mark, normalized=False, special=special) for mark in marks]
    (backend.add_special_tokens if special else backend.add_tokens)(tokens)
    backend.save(str(path))
    return Tokenizer(holder.name)


def accepts(tokenizer: Tokenizer, params: StructuredOutputsParams, text: str) -> bool:
    """Whether the grammar accepts the complete text as an output."""
    matcher = GrammarCompiler(
        str(tokenizer.directory), tokenizer.vocab_size, tokenizer.eos_token_id
    ).compile(normalize(params))
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        if not matcher.consume_token(token_id):
            return False
    return matcher.is_accepting()
