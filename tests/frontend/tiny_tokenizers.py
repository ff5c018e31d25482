"""Small tokenizers of the kinds that models use, and matching configurations."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.config import EngineConfig
from quire.tests.fakes import make_config
from quire.tests.tiny_models import save_tiny_tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

_HOLDERS: list[TemporaryDirectory] = []  # removed when the test run ends
TEXTS = (
    "The cat sat on the mat, and the dog (a very old one) did not care.",
    "你好，世界！今天天气很好。",
    "naïve café — 12 € 🤖👩‍👩‍👧 e\u0301",
    "  two  spaces,\n\nnew lines\tand tabs ",
)


def write_byte_fallback_tokenizer(directory: Path, *, strip: bool = True) -> None:
    """Write a Llama 2 tokenizer: "▁" for a space, bytes as <0xNN>, and a BOS.

    One leading space is removed if `strip`.
    """
    words = ["▁", "▁the", "▁cat", "a", "b", "c", "t", "▁▁", "好", "é", "."]
    vocab = {
        token: i
        for i, token in enumerate(
            ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
        )
    }
    backend = Backend(models.BPE(vocab, [], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(
        [AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    _write(directory, backend, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


def write_word_piece_tokenizer(directory: Path) -> None:
    """Write a WordPiece tokenizer: "##" continues a word, anything else begins one."""
    vocab = {
        token: i
        for i, token in enumerate(
            ["[UNK]", "[SEP]", "the", "cat", "##s", "##ness", "sat", ".", "好", "[CLS]"]
        )
    }
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[SEP]", "[CLS]"])
    _write(directory, backend, {"eos_token": "[SEP]", "unk_token": "[UNK]"})


def _write(directory: Path, backend: Backend, config: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}), encoding="utf-8"
    )


@cache
def tiny_tokenizer_directory(kind: str = "byte_level") -> Path:
    """Return a directory with a tokenizer of this kind, written once per test run."""
    holder = TemporaryDirectory(prefix="quire-test-")
    _HOLDERS.append(holder)
    directory = Path(holder.name)
    if kind == "byte_level":
        save_tiny_tokenizer(directory)
    elif kind == "word_piece":
        write_word_piece_tokenizer(directory)
    else:
        write_byte_fallback_tokenizer(directory, strip=kind == "byte_fallback_strip")
    return directory


@cache
def tiny_tokenizer(kind: str = "byte_level") -> Tokenizer:
    """Return a tokenizer: byte_level, byte_fallback, byte_fallback_strip or word_piece."""
    return Tokenizer(tiny_tokenizer_directory(kind))


def text_config(**arguments: Any) -> EngineConfig:
    """Make a resolved configuration with the byte-level tokenizer.

    Vocabulary 320 and context 64 unless `arguments` override them.
    """
    directory = str(tiny_tokenizer_directory())
    defaults = {
        "model": directory,
        "tokenizer": directory,
        "max_model_len": 64,
        "skip_tokenizer_init": False,
    }
    return make_config(vocab_size=320, **{**defaults, **arguments})
