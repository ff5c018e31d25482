"""Log-probabilities for users: dicts by token, ranks, texts of characters that span several tokens,
chunks of a prompt.
"""

from __future__ import annotations

import random

import pytest
from quire import RequestOutputKind, SamplingParams
from quire.frontend.requests.input_processor import ProcessedRequest
from quire.frontend.requests.logprobs import LogprobsReader, TokenTexts
from quire.frontend.requests.output_processor import OutputProcessor
from quire.ipc.messages import EngineCoreRequest, FinishReason, TokenLogprobs
from quire.tests.frontend.scripted_client import arrays, joined, prompt_logprobs, row
from quire.tests.frontend.tiny_tokenizers import TEXTS, tiny_tokenizer

KINDS = ("byte_level", "byte_fallback", "word_piece")
ROBOT = tiny_tokenizer().encode("🤖")  # four tokens of one byte


def pieces(kind: str, token_ids: list[int], context: list[int] = [0], k: int = 0) -> list[str]:
    """Return the decoded pieces of a sequence's own tokens, read in two parts."""
    reader = LogprobsReader(TokenTexts(tiny_tokenizer(kind)), context)
    columns = TokenLogprobs(0, *arrays(token_ids, k))
    half = len(token_ids) // 2
    positions = reader.read(columns, 0, half) + reader.read(columns, half, len(token_ids))
    assert [next(iter(position)) for position in positions] == token_ids
    return [
        position[token_id].decoded_token
        for position, token_id in zip(positions, token_ids, strict=True)
    ]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_the_pieces_add_up_to_the_text(kind, text) -> None:
    tokenizer = tiny_tokenizer(kind)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    decoded = pieces(kind, token_ids, k=2)
    assert "".join(decoded) == tokenizer.decode(token_ids)
    assert not any("\ufffd" in piece for piece in decoded)


def test_a_split_character_appears_with_the_token_that_completes_it() -> None:
    assert pieces("byte_level", [*tiny_tokenizer().encode("a"), *ROBOT]) == ["a", "", "", "", "🤖"]
    assert "".join(pieces("byte_level", tiny_tokenizer().encode("你好"))) == "你好"
    # started in the prompt
    assert pieces("byte_level", ROBOT[2:], context=[5, *ROBOT[:2]]) == ["", "🤖"]
    a = tiny_tokenizer().encode("a")
    # invalid: as in the text
    assert pieces("byte_level", [*ROBOT[:2], *a, *ROBOT]) == ["", "", "\ufffda", "", "", "", "🤖"]
    fallback = tiny_tokenizer("byte_fallback").encode("🤖", add_special_tokens=False)[1:]
    assert pieces("byte_fallback", fallback) == ["", "", "", "🤖"]


@pytest.mark.parametrize("kind", KINDS)
def test_any_tokens_give_the_text_of_the_whole(kind) -> None:
    tokenizer, rng = tiny_tokenizer(kind), random.Random(0)
    # an invalid run of bytes is all U+FFFD in the text, which no stream can know (see PieceDecoder)
    if kind == "byte_fallback":
        alphabet = [260, 261, 262, *range(3 + 32, 3 + 127)]
    else:
        alphabet = list(range(min(tokenizer.vocab_size, 300)))
    for _ in range(200):
        token_ids = rng.choices(alphabet, k=rng.randrange(1, 12))
        decoded = pieces(kind, token_ids, context=[alphabet[2]])
        # its spaces depend on neighbouring tokens; each piece is the token's own text
        if kind == "word_piece":
            assert decoded == [tokenizer.decode(i) for i in token_ids]
        else:
            # never completed
            incomplete = "\ufffd" * (len(tokenizer.decode(token_ids)) - len("".join(decoded)))
            assert (
                "".join(decoded) + incomplete == tokenizer.decode(token_ids)
                and len(incomplete) <= 1
            )


def test_candidates_show_the_text_that_they_would_have_added() -> None:
    tokenizer = tiny_tokenizer()
    reader = LogprobsReader(TokenTexts(tokenizer), [0])
    last = ROBOT[3]
    # the candidate beside token t is t + 1
    columns = TokenLogprobs(0, *arrays([*ROBOT[:3], last], 1))
    position = reader.read(columns, 0, 4)[3]
    other = "🤖".encode()[:3] + tokenizer.piece_tables[False][last + 1]
    assert position[last].decoded_token == "🤖" and position[
        last + 1
    ].decoded_token == other.decode(errors="replace")
    assert (position[last].rank, position[last + 1].rank) == (7, 1)


