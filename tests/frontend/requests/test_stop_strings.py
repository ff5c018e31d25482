"""A table of stop strings, as seen by a reader: the ends of text and tokens, what a stream shows
before, and the effect of min_tokens.
"""

from __future__ import annotations

import itertools

import pytest
from quire import RequestOutputKind, SamplingParams
from quire.frontend.requests.input_processor import ProcessedRequest
from quire.frontend.requests.output_processor import OutputProcessor
from quire.ipc.messages import EngineCoreRequest, FinishReason
from quire.tests.frontend.scripted_client import joined, row
from quire.tests.frontend.tiny_tokenizers import tiny_tokenizer

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
TOKENIZER = tiny_tokenizer()


def ids(*pieces: str) -> list[int]:
    """Return ids of tokens by their spelling in the vocabulary, "Ġ" for a space."""
    found = [TOKENIZER.token_to_id(piece) for piece in pieces]
    assert None not in found, pieces
    return found


def stream(
    token_ids: list[int],
    *,
    tokens_per_row: int,
    kind: RequestOutputKind,
    end: FinishReason = FinishReason.LENGTH,
    **params,
):
    """Return every output of a request with these output tokens, `tokens_per_row` at a time (as
    with several decoding steps), and the ids aborted in the engine.
    """
    processor = OutputProcessor(TOKENIZER)
    sampling_params = SamplingParams(seed=0, max_tokens=None, output_kind=kind, **params)
    processor.add_request(ProcessedRequest("r", "p", EngineCoreRequest("e", [1], sampling_params)))
    outputs, aborted = [], []
    for start in range(0, len(token_ids), tokens_per_row):
        new = token_ids[start : start + tokens_per_row]
        reason = end if start + tokens_per_row >= len(token_ids) else None
        processed = processor.process_outputs(joined([row("e", start, new, reason)]))
        outputs += processed.request_outputs
        aborted += processed.requests_to_abort
        if not processor.has_unfinished_requests():
            break
    return outputs, aborted


# Name: the tokens, the stops; text without and with the stop, stop_reason, number of output tokens.
MATRIX = {
    "within one token": (["Ġthe", "Ġand", "Ġof"], ["an"], " the ", " the an", "an", 2),
    "across two tokens": (["h", "e", "l", "o", "Ġthe"], ["el"], "h", "hel", "el", 3),
    "across four tokens": (["a", "b", "c", "d", "e"], ["abcd"], "", "abcd", "abcd", 4),
    "begins in one that is shown in part": (["Ġand", "e", "n"], ["de"], " an", " ande", "de", 2),
    "the whole of a token": (["a", "Ġthe", "b"], [" the"], "a", "a the", " the", 2),
    "two in one token: the earliest end wins": (["Ġand", "a"], ["nd", "an"], " ", " an", "an", 1),
    "two in one token: the earliest end wins, in any order": (
        ["Ġand", "a"],
        ["an", "nd"],
        " ",
        " an",
        "an",
        1,
    ),
    "two with one end: the first of the list": (["Ġand", "a"], ["d", "and"], " an", " and", "d", 1),
    "two with one end: the first of the list, turned round": (
        ["Ġand", "a"],
        ["and", "d"],
        " ",
        " and",
        "and",
        1,
    ),
    "one that begins earlier and ends later loses": (
        ["x", "a", "b", "c"],
        ["xabc", "b"],
        "xa",
        "xab",
        "b",
        3,
    ),
    "one inside another's beginning": (
        ["a", "b", "a", "b", "c"],
        ["ababd", "abc"],
        "ab",
        "ababc",
        "abc",
        5,
    ),
    "a beginning that comes to nothing": (
        ["a", "b", "x", "a", "b", "c"],
        ["abc"],
        "abx",
        "abxabc",
        "abc",
        6,
    ),
    "never": (["a", "b", "Ġthe"], ["abc", "the end"], "ab the", "ab the", None, 3),
    "of several characters in many bytes": (
        TOKENIZER.encode("a你好🤖b"),
        ["好🤖"],
        "a你",
        "a你好🤖",
        "好🤖",
        None,
    ),
}


