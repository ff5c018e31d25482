"""The workloads: prompts and output lengths, reproducible by seed.

Must not know: HTTP, engines, when a request is sent.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ...ipc.errors import InvalidParameterError
from .options import WorkloadOptions

MAX_TRIES = 8  # for a text with the wanted number of tokens

# Short and frequent words, which most tokenizers encode as one token.
WORD_TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or one
had by word but not what all were we when your can said there use an each which she do how their
if will up other about out many then them these so some her would make like him into time has
look two more write go see number no way could people my than first water been call who oil its
now find long down day did get come made may part over new sound take only little work know
place year live me back give most very after thing our
"""
WORDS = WORD_TEXT.split()


class PromptTokenizer(Protocol):
    """The part of a tokenizer that is used; frontend/text/tokenizer.py implements it."""

    special_ids: frozenset[int]

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(frozen=True)
class WorkloadRequest:
    """One request, or, with follow_ups, a conversation of consecutive turns."""

    prompt: str | list[int]
    num_prompt_tokens: int | None  # None without a tokenizer
    max_tokens: int
    follow_ups: tuple[str, ...] = ()


def make_requests(
    options: WorkloadOptions, tokenizer: PromptTokenizer | None = None
) -> list[WorkloadRequest]:
    """Returns the requests in order. Raises InvalidParameterError for an unusable file."""
    if options.token_ids and tokenizer is None:
        raise InvalidParameterError("--token-ids", "needs --tokenizer")
    rng = random.Random(options.seed)
    text = TextSource(tokenizer, options.token_ids, rng)
    if options.dataset_name == "sharegpt":
        return _from_file(options, text, rng)
    if options.dataset_name == "prefix":
        return _with_prefixes(options, text, rng)
    num_follow_ups = options.num_turns - 1 if options.dataset_name == "multi-turn" else 0
    requests = []
    for _ in range(options.num_prompts):
        request = text.request(
            length(options.input_len, options, rng), length(options.output_len or 128, options, rng)
        )
        turn_lens = (length(options.input_len, options, rng) for _ in range(num_follow_ups))
        turns = tuple(map(text.text, turn_lens))
        requests.append(replace(request, follow_ups=turns))
    return requests


def length(middle: int, options: WorkloadOptions, rng: random.Random) -> int:
    """Returns a length that is uniformly distributed around `middle` within range_ratio, at least
    1.
    """
    spread = int(middle * options.range_ratio)
    return max(1, rng.randint(middle - spread, middle + spread))


class TextSource:
    """Random prompts of a given length, in tokens if there is a tokenizer, otherwise in words."""

    def __init__(self, tokenizer: PromptTokenizer | None, token_ids: bool, rng: random.Random):
        self.tokenizer, self.token_ids, self.rng = tokenizer, token_ids, rng
        self._ids: list[int] = []
        if tokenizer is not None:
            special = tokenizer.special_ids
            self._ids = [i for i in range(tokenizer.vocab_size) if i not in special]

    def request(
        self, num_tokens: int, max_tokens: int, beginning: str | list[int] | None = None
    ) -> WorkloadRequest:
        """Returns a request: `beginning`, if any, followed by num_tokens of its own."""
        prompt = self.piece(num_tokens)
        if beginning:
            prompt = beginning + prompt if self.token_ids else f"{beginning} {prompt}"
        return self.of(prompt, max_tokens)

    def piece(self, num_tokens: int) -> Any:
        """Returns part of a prompt: ids or text."""
        return self.ids(num_tokens) if self.token_ids else self.text(num_tokens)

    def of(self, prompt: str | list[int], max_tokens: int) -> WorkloadRequest:
        if self.token_ids and self.tokenizer is not None and isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt)
        return WorkloadRequest(prompt, self.count(prompt), max_tokens)

    def count(self, prompt: str | list[int]) -> int | None:
        if isinstance(prompt, list):
            return len(prompt)
        return len(self.tokenizer.encode(prompt)) if self.tokenizer else None

    def ids(self, num_tokens: int) -> list[int]:
        return self.rng.choices(self._ids, k=num_tokens)

    def text(self, num_tokens: int) -> str:
        """Returns the text of the nearest length in a few tries, because decoded tokens rarely
        encode to the same number.
        """
        if self.tokenizer is None:
            return " ".join(self.rng.choices(WORDS, k=num_tokens))
        ids, best, best_error = self.ids(num_tokens), "", None
        for _ in range(MAX_TRIES):
            text = self.tokenizer.decode(ids)
            again = self.tokenizer.encode(text, add_special_tokens=False)
            if best_error is None or abs(len(again) - num_tokens) < best_error:
                best, best_error = text, abs(len(again) - num_tokens)
            if best_error == 0:
                break
            ids = again[:num_tokens] + self.ids(max(0, num_tokens - len(again)))
        return best


