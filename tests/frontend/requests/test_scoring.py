"""Pairs and their scores."""

from __future__ import annotations

import numpy as np
import pytest
from quire import InvalidParameterError, PoolingRequestOutput
from quire.frontend.pooling_outputs import PoolingOutput
from quire.frontend.requests.scoring import (
    pair_up,
    score_prompts,
    scores_of,
    scoring_task,
    similarity,
)
from quire.ipc.models.pooling import Pooling

NAMES = ("text_1", "text_2")


def test_the_models_first_task_decides() -> None:
    assert scoring_task(Pooling()) == "embed"
    assert scoring_task(Pooling(tasks=("token_embed",))) == "token_embed"
    assert scoring_task(Pooling(tasks=("classify", "embed"), num_labels=1)) == "classify"
    with pytest.raises(InvalidParameterError, match="3 classes"):
        scoring_task(Pooling(tasks=("classify",), num_labels=3))
    with pytest.raises(InvalidParameterError, match="cannot score"):
        scoring_task(Pooling(tasks=("token_classify",)))


def test_pairs() -> None:
    assert pair_up(["q"], ["a", "b"], NAMES) == [(0, 0), (0, 1)]
    assert pair_up(["q", "r"], ["a", "b"], NAMES) == [(0, 0), (1, 1)]
    for first, second, name in (
        (["q", "r"], ["a"], "text_1"),
        ([], ["a"], "text_1"),
        (["q"], [], "text_2"),
        (["q"], [5], "text_2"),
    ):
        with pytest.raises(InvalidParameterError) as raised:
            pair_up(first, second, NAMES)
        assert raised.value.parameter == name
    pairs = [(0, 0), (0, 1)]
    assert score_prompts("embed", ["q"], ["a", "b"], pairs) == ["q", "a", "b"]
    assert score_prompts("classify", ["q"], ["a", "b"], pairs)[1] == {
        "prompt": "q",
        "text_pair": "b",
    }


def test_similarities() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 16)).astype(np.float32)
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert abs(similarity(a, b, Pooling())[0] - cosine) < 1e-6
    assert abs(similarity(a, b, Pooling(similarity="dot"))[0] - a @ b) < 1e-5
    left, right = rng.standard_normal((3, 8)), rng.standard_normal((5, 8))
    late = sum(max(float(x @ y) for y in right) for x in left)
    found = similarity(left.astype(np.float32), right.astype(np.float32), Pooling())
    assert abs(found[0] - late) < 1e-4
    zero = np.zeros(16, np.float32)
    assert similarity(zero, a, Pooling())[0] == 0.0


def test_a_failed_text_fails_its_pairs_only() -> None:
    def output(index: int, failed: bool = False) -> PoolingRequestOutput:
        result = None if failed else PoolingOutput(np.array([1.0, index], np.float32))
        error = "broken" if failed else None
        return PoolingRequestOutput(str(index), None, [index], result, error=error)

    outputs = [output(0), output(1), output(2, failed=True)]
    good, bad = scores_of("embed", outputs, 1, [(0, 0), (0, 1)], Pooling())
    assert abs(good.outputs.score - 2**-0.5) < 1e-6 and good.prompt_token_ids == [0, 1]
    with pytest.raises(Exception, match="broken"):
        bad.outputs