@pytest.mark.parametrize("tokens_per_row", [1, 2, 3, 100])
@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL_ONLY])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("case", MATRIX)
def test_the_table(case, include, kind, tokens_per_row) -> None:
    tokens, stops, without, with_stop, stop_reason, num_tokens = MATRIX[case]
    token_ids = tokens if isinstance(tokens[0], int) else ids(*tokens)
    if num_tokens is None:
        num_tokens = len(TOKENIZER.encode("a你好🤖"))
    outputs, aborted = stream(
        token_ids,
        tokens_per_row=tokens_per_row,
        kind=kind,
        stop=stops,
        include_stop_str_in_output=include,
    )
    last, expected = outputs[-1].outputs[0], with_stop if include else without
    texts = [output.outputs[0].text for output in outputs]
    if kind == DELTA:
        assert (
            "".join(texts) == expected
            and sum(len(output.outputs[0].token_ids) for output in outputs) == num_tokens
        )
    else:
        assert last.text == expected and last.token_ids == token_ids[:num_tokens]
        # streamed text is never retracted
        assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
    assert (last.stop_reason, last.finish_reason) == (
        stop_reason,
        "stop" if stop_reason else "length",
    )
    # the engine's own last row
    is_over_there = num_tokens > (len(token_ids) - 1) // tokens_per_row * tokens_per_row
    assert aborted == ([] if stop_reason is None or is_over_there else ["e"])


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_a_stream_buffers_text_that_may_become_a_stop(kind) -> None:
    token_ids = ids("a", "b", "c", "a", "b", "d")
    outputs, _ = stream(token_ids, tokens_per_row=1, kind=kind, stop=["abd", "cabe"])
    # "ab", then "c", "ca", "cab"; after the d, "c" is text and "abd" the stop
    deltas = ["", "", "ab", "", "", "c"]
    shown = deltas if kind == DELTA else ["".join(deltas[: i + 1]) for i in range(len(deltas))]
    assert [output.outputs[0].text for output in outputs] == shown


@pytest.mark.parametrize(
    ("end", "finish_reason"),
    [(FinishReason.LENGTH, "length"), (FinishReason.ABORT, "abort"), (FinishReason.ERROR, "error")],
)
def test_buffered_text_is_emitted_at_any_other_end(end, finish_reason) -> None:
    outputs, _ = stream(ids("x", "a", "b"), tokens_per_row=1, kind=DELTA, end=end, stop=["abc"])
    assert [o.outputs[0].text for o in outputs] == ["x", "", "ab"] and outputs[-1].outputs[
        0
    ].finish_reason == finish_reason


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("tokens_per_row", [1, 2, 100])
@pytest.mark.parametrize(
    ("min_tokens", "num_tokens"),
    [(0, 1), (1, 3), (2, 3), (3, 5), (4, 5), (5, None), (6, None)],
)  # the stop "a" is complete with tokens 1, 3 and 5 of six
def test_min_tokens_ignores_an_early_stop_string(
    min_tokens, num_tokens, tokens_per_row, include
) -> None:
    token_ids = ids("a", "b", "a", "b", "a", "b")
    params = {"stop": ["a"], "min_tokens": min_tokens, "include_stop_str_in_output": include}
    outputs, _ = stream(token_ids, tokens_per_row=tokens_per_row, kind=CUMULATIVE, **params)
    last = outputs[-1].outputs[0]
    if num_tokens is None:
        assert (last.text, last.finish_reason, len(last.token_ids)) == ("ababab", "length", 6)
    else:
        assert last.text == "ababab"[: num_tokens if include else num_tokens - 1]
        assert (last.finish_reason, len(last.token_ids)) == ("stop", num_tokens)


def test_a_stop_that_starts_within_min_tokens_and_ends_after_them_counts() -> None:
    outputs, _ = stream(
        ids("a", "b", "c", "d"), tokens_per_row=1, kind=CUMULATIVE, stop=["bc"], min_tokens=2
    )
    assert outputs[-1].outputs[0].text == "a" and len(outputs[-1].outputs[0].token_ids) == 3


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_stream_interval_delays_outputs_and_not_the_end(kind, interval) -> None:
    token_ids = ids("a", "b", "c", "d", "e", "f", "g", "h")
    outputs, aborted = stream(
        token_ids, tokens_per_row=1, kind=kind, stop=["gh"], stream_interval=interval
    )
    texts = [o.outputs[0].text for o in outputs]
    assert ("".join(texts) if kind == DELTA else texts[-1]) == "abcdef"
    counts = [len(o.outputs[0].token_ids) for o in outputs]
    totals = [sum(counts[: i + 1]) for i in range(len(counts))] if kind == DELTA else counts
    assert totals == sorted({1, *range(1 + interval, 8, interval), 8}) and aborted == []
