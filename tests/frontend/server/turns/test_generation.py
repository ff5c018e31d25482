"""Parallel runs: their outputs, the order of indices, and how the first failure ends all
of them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import httpx2 as httpx
import pytest
from quire import LLM, SamplingParams
from quire.frontend.clients.client import QUARANTINED
from quire.frontend.outputs import RequestOutput
from quire.frontend.server.http.errors import ApiError
from quire.frontend.server.turns.generation import failure, merged
from quire.tests.frontend.server.conftest import running_server, slow_engine


class Runs:
    """Runs that yield their numbers one by one; `failing` fails at its second."""

    def __init__(self, num_runs: int, failing: int | None = None):
        self.failing = failing
        self.closed: list[int] = []
        self.runs = [self.run(i) for i in range(num_runs)]

    async def run(self, i: int) -> AsyncIterator[RequestOutput]:
        try:
            for step in range(3):
                await asyncio.sleep(0.001 * i)
                if i == self.failing and step == 1:
                    raise ApiError(400, "no")
                yield RequestOutput(f"{i}-{step}", None, [], [], step == 2)
        finally:
            self.closed.append(i)


async def all_of(runs: Runs) -> list[tuple[int, str]]:
    async with aclosing(merged(runs.runs)) as outputs:
        return [(i, output.request_id) async for i, output in outputs]


@pytest.mark.parametrize("num_runs", [1, 5])
def test_all_runs_are_read_to_their_end(num_runs: int) -> None:
    runs = Runs(num_runs)
    found = asyncio.run(all_of(runs))
    assert sorted(found) == [(i, f"{i}-{step}") for i in range(num_runs) for step in range(3)]
    assert sorted(runs.closed) == list(range(num_runs))


@pytest.mark.parametrize("num_runs", [1, 5])
def test_the_first_failure_ends_them_all(num_runs: int) -> None:
    runs = Runs(num_runs, failing=0)
    with pytest.raises(ApiError, match="no"):
        asyncio.run(all_of(runs))
    assert 0 in runs.closed


def test_merged_yields_all_outputs_in_the_order_of_each_run() -> None:
    async def run() -> dict[int, list[str]]:
        seen: dict[int, list[str]] = {}
        async with aclosing(merged(Runs(4).runs)) as outputs:
            async for i, output in outputs:
                seen.setdefault(i, []).append(output.request_id)
        return seen

    assert asyncio.run(run()) == {i: [f"{i}-0", f"{i}-1", f"{i}-2"] for i in range(4)}


def test_leaving_early_closes_them() -> None:
    async def run() -> Runs:
        runs = Runs(3)
        async with aclosing(merged(runs.runs)) as outputs:
            async for _ in outputs:
                break
        return runs

    assert 0 in asyncio.run(run()).closed


def test_a_refusal_of_the_engine_is_a_client_error_and_a_failure_a_server_error() -> None:
    refused = RequestOutput(
        "r",
        None,
        [],
        [],
        True,
        error="structured_outputs: too deep",
        error_parameter="structured_outputs",
    )
    error = failure(refused, {"structured_outputs": "response_format"})
    assert (error.status, error.param) == (
        400,
        "response_format",
    ) and error.message == "response_format: too deep"
    ours = failure(RequestOutput("r", None, [], [], True, error="logits are not finite"), {})
    assert ours.status == 500 and "logits" not in ours.message
    crash = failure(RequestOutput("r", None, [], [], True, error=QUARANTINED), {})
    assert (crash.status, crash.code) == (500, "engine_crash") and "died" in crash.message


def test_a_request_ends_at_its_timeout() -> None:
    """From Python and over HTTP, with the tokens that it has."""
    with slow_engine(0.02, max_num_seqs=1) as (address, _):
        with LLM(engine=address) as llm:
            params = SamplingParams(max_tokens=5000, timeout_s=1.0, temperature=0.0)
            [output] = llm.generate([1, 2, 3], params, use_tqdm=False)
            completion = output.outputs[0]
            assert completion.finish_reason == "timeout" and 0 < len(completion.token_ids) < 5000
        with running_server("--engine", address, "--max-concurrent-requests", "1") as client:
            body = {"prompt": [1, 2, 3], "max_tokens": 5000}

            def post(timeout_s: str) -> httpx.Response:
                headers = {"x-timeout-s": timeout_s}
                return client.post("/v1/completions", json=body, headers=headers)

            answer = post("1.0").json()
            assert answer["choices"][0]["finish_reason"] == "timeout"
            assert 0 < answer["usage"]["completion_tokens"] < 5000
            for wrong in ("soon", "0", "-1", "nan", "inf"):
                refused = post(wrong)
                assert refused.status_code == 400
                assert refused.json()["error"]["param"] == "x-timeout-s"
