"""A table of how the tokenizers that GGUF files name cut a text before byte-level merges.

Must not know: files, vocabularies, the tokenizers library, which reads the steps.

A name (tokenizer.ggml.pre) stands for the model whose tokenizer was converted. The steps are those
of that model's tokenizer.json. Names whose models end with the same cuts share an entry.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

Step = dict[str, Any]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = rf"\s*[\r\n]+|{_SPACES}"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


def _class(ranges: str) -> str:
    """Turns "41-5A B5" into a class of these code points."""
    points = re.sub(r"[0-9A-F]+", lambda point: rf"\x{{{point[0]}}}", ranges)
    return f"[{points.replace(' ', '')}]"


_HAN_AND_KANA = _class("4E00-9FA5 3040-309F 30A0-30FF")
_CJK = _class("4E00-9FA5 0800-4E00 AC00-D7FF")  # as DeepSeek has it
_WIDE_MARKS = _class("0021-002F 003A-007E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
# Letters that have a case, as DeepSeek lists them.
_CASED_LETTERS = _class(
    "0041-005A 0061-007A 00B5 00C0-00D6 00D8-00F6 00F8-01BA 01BC-01BF 01C4-0293 0295-02AF "
    "0370-0373 0376 0377 037B-037D 037F 0386 0388-038A 038C 038E-03A1 03A3-03F5 03F7-0481 "
    "048A-052F 0531-0556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B "
    "1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D "
    "1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC "
    "1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D "
    "212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 "
    "2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 "
    "FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 "
    "118A0-118DF 1E900-1E943"
)


def _cl100k(digits: str, marks: str = _MARKS, lines: str = _LINES, word: str = _WORD) -> str:
    """GPT-4's kind finds contractions, words with the character before, digits, marks, spaces."""
    return f"{_CONTRACTIONS}|{word}|{digits}|{marks}|{lines}"


def _o200k(digits: str, end: str, upper: str = _UPPER, lower: str = _LOWER) -> str:
    """GPT-4o's kind also cuts words where an upper-case letter follows a lower-case one."""
    word = r"[^\r\n\p{L}\p{N}]?"
    marks = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
    return f"{word}{upper}*{lower}+{end}|{word}{upper}+{lower}*{end}|{digits}|{marks}|{_LINES}"


def _split(regex: str, behavior: str = "Isolated") -> Step:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": False}


def _digits(individual: bool) -> Step:
    return {"type": "Digits", "individual_digits": individual}


def byte_level(use_regex: bool) -> Step:
    """Writes the bytes as characters. With `use_regex` it first cuts as GPT-2 does."""
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return step | {"use_regex": use_regex}


class PreTokenizer(msgspec.Struct, frozen=True):
    """How a text is cut. `nfc`: the text is composed first. `ignore_merges`: a piece that is a
    token is not merged. `add_bos` holds unless the file says otherwise.
    """

    steps: tuple[Step, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


def _by(*regexes: str, **options: bool) -> PreTokenizer:
    return PreTokenizer((*map(_split, regexes), byte_level(use_regex=False)), **options)


_TRIPLES, _SINGLE = r"\p{N}{1,3}", r"\p{N}"
_AS_GPT2 = PreTokenizer((byte_level(use_regex=True),))
_AS_GPT_NEOX = PreTokenizer((byte_level(use_regex=True),), nfc=True)
_AS_STARCODER = PreTokenizer((_digits(True), byte_level(use_regex=True)))
_AS_QWEN2 = _by(_cl100k(_SINGLE))
_AS_GPT4 = _by(_cl100k(_TRIPLES))
_AS_LLAMA3 = _by(_cl100k(_TRIPLES), ignore_merges=True, add_bos=True)
_AS_GPT4O = _by(_o200k(_TRIPLES, f"{_CONTRACTIONS}?"))
_AS_BLOOM = _by(r" ?[^(\s|[.,!?…。，、।۔،])]+")
_AS_DEEPSEEK_V3 = _by(
    _TRIPLES,
    f"{_HAN_AND_KANA}+",
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}",
)
_AS_BAILING = _by(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    rf"|\s*[\r\n]|{_SPACES}"
)
_HALVED_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
_NOT_HAN = r"&&[^\p{Han}]"

