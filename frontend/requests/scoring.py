"""Scores of pairs of texts, in the three ways that models have.

Must not know: how texts are computed, HTTP.

    kind               the model's first task   a score
    cross-encoder      classify                 the one class of the pair, read together
    bi-encoder         embed                    the cosine of both embeddings
    late interaction   token_embed              MaxSim: for each token of the first text the
                                                greatest product with one of the second, summed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...ipc.errors import InvalidParameterError
from ...ipc.models.pooling import Pooling
from ..pooling_outputs import PoolingRequestOutput, ScoringRequestOutput, converted
from .prompts import Prompt

if TYPE_CHECKING:
    import numpy as np

SCORING_TASKS = ("classify", "embed", "token_embed")


def scoring_task(pooling: Pooling) -> str:
    """The task with which the model scores pairs. Raises InvalidParameterError if it cannot."""
    task = next((task for task in pooling.tasks if task in SCORING_TASKS), None)
    if task is None:
        raise InvalidParameterError("task", "the model cannot score pairs of texts")
    if task == "classify" and pooling.num_labels != 1:
        raise InvalidParameterError(
            "task",
            f"the model classifies with {pooling.num_labels} classes; a pair is scored by a model "
            "with one",
        )
    return task


def pair_up(
    first: Sequence[str], second: Sequence[str], names: tuple[str, str]
) -> list[tuple[int, int]]:
    """The indices of each pair: one text with each of several, or two lists text by text.

    names: of the parameters, for errors.
    """
    for name, texts in zip(names, (first, second)):
        if not texts or not all(isinstance(text, str) for text in texts):
            raise InvalidParameterError(name, "must be a text or a list of texts, not empty")
    if len(first) == 1:
        return [(0, i) for i in range(len(second))]
    if len(first) != len(second):
        raise InvalidParameterError(
            names[0],
            f"must be one text, or as many as {names[1]}, which has {len(second)}; got "
            f"{len(first)}",
        )
    return [(i, i) for i in range(len(second))]


def score_prompts(
    task: str, first: Sequence[str], second: Sequence[str], pairs: Sequence[tuple[int, int]]
) -> list[Prompt]:
    """Returns what is computed for the pairs: each pair, or each text of `first`, then of
    `second`.
    """
    if task == "classify":
        return [{"prompt": first[i], "text_pair": second[j]} for i, j in pairs]
    return [*first, *second]


def similarity(first: np.ndarray, second: np.ndarray, pooling: Pooling) -> np.ndarray:
    """f4 [1]: the score of two results of a text, f4 [size] of embed, [num_tokens, size] of
    token_embed.
    """
    import numpy as np

    if first.ndim == 2:
        score = (first @ second.T).max(axis=1).sum(dtype=np.float64)
    else:
        left, right = first.astype(np.float64), second.astype(np.float64)
        score = left @ right
        if pooling.similarity != "dot":
            score /= max(float(np.linalg.norm(left) * np.linalg.norm(right)), 1e-12)
    return np.array([score], np.float32)


def scores_of(
    task: str,
    outputs: Sequence[PoolingRequestOutput],
    num_first: int,
    pairs: Sequence[tuple[int, int]],
    pooling: Pooling,
) -> list[ScoringRequestOutput]:
    """The scores of the pairs, from the outputs for score_prompts. A score of two texts has the
    tokens of both, and the failure of either.
    """
    if task == "classify":
        return [converted(o, "score", o.result and o.result.data) for o in outputs]
    found = []
    for i, j in pairs:
        left, right = outputs[i], outputs[num_first + j]
        failed = next((o for o in (left, right) if o.result is None), None)
        if failed is not None:
            found.append(converted(failed, "score", None))
            continue
        score = similarity(left.outputs.data, right.outputs.data, pooling)
        both = replace(right, prompt_token_ids=left.prompt_token_ids + right.prompt_token_ids)
        found.append(converted(both, "score", score))
    return found