def test_special_tokens_are_shown_and_without_a_tokenizer_no_text_is() -> None:
    assert pieces("byte_level", [302, 40]) == ["<|im_end|>", tiny_tokenizer().decode(40)]
    reader = LogprobsReader(None, [0])
    assert reader.read(TokenLogprobs(0, *arrays([40], 1)), 0, 1)[0][40].decoded_token is None


# ---------------------------------------------------------------- prompts

PROMPT = [30, *ROBOT, 31, 32]


def started(**params) -> OutputProcessor:
    processor = OutputProcessor(tiny_tokenizer())
    request = EngineCoreRequest("e", PROMPT, SamplingParams(seed=0, **params))
    processor.add_request(ProcessedRequest("r", None, request))
    return processor


def run(processor: OutputProcessor, *rows):
    return processor.process_outputs(joined(list(rows))).request_outputs


def test_a_prompts_log_probabilities_come_in_chunks_and_may_repeat() -> None:
    processor = started(prompt_logprobs=2)
    assert run(processor, row("e", 0, [], prompt_logprobs=prompt_logprobs(1, PROMPT[1:3], 2))) == []
    # repeated after a preemption
    assert run(processor, row("e", 0, [], prompt_logprobs=prompt_logprobs(1, PROMPT[1:2], 2))) == []
    assert run(processor, row("e", 0, [], prompt_logprobs=prompt_logprobs(2, PROMPT[2:5], 2))) == []
    [output] = run(processor, row("e", 0, [40], prompt_logprobs=prompt_logprobs(5, PROMPT[5:], 2)))
    positions = output.prompt_logprobs
    assert positions[0] is None and [next(iter(p)) for p in positions[1:]] == PROMPT[1:]
    assert all(len(p) == 3 for p in positions[1:])
    assert [p[t].decoded_token for p, t in zip(positions[1:5], ROBOT, strict=True)] == [
        "",
        "",
        "",
        "🤖",
    ]
    first = positions[1]
    assert (first[PROMPT[1]].logprob, first[PROMPT[1]].rank) == (-PROMPT[1] / 8, 7)
    [last] = run(
        processor,
        row("e", 1, [41], FinishReason.LENGTH, prompt_logprobs=prompt_logprobs(1, PROMPT[1:], 2)),
    )
    assert last.prompt_logprobs == positions and output.outputs[0].logprobs is None


def test_deltas_carry_them_once() -> None:
    processor = started(prompt_logprobs=0, output_kind=RequestOutputKind.DELTA)
    [first] = run(processor, row("e", 0, [40], prompt_logprobs=prompt_logprobs(1, PROMPT[1:], 0)))
    [second] = run(processor, row("e", 1, [41], FinishReason.LENGTH))
    assert len(first.prompt_logprobs) == len(PROMPT) and all(
        len(p) == 1 for p in first.prompt_logprobs[1:]
    )
    assert second.prompt_logprobs is None
    first.merge(second)
    assert len(first.prompt_logprobs) == len(PROMPT)


def test_a_gap_is_an_error() -> None:
    processor = started(prompt_logprobs=0)
    run(processor, row("e", 0, [], prompt_logprobs=prompt_logprobs(1, PROMPT[1:3], 0)))
    [output] = run(processor, row("e", 0, [40], prompt_logprobs=prompt_logprobs(4, PROMPT[4:], 0)))
    assert output.outputs[0].finish_reason == "error" and output.error.startswith(
        "log-probabilities of the prompt's tokens from 3 on"
    )


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    processor = OutputProcessor(tiny_tokenizer())
    request = EngineCoreRequest("e", [30], SamplingParams(seed=0, prompt_logprobs=1))
    processor.add_request(ProcessedRequest("r", None, request))
    assert run(processor, row("e", 0, [40]))[0].prompt_logprobs == [None]


def test_requests_without_log_probabilities_get_none() -> None:
    processor = started()
    assert (
        run(processor, row("e", 0, [40], prompt_logprobs=prompt_logprobs(1, PROMPT[1:], 0)))[
            0
        ].prompt_logprobs
        is None
    )


def test_the_whole_vocabulary_at_each_token() -> None:
    processor = started(logprobs=-1)
    [output] = run(processor, row("e", 0, [0], num_logprobs=319))
    [position] = output.outputs[0].logprobs
    assert list(position) == list(range(320)) and position[319].rank == 319
