"""Named pre-tokenizers: the same ids as tokenizers that cut texts as the named models do.

The originals are written here as the models' own tokenizer.json files have them.
"""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
from quire.frontend.model_info.model_files import find_model_directory
from quire.ipc.models.gguf_pre_tokenizers import PRE_TOKENIZERS
from quire.tests.gguf_tokenizers import built, differences, metadata_of, texts
from tokenizers import Regex, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Punctuation, Sequence, Split
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35

BUNDLED = find_model_directory("bundled") / "tokenizer.json"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
    "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
    r"\s*[\r\n]|\s+(?!\S)|\s+"
)
SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
JAIS2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|"
    r"\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
WIDE_MARKS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"


def split(regex: str, behavior: str = "isolated") -> Split:
    return Split(Regex(regex), behavior)


WITH_REGEX = ByteLevel(add_prefix_space=False, use_regex=True)
BYTES = ByteLevel(add_prefix_space=False, use_regex=False)


class Original(NamedTuple):
    names: str
    steps: list[Any]
    nfc: bool = False
    ignore_merges: bool = False


ORIGINALS = [
    Original(
        "gpt-2 phi-2 gigachat jais trillion granite-docling exaone4 a.x-4.0 mellum", [WITH_REGEX]
    ),
    Original("olmo mpt", [WITH_REGEX], nfc=True),
    Original(
        "starcoder refact smollm codeshell minerva-7b exaone mellum2",
        [Digits(individual_digits=True), WITH_REGEX],
    ),
    Original("command-r", [Digits(individual_digits=True), WITH_REGEX], nfc=True),
    Original(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2 midm-2.0",
        [split(LLAMA3), BYTES],
        ignore_merges=True,
    ),
    Original("dbrx smaug-bpe glm4 chatglm-bpe", [split(LLAMA3), BYTES]),
    Original("qwen2 deepseek-r1-qwen", [split(QWEN2), BYTES], nfc=True),
    Original("stablelm2 megrez kormo hunyuan solar-open grok-2", [split(QWEN2), BYTES]),
    Original("qwen35", [split(QWEN35), BYTES], nfc=True),
    Original("gpt-4o llama4 kanana2 talkie minimax-m2", [split(GPT4O), BYTES]),
    Original("tekken", [split(TEKKEN), BYTES], ignore_merges=True),
    Original("kimi-k2", [split(KIMI), BYTES]),
    Original(
        "default",
        [split(r"[\p{P}\$\+<=>\^~\|]+"), split(GPT2), split(r"\p{N}+"), split("[0-9]{3}"), BYTES],
    ),
    Original(
        "deepseek-coder",
        [
            *map(split, [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK]),
            Digits(individual_digits=True),
            BYTES,
        ],
    ),
    Original(
        "deepseek-v3 hunyuan-dense joyai-llm",
        [*map(split, [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK_V3]), BYTES],
    ),
    Original(
        "falcon",
        [
            Punctuation(behavior="contiguous"),
            WITH_REGEX,
            Digits(individual_digits=False),
            split("[0-9][0-9][0-9]"),
        ],
    ),
    Original("bloom poro-chat gpt3-finnish", [split(BLOOM), BYTES]),
    Original("viking", [split(BLOOM), Digits(individual_digits=True), BYTES]),
    Original("superbpe", [split(r"\p{N}+"), split(r"(?=(\d{3})+(?!\d))"), BYTES]),
    Original("bailingmoe bailingmoe2 llada-moe", [split(BAILING), BYTES]),
    Original("seed-coder", [split(SEED), BYTES]),
    Original("exaone-moe", [split(EXAONE_MOE), BYTES]),
    Original(
        "minicpm5",
        [split(r"\p{N}{1,3}"), split(LLAMA3.replace("{1,3}", "+")), BYTES],
        ignore_merges=True,
    ),
    Original("jais-2", [split(JAIS2), BYTES]),
    Original("tiny_aya cohere2moe", [split(r"\d{1,3}(?=(?:\d{3})*\b)"), split(GPT4O), BYTES]),
    Original("laguna", [split(r"(?:\r?\n)+(?!\r?\n)", "merged_with_next"), split(QWEN2), BYTES]),
]
BY_SCRIPT = "deepseek-llm"  # see test_letters_of_deepseek_llm


@pytest.mark.parametrize("original", ORIGINALS, ids=lambda original: original.names.split()[0])
@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_ids_are_the_original_ones(original: Original, count: int, tmp_path: Path) -> None:
    name, *others = original.names.split()
    own = tokenizers.Tokenizer.from_file(str(BUNDLED))
    own.pre_tokenizer = Sequence(original.steps)
    own.model.ignore_merges = original.ignore_merges
    own.normalizer = normalizers.NFC() if original.nfc else normalizers.Sequence([])
    ours = built(tmp_path, metadata_of(json.loads(BUNDLED.read_text()), name))
    assert differences(ours, own, texts(count)) == []
    assert ours.get_added_tokens_decoder() == own.get_added_tokens_decoder()
    assert all(PRE_TOKENIZERS[other] == PRE_TOKENIZERS[name] for other in others)


def test_every_name_is_compared() -> None:
    named = " ".join(original.names for original in ORIGINALS).split()
    assert sorted([*named, BY_SCRIPT]) == sorted(PRE_TOKENIZERS)


def test_letters_of_deepseek_llm() -> None:
    """It lists the letters that have a case; Unicode has got more of them since."""
    regex = PRE_TOKENIZERS[BY_SCRIPT].steps[1]["pattern"]["Regex"].removeprefix(r"\s?")
    listed = re.compile(re.sub(r"\\x\{(\w+)\}", lambda point: chr(int(point[1], 16)), regex))
    characters = [chr(code) for code in range(0x1E944) if not 0xD800 <= code < 0xE000]
    cased = {c for c in characters if unicodedata.category(c) in ("Lu", "Ll", "Lt")}
    found = {c for c in characters if listed.fullmatch(c)}
    assert found <= cased
    assert min(cased - found) == "\u0560"  # of Unicode 11


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("falcon", "(12345)", "( 123 45 )"),
        ("superbpe", "12345 a b", "12 345 ĠaĠb"),
        ("deepseek-llm", "aΩé is 12!", "a Î©Ã© Ġis Ġ 1 2 !"),
        ("deepseek-llm", "ab漢字, cd", "ab æ¼¢åŃĹ , Ġcd"),
        ("kimi-k2", "ab漢字cd", "ab æ¼¢åŃĹ cd"),
        ("tiny_aya", "1234567", "1 234 567"),
        ("viking", "a 12", "a Ġ 1 2"),
        ("laguna", "a.\n\nb", "a . ĊĊ b"),
    ],
)
def test_cuts(name: str, text: str, pieces: str, tmp_path: Path) -> None:
    ours = built(tmp_path, metadata_of(json.loads(BUNDLED.read_text()), name))
    found = [piece for piece, _ in ours.pre_tokenizer.pre_tokenize_str(text)]
    assert " ".join(found) == pieces
