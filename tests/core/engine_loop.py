"""An engine core over the fake executor, and a loop that steps it and records what each client
receives.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace
from quire.core.engine_core import EngineCore, Host
from quire.ipc.messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from quire.ipc.models.vision_config import VisionConfig
from quire.ipc.params import SamplingParams
from quire.tests.fakes import FakeExecutor, make_config


def make_core(
    burst_weights_bytes: int = 0,
    windows: tuple[int, ...] = (0,),
    num_state_checkpoints: int | None = None,
    host: Host = Host(),
    check_every_step: bool = True,
    vision: VisionConfig | None = None,
    **arguments,
) -> EngineCore:
    """`burst_weights_bytes`, `windows` (of the groups of layers) and `num_state_checkpoints` are
    the fake executor's. vision: of a model that reads images.
    """
    config = make_config(**arguments)
    model_config = replace(config.model_config, vision=vision)
    config = replace(config, model_config=model_config)
    executor = FakeExecutor(config)
    executor.burst_weights_bytes = burst_weights_bytes
    executor.kv_cache_windows = windows
    executor.num_state_checkpoints = num_state_checkpoints
    core = EngineCore(config, executor, host=host, check_every_step=check_every_step)
    core.scheduler.limits.least_samples = (
        1  # few requests are in several steps, where there are stages
    )
    return core


def step(core: EngineCore) -> dict[int, EngineCoreOutputs]:
    outputs, model_executed = core.step_fn()
    core.post_step(model_executed)
    return outputs or {}


@dataclass
class Answer:
    """The rows that a client received for one request."""

    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    num_cached_tokens: int | None = None


def collect(outputs: EngineCoreOutputs, answers: dict[str, Answer]) -> None:
    """Add one message to the answers. A gap, a duplicate or a row after the end is an error."""
    cursor = 0
    for request_id, first_index, num_tokens in zip(
        outputs.request_ids, outputs.first_indices, outputs.num_tokens, strict=True
    ):
        answer = answers.setdefault(request_id, Answer())
        assert answer.reason is None, f"{request_id}: a row after its end"
        assert first_index == len(answer.tokens), f"{request_id}: a gap or a duplicate"
        answer.tokens += outputs.token_ids[cursor : cursor + num_tokens]
        cursor += num_tokens
    assert cursor == len(outputs.token_ids)
    for row, num_cached_tokens in outputs.num_cached_tokens:
        assert answers[outputs.request_ids[row]].num_cached_tokens is None
        answers[outputs.request_ids[row]].num_cached_tokens = num_cached_tokens
    for finished in outputs.finished:
        answer = answers[outputs.request_ids[finished.row]]
        answer.reason, answer.stop_reason, answer.error = (
            finished.reason,
            finished.stop_reason,
            finished.error,
        )


def run(
    core: EngineCore, answers: dict[int, dict[str, Answer]] | None = None
) -> dict[int, dict[str, Answer]]:
    """Step until there is no work. Return the answers by client, added to those given."""
    answers = {} if answers is None else answers
    for _ in range(5000):
        if not core.has_work():
            return answers
        for client_index, outputs in step(core).items():
            collect(outputs, answers.setdefault(client_index, {}))
    raise AssertionError(f"not finished: {core.observer.scheduler_state()}")


def assert_nothing_left(core: EngineCore) -> None:
    core.check_integrity()
    state = core.observer.scheduler_state()
    assert not core.has_work() and core.scheduler.requests == {}
    assert state["running"] == state["waiting"] == state["swapped"] == []
    assert state["num_free_slots"] == core.config.scheduler_config.max_num_seqs
    assert state["num_free_blocks"] == core.ready.num_blocks - 1


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": 5, **fields})


def make_request(
    request_id="r", prompt=None, params: SamplingParams | None = None, **fields
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id, [1, 2, 3] if prompt is None else prompt, params or greedy(), **fields
    )
