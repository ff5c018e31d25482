"""Tokenizer: text to token ids and back, from a model directory's tokenizer.json and
tokenizer_config.json, or from a GGUF file.

Must not know: transformers, requests, how text is streamed (detokenizer.py).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from ...ipc.errors import InvalidParameterError, ModelLoadError
from ...ipc.json_files import check_model_file, read_json_if_exists
from ...ipc.models.gguf import is_gguf, read_gguf
from . import token_bounds, tokenizer_trial
from .chat_template import (
    RenderedChat,
    choose_template,
    read_chat_templates,
    render_with_images,
)

REPLACEMENT = "\ufffd"
# The byte tokens of byte-fallback vocabularies, such as "<0x0A>", in upper case.
BYTE_TOKENS = {f"<0X{byte:02X}>": bytes([byte]) for byte in range(256)}
# Limits on a tokenizer's normalizers. Published ones have at most 20 steps and make a text at most
# four times as long, or 36 times with sentencepiece's table, whose longest text has 18 characters.
MAX_NORMALIZERS = 256
MAX_GROWTH = 64  # characters that one character becomes
MAX_NORMALIZED = 2**26  # characters of all added tokens, normalized
SPECIAL_TOKEN_KEYS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """Equivalent to transformers' AutoTokenizer for a directory with a tokenizer.json: the same
    ids, text and chat prompts. A GGUF file's metadata holds the same things; files beside it, if
    there is a tokenizer.json among them, replace them one by one.

    The post-processor of tokenizer.json adds special tokens such as a BOS; add_bos_token and
    add_eos_token are ignored. Raises ModelLoadError when tokenizer.json is missing or corrupt.
    """

    def __init__(self, directory: str | Path):
        path = Path(directory)
        self.directory = path.parent if is_gguf(path) else path
        config = read_json_if_exists(self.directory / "tokenizer_config.json")
        special = {**read_json_if_exists(self.directory / "special_tokens_map.json"), **config}
        if is_gguf(path):
            self.backend, stated = _load_gguf(path)
            special, config = stated | special, stated | config
        else:
            self.backend = _load_backend(path / "tokenizer.json")
        try:
            self.special_tokens_map = {
                key: text for key in SPECIAL_TOKEN_KEYS if (text := _token_text(special.get(key)))
            }
            _add_missing_tokens(self.backend, config, self.special_tokens_map)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise ModelLoadError(
                f"{self.directory / 'tokenizer_config.json'}: its special or added tokens cannot "
                f"be understood: {error!s:.200}"
            ) from error
        self.added_tokens = {
            i: token.content for i, token in self.backend.get_added_tokens_decoder().items()
        }
        self.special_ids = frozenset(
            i for i, token in self.backend.get_added_tokens_decoder().items() if token.special
        )
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.chat_templates = read_chat_templates(self.directory, config)
        self.piece_tables = PieceTables(self.backend, self.special_ids)

    def _special_id(self, key: str) -> int | None:
        text = self.special_tokens_map.get(key)
        return None if text is None else self.backend.token_to_id(text)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model's embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def __len__(self) -> int:
        return self.vocab_size

    @cached_property
    def max_token_length(self) -> int | None:
        """The largest number of characters that one token covers; None if it is unknown.

        A text of n characters has at least n / max_token_length tokens. If a normalizer composes
        characters (NFC), n counts the characters after it.
        """
        return token_bounds.max_token_length(self.backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids.

        Raises InvalidParameterError for values that are not valid text, lone surrogates included.
        """
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise InvalidParameterError(
                "prompt",
                f"must be text that UTF-8 can hold, got {type(text).__name__} {text!r:.40}",
            ) from None

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [
            encoding.ids
            for encoding in self.backend.encode_batch(texts, add_special_tokens=add_special_tokens)
        ]

    def decode(self, token_ids: int | list[int], skip_special_tokens: bool = False) -> str:
        """Decodes all ids at once.

        Ids outside the vocabulary add nothing; bytes that are not valid UTF-8 become U+FFFD.
        """
        return self.backend.decode(
            [token_ids] if isinstance(token_ids, int) else token_ids,
            skip_special_tokens=skip_special_tokens,
        )

    def decode_batch(self, batch: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        """Decodes several sequences; releases the GIL."""
        return self.backend.decode_batch(batch, skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Returns the token as the vocabulary writes it ("Ġworld"), not as text."""
        return self.backend.id_to_token(token_id)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tokenize: bool = True, **options: Any
    ) -> str | list[int]:
        """Returns the prompt of a conversation of text: token ids, or its text with tokenize=False.

        `options` are those of render_chat.
        """
        if tokenize not in (True, False):
            raise InvalidParameterError("tokenize", f"must be True or False, got {tokenize!r}")
        text = self.render_chat(messages, None, **options).text
        # The template has written the special tokens; adding them again would double the BOS.
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        placeholder: str | None,
        /,
        *,
        tools: list[dict] | None = None,
        documents: list[dict] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> RenderedChat:
        """Returns the text of the prompt of a conversation, and its images.

        `placeholder` is what stands for an image in the model's prompts; None: it reads text only.
        `chat_template` is a template, or the name of one of the model's; by default the model's
        default template. `variables` are passed to the template.
        """
        return render_with_images(
            choose_template(self.chat_templates, chat_template, with_tools=tools is not None),
            messages,
            placeholder,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens_map, **variables},
        )


def stored_chat_templates(directory: str | Path) -> dict[str, str]:
    """Reads Tokenizer.chat_templates without loading the tokenizer. Raises ModelLoadError."""
    path = Path(directory)
    beside = path.parent if is_gguf(path) else path
    stated = {}
    if is_gguf(path):
        from ...ipc.models.gguf_tokenizer import Vocabulary, gguf_tokenizer_config

        stated = gguf_tokenizer_config(Vocabulary(read_gguf(path)))
    return read_chat_templates(
        beside, stated | read_json_if_exists(beside / "tokenizer_config.json")
    )


def _token_text(token: Any) -> str | None:
    """tokenizer_config.json contains a special token as its text or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise TypeError(f"a token must be text, got {text!r:.100}")
    return text


class _Normalizer(msgspec.Struct):
    """A normalizer of tokenizer.json. Only these keys decide how much longer a text becomes."""

    type: str
    normalizers: list[_Normalizer] = []
    pattern: dict[str, str] | None = None
    content: str = ""
    prepend: str = ""
    precompiled_charsmap: bytes | None = None  # sentencepiece's table

    def parts(self) -> Iterator[_Normalizer]:
        yield self
        for inner in self.normalizers:
            yield from inner.parts()

    def growth(self) -> int:
        """How many characters one becomes at most, without what Unicode's forms do to it."""
        if self.type == "Prepend":
            return 1 + len(self.prepend)
        if self.type == "Precompiled":
            texts = self.table()[1].split(b"\0")
            return max(len(text.decode(errors="replace")) for text in texts)
        if self.type != "Replace":
            return 1
        replaced = (self.pattern or {}).get("String")
        if not replaced:  # a regular expression may match between two characters
            return 1 + len(self.content)
        return max(1, -(-len(self.content) // len(replaced)))

    def table(self) -> tuple[bytes, bytes]:
        """The trie of a table, and the texts that take the place of what it finds. Raises
        ValueError.
        """
        data = self.precompiled_charsmap or b""
        size = int.from_bytes(data[:4], "little")
        if len(data) < 4 or size % 4 or size > len(data) - 4:
            raise ValueError(f"its table of {len(data)} bytes has a trie of {size} bytes")
        return data[4 : 4 + size], data[4 + size :]


class _AddedToken(msgspec.Struct):
    content: str


class _TokenizerFile(msgspec.Struct):
    normalizer: _Normalizer | None = None
    added_tokens: list[_AddedToken] = []
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None

    def has_known_expressions(self) -> bool:
        """Whether all of its regular expressions are known."""
        parts = self.normalizer.parts() if self.normalizer is not None else ()
        replaced = tokenizer_trial.regular_expressions([part.pattern for part in parts])
        others = [self.pre_tokenizer, self.post_processor, self.decoder]
        return replaced <= tokenizer_trial.KNOWN_IN_NORMALIZERS and tokenizer_trial.are_known(
            tokenizer_trial.regular_expressions(others)
        )


def _check_contents(path: Path, contents: bytes) -> None:
    """Raises ModelLoadError for a file whose load, or whose work on the first texts, might not end:
    the library has no limit.
    """
    try:
        file = msgspec.json.decode(contents, type=_TokenizerFile)
        is_known = file.has_known_expressions()
    except (msgspec.MsgspecError, RecursionError):
        return tokenizer_trial.try_out(path, contents)  # the library may read it nevertheless
    _check_normalizer(path, file)
    if not is_known:
        tokenizer_trial.try_out(path, contents)


def _check_normalizer(path: Path, file: _TokenizerFile) -> None:
    """Raises ModelLoadError for a normalizer that makes texts very long: loading the file already
    normalizes its added tokens.
    """
    parts = list(file.normalizer.parts()) if file.normalizer is not None else []
    growth = 1
    try:
        for part in parts[:MAX_NORMALIZERS]:
            growth = min(growth * part.growth(), 10**9)
    except ValueError as error:
        raise ModelLoadError(f"{path}: its normalizer cannot be used: {error}") from error
    length = sum(len(token.content) for token in file.added_tokens)
    if growth > MAX_GROWTH or len(parts) > MAX_NORMALIZERS or growth * length > MAX_NORMALIZED:
        raise ModelLoadError(
            f"{path}: its normalizer has {len(parts)} steps and may make {growth:,} characters of "
            f"one, {growth * length:,} of its added tokens; the most are {MAX_NORMALIZERS}, "
            f"{MAX_GROWTH} and {MAX_NORMALIZED:,}"
        )


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.exists():
        remedy = (
            "name a tokenizer= that has one, or give skip_tokenizer_init=True to work on token ids"
        )
        raise ModelLoadError(f"{path.parent} has no {path.name}; {remedy}")
    check_model_file(path)
    try:
        contents = path.read_bytes()
        _check_contents(path, contents)
        backend = tokenizers.Tokenizer.from_buffer(contents)
    except ModelLoadError:
        raise
    except BaseException as error:
        if not _is_of_library(error):
            raise
        raise ModelLoadError(f"{path} cannot be read: {error!s:.300}") from error
    backend.no_truncation()  # some files contain the settings of their training
    backend.no_padding()
    return backend


def _is_of_library(error: BaseException) -> bool:
    """The library raises bare Exception, and BaseException where its Rust code panics."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _load_gguf(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer, and what tokenizer_config.json would hold."""
    from ...ipc.models.gguf_tokenizer import Vocabulary, gguf_tokenizer, gguf_tokenizer_config

    vocabulary, beside = Vocabulary(read_gguf(path)), path.with_name("tokenizer.json")
    config = gguf_tokenizer_config(vocabulary)
    if beside.exists():
        return _load_backend(beside), config
    contents = gguf_tokenizer(vocabulary)
    try:
        _check_normalizer(path, msgspec.convert(contents, _TokenizerFile))
        return _build_backend(contents), config
    except ModelLoadError:
        raise
    except BaseException as error:
        if not _is_of_library(error):
            raise
        raise ModelLoadError(f"{path}: its tokenizer cannot be built: {error!s:.300}") from error


def _build_backend(contents: dict[str, Any]) -> tokenizers.Tokenizer:
    """contents: of tokenizer.json. Vocabulary and merges are passed as they are: written as JSON
    and parsed again, a vocabulary of 262,000 tokens takes twice the time.
    """
    if contents["model"]["type"] != "BPE":
        return tokenizers.Tokenizer.from_str(msgspec.json.encode(contents).decode())
    options = {key: value for key, value in contents["model"].items() if value is not None}
    del options["type"]
    empty = contents | {
        "added_tokens": [],
        "model": contents["model"] | {"vocab": {}, "merges": []},
    }
    backend = tokenizers.Tokenizer.from_str(msgspec.json.encode(empty).decode())
    backend.model = tokenizers.models.BPE(**options)
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    backend.add_tokens(
        [
            tokenizers.AddedToken(token["content"], **{flag: token[flag] for flag in flags})
            for token in contents["added_tokens"]
        ]
    )
    return backend


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens_map: dict[str, str]
) -> None:
    """Adds tokens that only tokenizer_config.json contains, in the order of their ids."""
    known = backend.get_added_tokens_decoder()
    described = sorted(
        (int(i), token) for i, token in config.get("added_tokens_decoder", {}).items()
    )
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    for token_id, token in described:
        if token_id not in known:
            added = tokenizers.AddedToken(
                token["content"], **{flag: bool(token.get(flag)) for flag in flags}
            )
            (backend.add_special_tokens if added.special else backend.add_tokens)([added])
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = [
        *special_tokens_map.values(),
        *map(_token_text, extra.values() if isinstance(extra, dict) else extra),
    ]
    backend.add_special_tokens([text for text in dict.fromkeys(named) if text not in present])


# ---------------------------------------------------------------- the bytes of each token


class PieceTable(dict[int, bytes]):
    """Token id -> the bytes it adds to the text. Entries are computed on first use."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        skipped: frozenset[int],
        *,
        byte_level: bool,
        num_stripped: int = 0,
    ):
        self._backend = backend
        self._skipped = skipped
        self._byte_of_character = _byte_level_alphabet() if byte_level else None
        self._texts: dict[int, str | None] = {}
        # spaces that the decoder strips from the beginning of a text
        self.num_stripped = num_stripped
        self.errors = "replace" if byte_level else "quire.replace_each_byte"

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        piece = b"" if token is None or token_id in self._skipped else self._bytes_of(token)
        self[token_id] = piece
        return piece

    def text_of(self, token_id: int) -> str | None:
        """Returns the token's text if it consists of whole characters, otherwise None."""
        if token_id not in self._texts:
            try:
                self._texts[token_id] = self[token_id].decode()
            except UnicodeDecodeError:
                self._texts[token_id] = None
        return self._texts[token_id]

    def _bytes_of(self, token: str) -> bytes:
        if self._byte_of_character is not None:
            values = [self._byte_of_character.get(character) for character in token]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode()
        byte = BYTE_TOKENS.get(token.upper()) if token.startswith("<0x") else None
        return token.replace("▁", " ").encode() if byte is None else byte


class PieceTables(dict[bool, PieceTable | None]):
    """skip_special_tokens -> the table, made on first use; None if the tokenizer's decoder does
    more than concatenate pieces.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]):
        self._backend = backend
        self._special_ids = special_ids

    def __missing__(self, skip_special_tokens: bool) -> PieceTable | None:
        skipped: frozenset[int] = self._special_ids if skip_special_tokens else frozenset()
        self[skip_special_tokens] = table = _make_piece_table(self._backend, skipped)
        return table


def _make_piece_table(backend: tokenizers.Tokenizer, skipped: frozenset[int]) -> PieceTable | None:
    decoder = backend.decoder
    if decoder is None:
        return None
    description = json.loads(decoder.__getstate__())
    steps = description["decoders"] if description["type"] == "Sequence" else [description]
    kinds = [step["type"] for step in steps]
    if [kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"]:
        return PieceTable(backend, skipped, byte_level=True)
    if (
        kinds[:3] == ["Replace", "ByteFallback", "Fuse"]
        and _is_space(steps[0])
        and (num := _num_stripped(steps[3:])) is not None
    ):
        return PieceTable(backend, skipped, byte_level=False, num_stripped=num)
    return None


def _is_space(step: dict[str, Any]) -> bool:
    return step["pattern"] == {"String": "▁"} and step["content"] == " "


def _num_stripped(steps: list[dict[str, Any]]) -> int | None:
    """Number of spaces that the steps after Fuse strip from the text's beginning; None if they do
    anything else.
    """
    if not steps:
        return 0
    is_strip = (
        len(steps) == 1
        and steps[0]["type"] == "Strip"
        and steps[0]["content"] == " "
        and steps[0]["stop"] == 0
    )
    return steps[0]["start"] if is_strip else None


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's mapping of bytes to visible characters: printable Latin-1 maps to itself, the other
    bytes to 256, 257, … in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("quire.replace_each_byte", _replace_each_byte)
