"""RequestOutput: fields under vLLM's names, and merging for slow readers."""

from __future__ import annotations

import copy
import dataclasses
import json

from quire import BeamSearchOutput, BeamSearchSequence
from quire.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def output(
    text: str,
    token_ids: list[int],
    *,
    finish: str | None = None,
    delta: bool,
    logprobs: bool = False,
) -> RequestOutput:
    positions = [{i: Logprob(-0.5, 1, "x")} for i in token_ids] if logprobs else None
    completion = CompletionOutput(
        0, text, token_ids, -float(len(text)) if logprobs else None, positions, finish
    )
    return RequestOutput(
        "r",
        "p",
        [1],
        [completion],
        finish is not None,
        num_cached_tokens=len(text),
        kind_is_delta=delta,
    )


def test_fields_have_vllms_names() -> None:
    names = [field.name for field in dataclasses.fields(RequestOutput)]
    expected = (
        "request_id prompt prompt_token_ids prompt_logprobs outputs finished metrics "
        "num_cached_tokens"
    )
    assert set(expected.split()) <= set(names)
    names = [field.name for field in dataclasses.fields(CompletionOutput)]
    assert names == [
        "index",
        "text",
        "token_ids",
        "cumulative_logprob",
        "logprobs",
        "finish_reason",
        "stop_reason",
    ]
    assert [field.name for field in dataclasses.fields(Logprob)] == [
        "logprob",
        "rank",
        "decoded_token",
    ]
    assert not output("a", [1], delta=True).outputs[0].finished()
    assert output("a", [1], finish="stop", delta=True).outputs[0].finished()


def test_an_output_as_a_dict_is_plain() -> None:
    whole = output("ab", [5, 6], finish="stop", delta=False, logprobs=True)
    whole.metrics = RequestMetrics(1.5)
    plain = whole.to_dict()
    assert list(plain) == [f.name for f in dataclasses.fields(whole) if f.name != "kind_is_delta"]
    logprob = {"logprob": -0.5, "rank": 1, "decoded_token": "x"}
    assert (
        plain["outputs"]
        == [whole.outputs[0].to_dict()]
        == [
            {
                "index": 0,
                "text": "ab",
                "token_ids": [5, 6],
                "cumulative_logprob": -2.0,
                "logprobs": [{5: logprob}, {6: logprob}],
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ]
    )
    assert plain["metrics"]["arrival_time"] == 1.5
    assert json.loads(json.dumps(plain))["outputs"][0]["logprobs"][0] == {"5": logprob}
    sequence = BeamSearchSequence([1, 2], [], -1.0, -0.5, "a")
    beams = BeamSearchOutput([sequence])
    assert beams.to_dict()["sequences"] == [sequence.to_dict()]
    assert sequence.to_dict()["tokens"] == [1, 2]


def test_merged_deltas_contain_all_unread_output() -> None:
    unread = output("ab", [1, 2], delta=True, logprobs=True)
    unread.merge(output("", [3], delta=True, logprobs=True))
    unread.merge(output("cd", [4], finish="length", delta=True, logprobs=True))
    expected = output("abcd", [1, 2, 3, 4], finish="length", delta=True, logprobs=True)
    expected.outputs[0].cumulative_logprob = -2.0  # of the newest output
    expected.num_cached_tokens = 2
    assert unread == expected


def test_merged_deltas_of_several_completions_are_matched_by_index() -> None:
    def delta(*indices: int, **fields) -> RequestOutput:
        completions = [
            CompletionOutput(i, f"{i}", [i], finish_reason=fields.get("finish")) for i in indices
        ]
        return RequestOutput(
            "r",
            "p",
            [1],
            completions,
            False,
            kind_is_delta=True,
            prompt_logprobs=fields.get("prompt_logprobs"),
        )

    unread = delta(2, prompt_logprobs=[None])
    unread.merge(delta(0, 2))
    unread.merge(delta(1, 2, finish="stop"))
    assert [(c.index, c.text, c.token_ids, c.finish_reason) for c in unread.outputs] == [
        (0, "0", [0], None),
        (1, "1", [1], "stop"),
        (2, "222", [2, 2, 2], "stop"),
    ]
    assert unread.prompt_logprobs == [None]


def test_merged_cumulative_outputs_are_the_newest() -> None:
    newest = output("abcd", [1, 2, 3], finish="stop", delta=False)
    newest.error = "why"
    unread = output("ab", [1], delta=False)
    unread.merge(copy.deepcopy(newest))
    assert unread == newest


def test_time_to_first_token() -> None:
    assert RequestMetrics(10.0).time_to_first_token is None
    assert RequestMetrics(10.0, first_token_time=10.5).time_to_first_token == 0.5
