"""A scheduler and a fake executor, stepped by hand."""

from quire.core.output_rows import OutputRows
from quire.core.scheduling.scheduler import Scheduler
from quire.ipc.messages import (
    EngineCoreRequest,
    FinishReason,
)
from quire.ipc.params import SamplingParams
from quire.tests.fakes import FakeExecutor, make_config


class Loop:
    """Steps a scheduler and a fake executor by hand.

    Collects each request's tokens and finish, and checks both after every step.
    """

    def __init__(
        self,
        windows: tuple[int, ...] = (0,),
        num_state_checkpoints: int | None = None,
        **arguments,
    ):
        self.config = make_config(**{"preemption_mode": "recompute", **arguments})
        self.executor = FakeExecutor(self.config)
        self.executor.kv_cache_windows = windows
        self.executor.num_state_checkpoints = num_state_checkpoints
        num_blocks = self.executor.determine_num_blocks()
        self.executor.initialize_kv_cache(num_blocks)
        self.scheduler = Scheduler(
            self.config,
            num_blocks,
            *self.executor.initialize_swap_space(),
            kv_cache_windows=windows,
            num_state_checkpoints=num_state_checkpoints,
        )
        self.rows = OutputRows()
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, tuple[FinishReason, int | None]] = {}
        self.cached: dict[str, int] = {}

    def add(
        self, request_id: str, prompt: list[int], max_tokens=8, priority=0, client_index=0, **fields
    ) -> None:
        names = set(EngineCoreRequest.__struct_fields__)
        params = {
            "temperature": 0.0,
            "seed": 0,
            "max_tokens": max_tokens,
            **{k: v for k, v in fields.items() if k not in names},
        }
        extra = {k: v for k, v in fields.items() if k in names}
        message = EngineCoreRequest(
            request_id, prompt, SamplingParams(**params), priority=priority, **extra
        )
        self.scheduler.add_request(message, client_index)

    def step(self) -> dict[str, int]:
        """Run one step and return the scheduled tokens, by request in order."""
        num_preemptions = self.scheduler.counters.num_preemptions
        step = self.scheduler.schedule()
        if step is None:
            return {}
        preempted = self.scheduler.counters.num_preemptions > num_preemptions
        # with several owners, a request may be preempted for that of another owner
        is_shared = len(self.scheduler.waiting.owners) > 1
        assert is_shared or not (preempted and step.output.new_requests), "preempted and admitted"
        self.scheduler.update_from_output(step, self.executor.execute_model(step.output), self.rows)
        self.scheduler.check_integrity()
        for outputs in (self.rows.take(None) or {}).values():
            self._collect(outputs)
        return dict(
            zip(
                [request.request_id for request in step.requests],
                step.output.num_scheduled_tokens,
                strict=True,
            )
        )

    def _collect(self, outputs) -> None:
        cursor = 0
        for request_id, first_index, num_tokens in zip(
            outputs.request_ids, outputs.first_indices, outputs.num_tokens, strict=True
        ):
            tokens = self.tokens.setdefault(request_id, [])
            assert first_index == len(tokens), f"{request_id}: a gap or a duplicate"
            tokens += outputs.token_ids[cursor : cursor + num_tokens]
            cursor += num_tokens
        assert cursor == len(outputs.token_ids)
        for finished in outputs.finished:
            self.ends[outputs.request_ids[finished.row]] = (finished.reason, finished.stop_reason)
        for row, num_cached_tokens in outputs.num_cached_tokens:
            assert outputs.request_ids[row] not in self.cached, "reported twice"
            self.cached[outputs.request_ids[row]] = num_cached_tokens

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                return
            assert self.step(), "requests are waiting and nothing was scheduled"
        raise AssertionError(f"not finished after {max_steps} steps: {self.scheduler.state()}")

    def state(self, name: str) -> list[str]:
        return self.scheduler.state()[name]


def distinct(i: int, num_tokens: int) -> list[int]:
    return [(i * 31 + j * 7 + j * j) % 97 for j in range(num_tokens)]
