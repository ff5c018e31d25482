"""Converts the engine's arrays of log-probabilities to vLLM's dicts of Logprob with the text of
each candidate.

Must not know: requests, the readers of the result.
"""

from __future__ import annotations

import codecs

from ...ipc.messages import Array, PromptLogprobs, TokenLogprobs
from ..outputs import Logprob, PositionLogprobs
from ..text.detokenizer import MAX_CHARACTER_TOKENS
from ..text.tokenizer import REPLACEMENT, Tokenizer

# the last tokens if they belong to an incomplete character; nearly always empty
Context = tuple[int, ...]


class TokenTexts:
    """The text that a token adds after other tokens.

    The texts of the sampled tokens, concatenated, are the output's text with special tokens
    included.

    A token that leaves a character incomplete adds nothing; the token that completes it adds the
    whole character; a token that breaks it begins with U+FFFD, as in the output's text. (vLLM does
    the same and shows "" for incomplete characters.)
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._table = tokenizer.piece_tables[False]
        self._alone: dict[int, tuple[str, bool]] = {}  # for tokens that follow a complete character

    def text(self, context: Context, token_id: int) -> str:
        if not context:
            return self._decode_alone(token_id)[0]
        return self._decode([*context, token_id])[0].removeprefix(self._decode(list(context))[0])

    def context_after(self, context: Context, token_id: int) -> Context:
        if not context and not self._decode_alone(token_id)[1]:
            return ()
        longer = (*context, token_id)[-MAX_CHARACTER_TOKENS:]
        return longer if self._decode(list(longer))[1] else ()

    def context_of(self, token_ids: list[int]) -> Context:
        context: Context = ()
        for token_id in token_ids[-MAX_CHARACTER_TOKENS:]:
            context = self.context_after(context, token_id)
        return context

    def _decode_alone(self, token_id: int) -> tuple[str, bool]:
        if token_id not in self._alone:
            self._alone[token_id] = self._decode([token_id])
        return self._alone[token_id]

    def _decode(self, token_ids: list[int]) -> tuple[str, bool]:
        """Returns (text without an incomplete character at its end, whether there was one)."""
        if self._table is None:
            text = self._tokenizer.decode(token_ids)
            return text.rstrip(REPLACEMENT), text.endswith(REPLACEMENT)
        utf8 = codecs.getincrementaldecoder("utf-8")(self._table.errors)
        text = utf8.decode(b"".join([self._table[i] for i in token_ids]))
        return text, bool(utf8.getstate()[0])


class LogprobsReader:
    """Reads the positions of one sequence in order.

    `context_token_ids` are the tokens before the first position.
    """

    def __init__(self, texts: TokenTexts | None, context_token_ids: list[int]):
        self._texts = texts
        self._context: Context = texts.context_of(context_token_ids) if texts is not None else ()

    def read(
        self, columns: TokenLogprobs | PromptLogprobs, start: int, end: int
    ) -> list[PositionLogprobs]:
        """Returns rows [start, end) of the arrays as one dict per token: its own entry first, with
        its rank; the rank of the others is their column.
        """
        width = columns.token_ids.shape[1]
        cells = slice(start * width, end * width)
        ids = _numbers(columns.token_ids)[cells]
        logprobs = _numbers(columns.logprobs)[cells]
        ranks = _numbers(columns.ranks)[start:end]
        positions = []
        for i, rank in enumerate(ranks):
            row = slice(i * width, (i + 1) * width)
            positions.append(self._position(ids[row], logprobs[row], rank))
        return positions

    def _position(self, ids: list[int], logprobs: list[float], rank: int) -> PositionLogprobs:
        texts, context = self._texts, self._context
        position: PositionLogprobs = {}
        for token_id, logprob, column in zip(ids, logprobs, range(len(ids)), strict=True):
            # the token's own entry comes first and may repeat one of the most likely ones
            if token_id not in position:
                text = None if texts is None else texts.text(context, token_id)
                position[token_id] = Logprob(logprob, column or rank, text)
        if texts is not None:
            self._context = texts.context_after(context, ids[0])
        return position


def _numbers(array: Array) -> list:
    """An i4 or f4 array as a flat list, without numpy."""
    data = memoryview(array.data).cast("B")
    return (data.cast("i") if array.dtype == "i4" else data.cast("f")).tolist()
