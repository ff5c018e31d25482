"""Usage: counted the same from deltas and from a final output."""

from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.server.usage import Usage


def output(token_ids: list[int], index: int = 0, cached: int | None = None) -> RequestOutput:
    return RequestOutput(
        "r",
        None,
        [1, 2, 3],
        [CompletionOutput(index, "", token_ids)],
        False,
        num_cached_tokens=cached,
    )


def test_deltas_and_a_final_output_count_the_same() -> None:
    deltas, whole = Usage(), Usage()
    for token_ids in ([5], [6, 7], [8]):
        deltas.add(0, output(token_ids, cached=2))
    whole.add(0, output([5, 6, 7, 8], cached=2))
    assert deltas.as_openai() == whole.as_openai()
    assert whole.as_openai()["total_tokens"] == 7 and whole.as_openai()[
        "prompt_tokens_details"
    ] == {"cached_tokens": 2}


def test_each_prompt_counts_once_whatever_n() -> None:
    usage = Usage()
    for prompt_index in (0, 1):
        for index in (0, 1):
            usage.add(prompt_index, output([5], index))
    assert usage.prompt_tokens == 6 and usage.completion_tokens == 4
