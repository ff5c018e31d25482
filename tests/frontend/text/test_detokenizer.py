"""Incremental decoding against decoding in one call, and stop strings against a simple oracle, with
random tokens.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire import SamplingParams
from quire.frontend.text.detokenizer import (
    PieceDecoder,
    WindowDecoder,
    find_stop,
    length_of_possible_stop,
    make_decoder,
    make_detokenizer,
)
from quire.ipc.messages import FinishReason
from quire.tests.frontend.tiny_tokenizers import TEXTS, tiny_tokenizer

KINDS = ("byte_level", "byte_fallback", "byte_fallback_strip", "word_piece")


def streamed(kind: str, prompt: list[int], token_ids: list[int], **params) -> str:
    decoder = make_decoder(tiny_tokenizer(kind), prompt, SamplingParams(**params))
    return "".join([*(decoder.decode([i]) for i in token_ids), decoder.flush()])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 302), max_size=24), st.booleans())
def test_byte_level_deltas_equal_the_decoded_text(token_ids, skip) -> None:
    expected = tiny_tokenizer().decode(token_ids, skip_special_tokens=skip)
    assert (
        streamed(
            "byte_level", tiny_tokenizer().encode("a prompt"), token_ids, skip_special_tokens=skip
        )
        == expected
    )


def _runs_are_whole_or_broken(token_ids: list[int]) -> bool:
    """Whether no run of byte tokens contains both complete characters and an invalid byte. This is
    the one case where streaming must differ.
    """
    run = b""
    for token_id in [*token_ids, 0]:
        if 3 <= token_id < 259:
            run += bytes([token_id - 3])
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            if run.decode(errors="ignore"):
                return False
        run = b""
    return True


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(0, 269), st.sampled_from([3 + b for b in "é好🤖".encode()])),
        max_size=12,
    ),
    st.booleans(),
)
def test_byte_fallback_deltas_equal_the_decoded_text(token_ids, skip) -> None:
    if not _runs_are_whole_or_broken([i for i in token_ids if not (skip and i < 3)]):
        return
    tokenizer, prompt = tiny_tokenizer("byte_fallback"), [260]
    expected = tokenizer.decode([*prompt, *token_ids], skip_special_tokens=skip)[
        len(tokenizer.decode(prompt)) :
    ]
    assert streamed("byte_fallback", prompt, token_ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_strip"])
def test_no_replacement_character_within_a_text(kind, text) -> None:
    tokenizer = tiny_tokenizer(kind)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    decoder = make_decoder(tokenizer, [1], SamplingParams())
    deltas = [decoder.decode([i]) for i in token_ids]
    assert "".join(deltas) == tokenizer.decode(token_ids)
    assert text in " " + "".join(deltas)
    assert not any("\ufffd" in delta for delta in deltas)
    assert decoder.flush() == ""
    if kind == "byte_level":
        # incomplete characters are buffered
        assert any(delta == "" for delta in deltas) == any(ord(c) > 0x7F for c in text)


def test_incomplete_and_invalid_bytes_appear_as_in_decode() -> None:
    tokenizer = tiny_tokenizer()
    robot = tokenizer.encode("🤖")
    assert len(robot) == 4
    assert streamed("byte_level", [0], robot[:3]) == tokenizer.decode(robot[:3]) == "\ufffd"
    assert streamed("byte_level", [0], [robot[0], *tokenizer.encode("a"), *robot]) == "\ufffda🤖"
    fallback = tiny_tokenizer("byte_fallback")
    robot = fallback.encode("🤖", add_special_tokens=False)[1:]
    assert streamed("byte_fallback", [260], robot[:3]) == "\ufffd" * 3


def test_streamed_text_stays_when_a_byte_run_turns_invalid() -> None:
    fallback = tiny_tokenizer("byte_fallback")
    run = [3 + byte for byte in "é".encode()] + [3 + 0xE5]
    assert fallback.decode(run) == "\ufffd" * 3
    assert streamed("byte_fallback", [260], run) == "é\ufffd"


def test_a_character_begun_in_the_prompt_is_completed() -> None:
    robot = tiny_tokenizer().encode("🤖")
    assert streamed("byte_level", [5, *robot[:2]], robot[2:]) == "🤖"
    a = tiny_tokenizer().encode("a")
    # invalid: the replacement character belongs to the prompt
    assert streamed("byte_level", [5, *robot[:2]], a) == "a"
    assert streamed("byte_level", [5, *robot[:2]], robot[:1]) == "\ufffd"
    assert streamed("byte_level", [5, *robot[:2]], []) == ""
    robot = tiny_tokenizer("byte_fallback").encode("🤖", add_special_tokens=False)[1:]
    assert streamed("byte_fallback", [260, *robot[:2]], robot[2:]) == "🤖"
    assert streamed("byte_fallback", [260, *robot[:2]], [260]) == " the"


def test_the_leading_space_is_stripped_only_at_the_start_of_a_text() -> None:
    the, space = 260, 259
    assert streamed("byte_fallback_strip", [1], [the]) == "the"  # the prompt emits no text
    assert (
        streamed("byte_fallback_strip", [1], [space, the])
        == tiny_tokenizer("byte_fallback_strip").decode([space, the])
        == " the"
    )
    assert streamed("byte_fallback_strip", [the], [the]) == " the"
    assert streamed("byte_fallback_strip", [1], [1, the], skip_special_tokens=False) == "<s> the"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.booleans())
def test_other_decoders_use_the_window(token_ids, skip) -> None:
    tokenizer = tiny_tokenizer("word_piece")
    prompt = [2, 3]
    assert isinstance(make_decoder(tokenizer, prompt, SamplingParams()), WindowDecoder)
    whole = tokenizer.decode([*prompt, *token_ids], skip_special_tokens=skip)
    assert (
        streamed("word_piece", prompt, token_ids, skip_special_tokens=skip)
        == whole[len(tokenizer.decode(prompt)) :]
    )


def test_spaces_between_special_tokens() -> None:
    shown = {"skip_special_tokens": False}
    assert streamed("word_piece", [2], [1, 9, 3], **shown) == " [SEP] [CLS] cat"
    assert (
        streamed("word_piece", [2], [1, 9, 3], spaces_between_special_tokens=False, **shown)
        == " [SEP][CLS] cat"
    )
    # this kind has no spaces to omit
    assert streamed("byte_level", [2], [300, 301], **shown) == "<|endoftext|><|im_start|>"


def test_each_token_is_decoded_once() -> None:
    """O(1) per token: the work of a decoder does not depend on the preceding text."""
    decoder = make_decoder(tiny_tokenizer(), [1], SamplingParams())
    assert isinstance(decoder, PieceDecoder)
    window = make_decoder(tiny_tokenizer("word_piece"), [2, 3], SamplingParams())
    for token_id in [3, 4, 2, 5] * 50:
        window.decode([token_id])
        assert len(window._context) + len(window._pending) <= 4
    broken = tiny_tokenizer().encode("🤖")[:1]
    general = WindowDecoder(tiny_tokenizer(), [1], True, True)
    text = "".join([*(general.decode(broken) for _ in range(100)), general.flush()])
    assert text == tiny_tokenizer().decode(broken * 100)
    assert len(general._pending) < 4


# ---------------------------------------------------------------- stop strings


def oracle(
    texts: list[str], stops: list[str], *, include: bool, min_tokens: int
) -> tuple[str, str | None]:
    """Decode everything. Return the first position after the text of min_tokens tokens where a stop
    string ends; of several, the first in the list.
    """
    whole = "".join(texts)
    for end in range(len("".join(texts[:min_tokens])) + 1, len(whole) + 1):
        ending = [stop for stop in stops if whole[:end].endswith(stop)]
        if ending:
            stop = ending[0]
            return (whole[:end] if include else whole[: end - len(stop)]), stop
    return whole, None


def undecided(text: str, stops: list[str]) -> int:
    """Return the length of the longest suffix that may become a stop string."""
    return max(
        (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
    )


PIECES = ("t", "h", "e", "i", "n", "he", "Ġthe", "Ġt", "in", "en", "er", "Ġin", "Ġ")


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=14),
    st.lists(st.text("thein ", min_size=1, max_size=5), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 4),
    st.integers(1, 3),
)
def test_stop_strings_are_found_as_in_the_complete_text(
    pieces, stops, include, min_tokens, tokens_per_update
) -> None:
    tokenizer = tiny_tokenizer()
    token_ids = [tokenizer.token_to_id(piece) for piece in pieces]
    texts = [tokenizer.decode(i) for i in token_ids]
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None
    )
    detokenizer = make_detokenizer(tokenizer, [1], params)
    expected, expected_stop = oracle(texts, stops, include=include, min_tokens=min_tokens)
    shown, stop, num_used = "", None, 0
    for start in range(0, len(token_ids), tokens_per_update):
        end = start + tokens_per_update
        used, stop = detokenizer.update(
            token_ids[start:end], FinishReason.LENGTH if end >= len(token_ids) else None
        )
        num_used += used
        shown += detokenizer.take_delta()
        if stop is not None or end >= len(token_ids):
            break
        decoded = "".join(texts[:end])
        # all text that is certain, and no more
        assert shown == decoded[: len(decoded) - undecided(decoded, stops)]
    assert (shown, stop) == (expected, expected_stop)
    if stop is not None:  # the output ends with the token that completed the stop string
        assert num_used > min_tokens
        assert oracle(texts[:num_used], stops, include=include, min_tokens=min_tokens)[1] == stop
        assert (
            oracle(texts[: num_used - 1], stops, include=include, min_tokens=min_tokens)[1] is None
        )


def test_a_stop_string_across_multi_byte_tokens() -> None:
    tokenizer = tiny_tokenizer()
    detokenizer = make_detokenizer(tokenizer, [1], SamplingParams(stop=["世界"], output_kind=1))
    token_ids = tokenizer.encode("你好，世界！")
    shown = []
    for num_tokens, token_id in enumerate(token_ids, 1):
        _, stop = detokenizer.update([token_id])
        shown.append(detokenizer.take_delta())
        if stop:
            break
    assert "".join(shown) == "你好，" and stop == "世界"
    assert tokenizer.decode(token_ids[:num_tokens]) == "你好，世界"


def test_a_stop_string_in_text_that_only_the_end_emits() -> None:
    robot = tiny_tokenizer().encode("🤖")
    detokenizer = make_detokenizer(tiny_tokenizer(), [1], SamplingParams(stop=["x\ufffd"]))
    assert detokenizer.update([*tiny_tokenizer().encode("ax"), robot[0]], FinishReason.LENGTH) == (
        3,
        "x\ufffd",
    )
    assert detokenizer.text == "a"


def test_the_token_that_ends_a_request_has_no_text() -> None:
    tokenizer, eos = tiny_tokenizer(), 302
    for include, expected in ((False, "the"), (True, "the<|im_end|>")):
        params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=include)
        detokenizer = make_detokenizer(tokenizer, [1], params)
        assert detokenizer.update([*tokenizer.encode("the"), eos], FinishReason.STOP) == (
            len(tokenizer.encode("the")) + 1,
            None,
        )
        assert detokenizer.text == expected


def test_buffered_text_appears_if_the_request_ends_otherwise() -> None:
    tokenizer = tiny_tokenizer()
    detokenizer = make_detokenizer(tokenizer, [1], SamplingParams(stop="</answer>"))
    detokenizer.update(tokenizer.encode("yes</ans"))
    assert detokenizer.text == "yes"
    detokenizer.update([], FinishReason.ABORT)
    assert detokenizer.text == "yes</ans"


def test_without_detokenize_there_is_no_text() -> None:
    for tokenizer, params in (
        (tiny_tokenizer(), SamplingParams(detokenize=False)),
        (None, SamplingParams()),
    ):
        detokenizer = make_detokenizer(tokenizer, [1], params)
        assert detokenizer.update([5, 6], FinishReason.LENGTH) == (2, None)
        assert detokenizer.text == ""


def test_the_cost_of_long_stop_strings_is_linear() -> None:
    stop = "a" * 20_000
    assert length_of_possible_stop("b" + "a" * 19_999, stop) == 19_999
    assert find_stop("b" + stop, [stop], 5) == (1, 20_001, stop)
    rng = random.Random(0)
    text = "".join(rng.choice("ab") for _ in range(1000))
    for _ in range(50):
        stop = text[(start := rng.randrange(990)) : start + 10]
        naive = max((n for n in range(1, 10) if text[:500].endswith(stop[:n])), default=0)
        assert length_of_possible_stop(text[:500], stop) == naive