def _with_prefixes(
    options: WorkloadOptions, text: TextSource, rng: random.Random
) -> list[WorkloadRequest]:
    """Returns requests with shared prefixes, which rotate. input_len counts prefix and rest."""
    own = options.input_len - options.prefix_len
    if own < 1:
        raise InvalidParameterError(
            "--prefix-len",
            f"must leave something of --input-len {options.input_len}, got {options.prefix_len}",
        )
    prefixes = [text.piece(options.prefix_len) for _ in range(options.num_prefixes)]
    sizes = [
        (length(own, options, rng), length(options.output_len or 128, options, rng))
        for _ in range(options.num_prompts)
    ]
    return [
        text.request(num_tokens, max_tokens, prefixes[i % len(prefixes)])
        for i, (num_tokens, max_tokens) in enumerate(sizes)
    ]


def _from_file(
    options: WorkloadOptions, text: TextSource, rng: random.Random
) -> list[WorkloadRequest]:
    """Returns a random selection of the file's conversations, repeated if there are too few."""
    pairs = list(_read_pairs(Path(options.dataset_path or "")))
    if not pairs:
        raise InvalidParameterError("--dataset-path", f"{options.dataset_path} holds no prompt")
    rng.shuffle(pairs)
    requests = []
    for i in range(options.num_prompts):
        prompt, answer = pairs[i % len(pairs)]
        answer_len = options.output_len or (
            text.count(answer) or len(answer.split()) if answer else 128
        )
        requests.append(text.of(prompt, max(1, answer_len)))
    return requests


def _read_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (prompt, answer or "") for each entry of ShareGPT's JSON array, or of JSON lines with
    "prompt" or "conversations" or "messages".
    """
    try:
        raw = path.read_text(encoding="utf-8-sig")
        records = (
            json.loads(raw)
            if raw.lstrip()[:1] == "["
            else [json.loads(line) for line in raw.splitlines() if line.strip()]
        )
    except OSError as error:
        problem = f"cannot read {path}: {error.strerror}"
        raise InvalidParameterError("--dataset-path", problem) from None
    except (ValueError, RecursionError) as error:
        problem = f"{path} is neither JSON nor JSON lines: {error}"
        raise InvalidParameterError("--dataset-path", problem) from None
    yield from filter(None, map(_pair, records))


def _pair(record: Any) -> tuple[str, str] | None:
    """Returns None for an entry without a text prompt: ShareGPT has conversations of one turn, and
    conversations that the assistant starts.
    """
    if isinstance(record, str):
        return (record, "") if record else None
    if not isinstance(record, dict):
        return None
    turns = record.get("conversations") or record.get("messages")
    if isinstance(turns, list):
        said = [
            turn.get("value", turn.get("content"))
            for turn in turns
            if isinstance(turn, dict) and turn.get("role", turn.get("from")) != "system"
        ]
    else:
        said = [record.get("prompt"), record.get("completion", record.get("output", ""))]
    said = [text if isinstance(text, str) else "" for text in said[:2]]
    return (said[0], said[1] if len(said) > 1 else "") if said and said[0] else None
