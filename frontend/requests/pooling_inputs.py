"""PoolingInputs: completes the parameters of requests that pool, and tokenizes their prompts, many
at once.

Must not know: the engine, outputs, what becomes of a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from ...ipc.checks import require
from ...ipc.config import ModelConfig, resolved
from ...ipc.errors import InvalidParameterError
from ...ipc.models.pooling import Pooling
from ...ipc.params import PoolingParams
from ..text.text_encoding import Text, cut_ids, encode_texts
from ..text.tokenizer import Tokenizer
from .prompts import PromptParts

EMBED_TASKS = ("embed", "token_embed")


class PoolingPrompt(NamedTuple):
    text: str | None
    token_ids: list[int]
    cache_salt: str | None
    params: dict[str, int] = {}  # parameters of this prompt alone


class PoolingInputs:
    def __init__(self, model_config: ModelConfig, tokenizer: Tokenizer | None):
        self._model_config = model_config
        self._tokenizer = tokenizer
        self._max_model_len = resolved(model_config.max_model_len)

    @property
    def pooling(self) -> Pooling:
        """Raises InvalidParameterError for a model that does not pool."""
        pooling = self._model_config.pooling
        if pooling is None:
            raise InvalidParameterError(
                "params", "must be SamplingParams: the model generates text and cannot pool"
            )
        return pooling

    def complete(self, params: PoolingParams) -> PoolingParams:
        """Checks what depends on the model, and sets the task and what follows from it."""
        pooling = self.pooling
        task = params.task or pooling.tasks[0]
        require(
            task in pooling.tasks,
            "task",
            f"must be one of {', '.join(pooling.tasks)} for this model, got {task}",
        )
        if params.dimensions is not None:
            self._check_dimensions(pooling, task, params.dimensions)
        if params.truncate_prompt_tokens is not None:
            require(
                params.truncate_prompt_tokens <= self._max_model_len,
                "truncate_prompt_tokens",
                f"must be -1 or at most {self._max_model_len}, the longest prompt, got "
                f"{params.truncate_prompt_tokens}",
            )
        for name, instead in (
            ("second_text_start", "give a pair of texts"),
            ("instruction_length", "give prompt_name"),
        ):
            require(not getattr(params, name), name, f"must not be set in a request; {instead}")
        changes: dict[str, Any] = {"task": task}
        if pooling.reads_all_tokens or task.startswith("token_"):
            changes["skip_reading_prefix_cache"] = True
        return msgspec.structs.replace(params, **changes)

    def _check_dimensions(self, pooling: Pooling, task: str, dimensions: int) -> None:
        require(
            task in EMBED_TASKS,
            "dimensions",
            f"is the length of embeddings; it must not be given with the task {task}",
        )
        lengths, size = pooling.matryoshka_dimensions, pooling.embedding_size
        require(
            bool(lengths) or pooling.is_matryoshka,
            "dimensions",
            "must not be given: the model was not trained for embeddings of several lengths "
            "(Matryoshka)",
        )
        if lengths:
            is_valid, words = dimensions in lengths, f"one of {', '.join(map(str, lengths))}"
        else:
            is_valid = not size or dimensions <= size
            words = f"at most {size}, the length of an embedding"
        require(is_valid, "dimensions", f"must be {words}, got {dimensions}")

    def tokenize(
        self, prompts: Sequence[PromptParts], params: PoolingParams, prompt_name: str | None
    ) -> list[PoolingPrompt]:
        """The tokens of each prompt, cut as `params` and the model say; the length of those that
        are not cut is not checked (see longest). Texts are tokenized together.
        """
        pooling = self.pooling
        limit = None if params.must_fit else self._limit(params)
        prefix = self._prefix(prompt_name)
        texts = [
            _text(parts, prefix, pooling.do_lower_case)
            for parts in prompts
            if parts.token_ids is None
        ]
        if texts and self._tokenizer is None:
            raise InvalidParameterError(
                "prompt", "must be token ids: this engine runs with skip_tokenizer_init=True"
            )
        instruction = self._instruction(prefix) if texts else {}
        encoded = iter(
            encode_texts(self._tokenizer, texts, limit) if self._tokenizer is not None else ()
        )
        found = []
        for parts in prompts:
            if parts.token_ids is None:
                token_ids, start = next(encoded)
                own = {} if parts.text_pair is not None else instruction
                if start and pooling.has_token_types:
                    own = {"second_text_start": start}
                found.append(PoolingPrompt(parts.text, token_ids, parts.cache_salt, own))
                continue
            token_ids = parts.token_ids
            if limit is not None and isinstance(token_ids, list):
                special = frozenset() if self._tokenizer is None else self._tokenizer.special_ids
                token_ids = cut_ids(token_ids, special, limit)
            found.append(PoolingPrompt(parts.text, token_ids, parts.cache_salt))
        return found

    def longest(self, params: PoolingParams) -> int:
        """The number of tokens above which a prompt is refused."""
        limit = self._limit(params) if params.must_fit else None
        return self._max_model_len if limit is None else limit

    def _limit(self, params: PoolingParams) -> int | None:
        """The number of tokens at which prompts are cut; None: they are refused above
        max_model_len.
        """
        own = self.pooling.max_seq_length
        asked = params.truncate_prompt_tokens
        if asked is None:
            return None if own is None else min(own, self._max_model_len)
        return min(own or self._max_model_len, self._max_model_len) if asked == -1 else asked

    def _instruction(self, prefix: str) -> dict[str, int]:
        """The tokens in front of each text that pooling leaves out, as sentence-transformers counts
        them: those of the instruction alone, without a special one at the end.
        """
        tokenizer = self._tokenizer
        if not prefix or self.pooling.include_prompt or tokenizer is None:
            return {}
        token_ids = tokenizer.encode(prefix.lower() if self.pooling.do_lower_case else prefix)
        return {"instruction_length": len(token_ids) - (token_ids[-1] in tokenizer.special_ids)}

    def _prefix(self, prompt_name: str | None) -> str:
        """The text in front of each text."""
        pooling = self.pooling
        name = pooling.default_prompt_name if prompt_name is None else prompt_name
        if name is None:
            return ""
        if name not in pooling.prompts:
            known = ", ".join(map(repr, pooling.prompts)) or "none"
            raise InvalidParameterError(
                "prompt_name",
                f"must be the name of one of the model's prompts ({known}), got {name!r}",
            )
        return pooling.prompts[name]


def _text(parts: PromptParts, prefix: str, is_lower: bool) -> Text:
    text = parts.text or ""
    if parts.text_pair is not None:
        pair = (text, parts.text_pair)
        return (pair[0].lower(), pair[1].lower()) if is_lower else pair
    text = prefix + text
    return text.lower() if is_lower else text


def with_task(params: list[PoolingParams], task: str | None) -> list[PoolingParams]:
    """The parameters with the task; the same object where they were."""
    if task is None:
        return params
    made: dict[int, PoolingParams] = {}
    for one in params:
        if not isinstance(one, PoolingParams):
            raise InvalidParameterError(
                "pooling_params", f"must be PoolingParams, got {type(one).__name__}"
            )
        if one.task not in (None, task):
            raise InvalidParameterError(
                "pooling_params", f"have the task {one.task}, which differs from {task}"
            )
        if id(one) not in made:
            made[id(one)] = msgspec.structs.replace(one, task=task)
    return [made[id(one)] for one in params]
