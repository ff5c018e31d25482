"""Turns the tokenizer of a GGUF file into the contents of tokenizer.json and tokenizer_config.json.

Must not know: the tokenizers library, which reads them; templates; requests.
"""

from __future__ import annotations

import unicodedata
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ModelLoadError
from .gguf import GGUFFile, read_gguf
from .gguf_pre_tokenizers import PRE_TOKENIZERS, byte_level
from .merge_cache import Merges, merges_of

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token_type
# maps tokenizer.ggml.model to the kind of tokenizer
KINDS = {
    "gpt2": "byte-level BPE",
    "llama": "SentencePiece BPE",
    "gemma4": "SentencePiece BPE with merges",
    "bert": "WordPiece",
    "t5": "SentencePiece unigram",
}
OTHER_KINDS = {
    "no_vocab": "no tokenizer",
    "plamo2": "PLaMo's longest matches",
    "rwkv": "RWKV's longest matches",
}
REMEDY = "a tokenizer.json beside the file, or tokenizer=, replaces it"
BERT_TOKENS = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
PHI3_KEEPS_SPACES_BEHIND = ("<s>", "<|endoftext|>")
MAX_PIECE_CHARACTERS = 256  # for SentencePiece, whose pieces are each cut at every place

_NFC = {"type": "NFC"}


def tokenizer_json(path: Path) -> bytes:
    """Returns the tokenizer.json beside a GGUF file, or the one that its metadata amounts to.

    Raises OSError, and ModelLoadError naming file and key.
    """
    beside = path.with_name("tokenizer.json")
    if beside.exists():
        return beside.read_bytes()
    contents = gguf_tokenizer(Vocabulary(read_gguf(path)))
    return msgspec.json.encode(contents, enc_hook=list)  # the hook is for merges


