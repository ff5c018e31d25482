"""Requests, calls and checks for tests of a paused engine."""

from concurrent.futures import Future

import pytest
from quire.ipc.messages import (
    EngineCoreRequest,
    FinishReason,
)
from quire.ipc.params import SamplingParams
from quire.tests.core.engine_loop import assert_nothing_left, collect, make_core, run, step
from quire.tests.fakes import expected_output


def make_request(request_id="r", max_tokens=8, prompt=(1, 2, 3), n=1) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id,
        list(prompt),
        SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, n=n),
    )


def long_request(i: int, **fields) -> EngineCoreRequest:
    return make_request(f"r{i}", prompt=[(i * 31 + j * 7) % 97 for j in range(40)], **fields)


def expected(core, request, weights: int = 0) -> list[int]:
    return expected_output(
        request.prompt_token_ids, request.sampling_params, [], core.config, weights
    )[0]


def call(core, method: str, *args, client_index: int = 0, received: dict | None = None):
    """Return the result of a utility that completes at once or with the next step.

    That step may only deliver rows to client 0.
    """
    result = core.call_utility(method, list(args), client_index)
    deliver(core, received)
    return result.result(0) if isinstance(result, Future) else result


def deliver(core, received: dict | None) -> None:
    """Deliver the rows of a step that was in flight; nothing else may come."""
    if received is not None and core.has_pending_outputs() and not core.pausing.can_step:
        for outputs in step(core).values():
            collect(outputs, received)


def started(num_requests: int = 3, num_steps: int = 3, **arguments):
    """Start a core: (core, requests, messages sent to client 0)."""
    core, received = make_core(**arguments), {}
    requests = [
        long_request(i, max_tokens=arguments.get("num_scheduler_steps", 1) * 8)
        for i in range(num_requests)
    ]
    for request in requests:
        core.add_request(request)
    for _ in range(num_steps):
        for outputs in step(core).values():
            collect(outputs, received)
    if arguments.get("pipeline_parallel_size", 1) > 1:
        assert core.has_step_in_flight
    return core, requests, received


FORMS = {
    "plain": {},
    "overlapped": {"async_scheduling": True},
    "multi-step": {"num_scheduler_steps": 4},
    "overlapped multi-step": {"async_scheduling": True, "num_scheduler_steps": 4},
    # Three requests of 48 tokens take 9 blocks of the 7 available. One request may need 97 tokens.
    "swapping": {"preemption_mode": "swap", "num_gpu_blocks_override": 8, "max_model_len": 97},
    "chunked": {"max_num_batched_tokens": 16},
    "stages": {"pipeline_parallel_size": 2},
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def assert_finished(core, requests, received) -> None:
    answers = run(core, {0: received})[0]
    for request in requests:
        assert (
            answers[request.request_id].tokens == expected(core, request)
            and answers[request.request_id].reason is FinishReason.LENGTH
        )
    assert_nothing_left(core)