# by tokenizer.ggml.pre
PRE_TOKENIZERS = {
    # llama.cpp does this with files that are older than the names
    "default": _by(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "gigachat", "jais", "trillion", "granite-docling", "exaone4"), _AS_GPT2
    ),
    **dict.fromkeys(("a.x-4.0", "mellum"), _AS_GPT2),
    **dict.fromkeys(("mpt", "olmo"), _AS_GPT_NEOX),
    **dict.fromkeys(
        ("starcoder", "refact", "smollm", "codeshell", "minerva-7b", "exaone", "mellum2"),
        _AS_STARCODER,
    ),
    "command-r": msgspec.structs.replace(_AS_STARCODER, nfc=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"), _AS_LLAMA3),
    **dict.fromkeys(("pixtral", "lfm2", "midm-2.0"), _AS_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _AS_GPT4),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), msgspec.structs.replace(_AS_QWEN2, nfc=True)),
    **dict.fromkeys(("stablelm2", "megrez", "kormo", "hunyuan", "solar-open", "grok-2"), _AS_QWEN2),
    "qwen35": _by(
        _cl100k(
            _SINGLE,
            marks=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
            word=r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        ),
        nfc=True,
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _AS_GPT4O),
    "tekken": _by(_o200k(_SINGLE, ""), ignore_merges=True, add_bos=True),
    "kimi-k2": _by(
        r"[\p{Han}]+|"
        + _o200k(
            _TRIPLES,
            f"{_CONTRACTIONS}?",
            *(f"{letters[:-1]}{_NOT_HAN}]" for letters in (_UPPER, _LOWER)),
        ).replace(r"[\r\n/]*", r"[\r\n]*")
    ),
    "deepseek-llm": PreTokenizer(
        (
            _split(r"[\r\n]"),
            _split(rf"\s?{_CASED_LETTERS}+"),
            _split(rf"\s?{_WIDE_MARKS}+"),
            _split(r"\s+$"),
            _split(f"{_CJK}+"),
            _digits(True),
            byte_level(use_regex=False),
        )
    ),
    "deepseek-coder": PreTokenizer(
        (
            _split(r"[\r\n]"),
            _split(r"\s?\p{L}+"),
            _split(r"\s?\p{P}+"),
            _split(f"{_CJK}+"),
            _digits(True),
            byte_level(use_regex=False),
        )
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _AS_DEEPSEEK_V3),
    "falcon": PreTokenizer(
        (
            {"type": "Punctuation", "behavior": "Contiguous"},
            byte_level(use_regex=True),
            _digits(False),
            _split("[0-9][0-9][0-9]"),
        )
    ),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _AS_BLOOM),
    "viking": PreTokenizer((_AS_BLOOM.steps[0], _digits(True), byte_level(use_regex=False))),
    "superbpe": _by(r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _AS_BAILING),
    "seed-coder": _by(_cl100k(r"\p{N}{1}", marks=r" ?[^\s\p{L}\p{N}\r\n]+")),
    "exaone-moe": _by(
        _cl100k(
            _SINGLE,
            marks=r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
            lines=rf"\s*[\r\n]|{_SPACES}",
            word=r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
        )
    ),
    "minicpm5": _by(_TRIPLES, _cl100k(r"\p{N}+"), ignore_merges=True),
    "jais-2": _by(_cl100k(_TRIPLES, lines=rf"\s*[\r\n]+|{_HALVED_SPACES}|\s{{1,2}}(?!\S)|\s{{1}}")),
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"),
        _by(r"\d{1,3}(?=(?:\d{3})*\b)", _o200k(_TRIPLES, f"{_CONTRACTIONS}?")),
    ),
    "laguna": PreTokenizer(
        (
            _split(r"(?:\r?\n)+(?!\r?\n)", "MergedWithNext"),
            _split(_cl100k(_SINGLE)),
            byte_level(use_regex=False),
        )
    ),
}