def gguf_tokenizer(vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns the contents of tokenizer.json.

    Raises ModelLoadError, naming file and key, for what is missing, unsound or unknown.
    """
    vocabulary.check()
    of_kind = {
        "gpt2": _byte_level,
        "llama": _sentence_piece,
        "gemma4": _sentence_piece,
        "bert": _word_piece,
        "t5": _unigram,
    }
    parts = of_kind[vocabulary.kind](vocabulary)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
    } | parts


def gguf_tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns the contents of tokenizer_config.json: special tokens by role, and chat templates."""
    prefix = "tokenizer.chat_template"
    roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    config: dict[str, Any] = {}
    for key, role in roles.items():
        if vocabulary.tokens and (token_id := vocabulary.token_id(f"{key}_token_id")) is not None:
            config[f"{role}_token"] = vocabulary.tokens[token_id]
    templates = {
        key.removeprefix(prefix).removeprefix(".") or "default": vocabulary.metadata[key]
        for key in vocabulary.metadata
        if key == prefix or key.startswith(f"{prefix}.")
    }
    if templates:
        config["chat_template"] = [
            {"name": name, "template": template} for name, template in templates.items()
        ]
    return config


class Vocabulary:
    """The metadata under tokenizer.ggml.

    Raises ModelLoadError, naming file and key, for a value of the wrong type or length.
    """

    def __init__(self, file: GGUFFile):
        self.path, self.metadata = file.paths[0], file.metadata
        self.kind = self.get("model", str, None)
        self.tokens = self.listed("tokens", str)
        num_tokens = len(self.tokens)
        self.types = self.listed("token_type", int, num_tokens or None) or [NORMAL] * num_tokens
        if self.kind == "llama":
            # the conversion writes user-defined tokens with spaces
            self.tokens = [
                text.replace(" ", "▁") if kind == USER_DEFINED else text
                for text, kind in zip(self.tokens, self.types)
            ]
        if self.kind == "bert":
            self.tokens = [
                _of_word_piece(text, kind) for text, kind in zip(self.tokens, self.types)
            ]

    def check(self) -> None:
        """Raises ModelLoadError if no tokenizer can be built from the metadata. With a
        tokenizer.json beside the file, nobody needs this check.
        """
        if self.kind not in KINDS:
            what = f" ({OTHER_KINDS[self.kind]})" if self.kind in OTHER_KINDS else ""
            supported = ", ".join(f"{kind} ({what})" for kind, what in KINDS.items())
            raise self.unsound(
                "model", f"is {self.kind!r:.100}{what}; supported: {supported}; {REMEDY}"
            )
        if not self.tokens:
            raise self.unsound("tokens", "is missing or empty")
        if len(set(self.tokens)) != len(self.tokens):
            raise self.unsound("tokens", "has a token twice")

    def get(self, key: str, kind: type, default: Any) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if value is not default and type(value) is not kind:
            raise self.unsound(key, f"must be of type {kind.__name__}, got {value!r:.100}")
        return value

    def listed(self, key: str, kind: type, length: int | None = None) -> list[Any]:
        values = self.get(key, list, [])
        if values and type(values[0]) is not kind:
            raise self.unsound(key, f"must list {kind.__name__}, got {values[0]!r:.100}")
        if values and length is not None and len(values) != length:
            raise self.unsound(key, f"has {len(values)} entries for {length} tokens")
        return values

    def token_id(self, key: str) -> int | None:
        token_id = self.get(key, int, None)
        if token_id is not None and not 0 <= token_id < len(self.tokens):
            raise self.unsound(key, f"is {token_id}, there are {len(self.tokens)} tokens")
        return token_id

    def added_tokens(self) -> list[dict[str, Any]]:
        """The tokens that are looked for in a text before anything else happens to it."""
        # a file does not say which tokens take the spaces after them
        is_phi3 = self.kind == "llama" and self.metadata.get("general.architecture") == "phi3"
        return [
            {
                "id": token_id,
                "content": text,
                # SentencePiece looks for user-defined tokens once spaces are replaced
                "normalized": self.kind == "llama" and kind == USER_DEFINED and "▁" in text,
                "special": kind != USER_DEFINED,
                "single_word": False,
                "lstrip": False,
                "rstrip": is_phi3 and kind == CONTROL and text not in PHI3_KEEPS_SPACES_BEHIND,
            }
            for token_id, (text, kind) in enumerate(zip(self.tokens, self.types))
            if kind in self.added_types or (self.kind == "bert" and text in BERT_TOKENS)
            if text
        ]

    @property
    def added_types(self) -> tuple[int, ...]:
        """The types of `added_tokens`."""
        is_sentence_piece = self.kind in ("llama", "gemma4", "t5")
        return (CONTROL, USER_DEFINED, UNKNOWN) if is_sentence_piece else (CONTROL, USER_DEFINED)

    def special_id(self, *keys: str, text: str) -> int:
        """The id that the first existing key gives, or else the id of the token `text`."""
        for key in keys:
            if (token_id := self.token_id(key)) is not None:
                return token_id
        if text not in self.tokens:
            raise self.unsound(keys[0], f"is missing, and there is no token {text}")
        return self.tokens.index(text)

    def post_processor(self, add_bos: bool) -> dict[str, Any] | None:
        """What adds the tokens around a text that add_bos_token and add_eos_token ask for."""
        bos = self.token_id("bos_token_id") if self.get("add_bos_token", bool, add_bos) else None
        eos = self.token_id("eos_token_id") if self.get("add_eos_token", bool, False) else None
        if bos is None and eos is None:
            return None
        single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        special = {}
        for token_id, at in ((bos, 0), (eos, len(pair))):
            if token_id is not None:
                text = self.tokens[token_id]
                special[text] = {"id": text, "ids": [token_id], "tokens": [text]}
                single.insert(at, {"SpecialToken": {"id": text, "type_id": 0}})
                pair.insert(at + 1 if at else 0, {"SpecialToken": {"id": text, "type_id": 0}})
        return {
            "type": "TemplateProcessing",
            "single": single,
            "pair": pair,
            "special_tokens": special,
        }

    def unsound(self, key: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: tokenizer.ggml.{key} {problem}")


def _byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    name = vocabulary.get("pre", str, None)
    if name not in PRE_TOKENIZERS:
        raise vocabulary.unsound(
            "pre",
            f"is {name!r:.100}; supported: {', '.join(PRE_TOKENIZERS)}; {REMEDY}",
        )
    pre = PRE_TOKENIZERS[name]
    return {
        "normalizer": _NFC if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre.steps)},
        "post_processor": vocabulary.post_processor(pre.add_bos),
        "decoder": byte_level(use_regex=False),
        "model": _bpe(
            # the conversion fills holes with unused tokens
            {
                text: token_id
                for token_id, text in enumerate(vocabulary.tokens)
                if vocabulary.types[token_id] != UNUSED
            },
            _listed_merges(vocabulary),
            ignore_merges=pre.ignore_merges,
        ),
    }


def _listed_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    merges = []
    for merge in vocabulary.listed("merges", str):
        at = merge.find(" ", 1)
        if at < 0:
            raise vocabulary.unsound("merges", f"has {merge!r:.100}, which is no pair")
        merges.append((merge[:at], merge[at + 1 :]))
    return merges


