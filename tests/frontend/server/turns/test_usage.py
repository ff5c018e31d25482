"""Usage: what counts once per prompt, and what is not known yet."""

from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.server.turns.answer_run import TokenUsage


def output(token_ids: list[int], index: int = 0, cached: int | None = None) -> RequestOutput:
    return RequestOutput(
        "r",
        None,
        [1, 2, 3],
        [CompletionOutput(index, "", token_ids)],
        False,
        num_cached_tokens=cached,
    )


def test_a_prompt_counts_once_however_often_it_is_added() -> None:
    usage = TokenUsage()
    for prompt_index in (0, 0, 1):
        usage.add_prompt(prompt_index, output([5], cached=2))
    usage.completion_tokens += 4
    counts = usage.counts()
    assert (counts.prompt_tokens, counts.completion_tokens, counts.total_tokens) == (6, 4, 10)
    assert counts.prompt_tokens_details.cached_tokens == 4


def test_cached_tokens_that_are_not_known_yet_do_not_count() -> None:
    usage = TokenUsage()
    usage.add_prompt(0, output([5]))
    assert (usage.prompt_tokens, usage.cached_tokens, usage.num_cached_tokens) == (3, 0, {})