def _sentence_piece(vocabulary: Vocabulary) -> dict[str, Any]:
    if vocabulary.get("remove_extra_whitespaces", bool, False):
        raise vocabulary.unsound("remove_extra_whitespaces", "is not supported")
    if vocabulary.kind == "gemma4":
        merges: Sequence[tuple[str, str]] = _listed_merges(vocabulary)
    else:
        scores = vocabulary.listed("scores", float, len(vocabulary.tokens))
        if not scores:
            raise vocabulary.unsound("scores", "is missing")
        merges = _merges_by_score(vocabulary, scores)
    has_prefix = vocabulary.get("add_space_prefix", bool, True)
    vocab = {text: token_id for token_id, text in enumerate(vocabulary.tokens)}
    unknown = vocabulary.token_id("unknown_token_id")
    if unknown is None:
        unknown = next((i for i, kind in enumerate(vocabulary.types) if kind == UNKNOWN), None)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prefix = [{"type": "Prepend", "prepend": "▁"}] if has_prefix else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "post_processor": vocabulary.post_processor(True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocab,
            merges,
            byte_fallback=BYTE in vocabulary.types,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
        ),
    }


def _of_word_piece(text: str, kind: int) -> str:
    """The token as a WordPiece vocabulary has it. The conversion marks the beginnings of words, as
    SentencePiece does, while WordPiece marks what follows. It leaves special tokens as they are.
    """
    if text.startswith("▁") and len(text) > 1:
        return text[1:]
    is_special = kind in (CONTROL, USER_DEFINED) or (text.startswith("[") and text.endswith("]"))
    return text if is_special else f"##{text}"


def _word_piece(vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns BERT's tokenizer. A file does not say whether texts become lower case and lose their
    accents, but the vocabulary does: a cased one has capital letters, and one that keeps accents
    has letters with accents.
    """
    cls = vocabulary.special_id("cls_token_id", "bos_token_id", text="[CLS]")
    sep = vocabulary.special_id("seperator_token_id", "eos_token_id", text="[SEP]")
    unknown = vocabulary.special_id("unknown_token_id", text="[UNK]")
    words = [t for t, kind in zip(vocabulary.tokens, vocabulary.types) if kind == NORMAL]
    words = [text for text in words if not (text.startswith("[") and text.endswith("]"))]
    is_cased = any(text != text.lower() for text in words)
    has_accents = any(map(_has_accent, words))
    texts = vocabulary.tokens
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": not (is_cased or has_accents),
            "lowercase": not is_cased,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "BertProcessing",
            "sep": [texts[sep], sep],
            "cls": [texts[cls], cls],
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": texts[unknown],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {text: token_id for token_id, text in enumerate(texts)},
        },
    }


def _has_accent(text: str) -> bool:
    """Whether BERT's tokenizer would take something from a lower-case word with its accents."""
    if text.isascii():
        return False
    return any(unicodedata.category(char) == "Mn" for char in unicodedata.normalize("NFD", text))


def _unigram(vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns SentencePiece's unigram model, as XLM-RoBERTa has it. Several spaces count as one."""
    scores = vocabulary.listed("scores", float, len(vocabulary.tokens))
    if not scores:
        raise vocabulary.unsound("scores", "is missing")
    bos = vocabulary.special_id("bos_token_id", "cls_token_id", text="<s>")
    eos = vocabulary.special_id("eos_token_id", "seperator_token_id", text="</s>")
    unknown = vocabulary.special_id("unknown_token_id", text="<unk>")
    charsmap = bytes(number & 255 for number in vocabulary.listed("precompiled_charsmap", int))
    precompiled = b64encode(charsmap).decode()
    texts = vocabulary.tokens
    has_prefix = vocabulary.get("add_space_prefix", bool, True)
    metaspace = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "always" if has_prefix else "never",
        "split": True,
    }
    return {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": precompiled}
        if charsmap
        else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace],
        },
        "post_processor": {
            "type": "RobertaProcessing",
            "sep": [texts[eos], eos],
            "cls": [texts[bos], bos],
            "trim_offsets": True,
            "add_prefix_space": True,
        },
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": list(zip(texts, scores, strict=True)),
            "byte_fallback": False,
        },
    }


def _merges_by_score(vocabulary: Vocabulary, scores: list[float]) -> Merges:
    """Returns the merges. SentencePiece merges the two neighbours whose joined piece has the
    highest score, so every way to cut a piece in two is a merge with that piece's score.
    """
    scores_of = {
        text: -score
        for text, kind, score in zip(vocabulary.tokens, vocabulary.types, scores)
        if kind in (NORMAL, UNUSED)
    }
    longest = max(map(len, scores_of), default=0)
    if longest > MAX_PIECE_CHARACTERS:
        raise vocabulary.unsound("tokens", f"has a piece of {longest} characters")
    # the sort is stable, so pieces of the same score stay in the order of their ids
    return merges_of(sorted(scores_of, key=scores_of.__getitem__))


def _bpe(
    vocab: dict[str, int], merges: Sequence[tuple[str, str]], **options: Any
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    } | options
