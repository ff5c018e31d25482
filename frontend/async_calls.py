"""AsyncCalls: the calls of AsyncLLM about the engine as a whole. BlockingCalls documents each.

Must not know: requests, how a call reaches the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..ipc.errors import QuireError
from ..ipc.lora import LoRARequest
from ..ipc.trace import MAX_STEPS
from .model_info.model_files import find_model_directory
from .requests.lora_requests import placed
from .session import SessionFace

if TYPE_CHECKING:
    from .trace.trace import Trace


class AsyncCalls(SessionFace, ABC):
    @abstractmethod
    async def call_utility(self, method: str, *args: Any) -> Any:
        """Calls one of EngineCore.UTILITIES by name."""

    @asynccontextmanager
    async def trace(self, steps: int = 4) -> AsyncIterator[Trace]:
        from .trace.stages import async_places
        from .trace.trace import Trace

        trace = Trace()
        await self.call_utility("start_trace", steps)
        self.session.received = trace.received
        try:
            yield trace
        except BaseException:
            self.session.received = None
            with suppress(QuireError):  # the exception of the body is the one to raise
                await self.call_utility("end_trace")
            raise
        self.session.received = None
        result = await self.call_utility("end_trace")
        trace.complete(result, async_places(self.session.client))

    async def get_metrics(self) -> dict[str, int]:
        return self.session.telemetry.metrics(await self.call_utility("get_metrics"))

    async def scheduler_state(self) -> dict[str, Any]:
        return await self.call_utility("scheduler_state")

    async def observe(self, since_step: int = -1, max_blocks: int = 4096) -> dict[str, Any]:
        observation = await self.call_utility("observe", since_step, max_blocks)
        return self.session.with_own_counters(observation)

    async def expert_load(self) -> dict[str, Any]:
        return await self.call_utility("expert_load")

    async def pause(self, mode: str = "abort") -> None:
        """If cancelled while "wait" is in progress, the engine stays paused."""
        await self.call_utility("pause", mode)

    async def pause_generation(
        self,
        *,
        mode: str = "abort",
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = True,
    ) -> None:
        """vLLM's name of `pause`. `wait_for_inflight_requests`: its former name of mode="wait".
        `clear_cache` clears the prefix cache, except with mode="keep".
        """
        await self.pause("wait" if wait_for_inflight_requests else mode)
        if clear_cache and mode != "keep":
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        await self.resume()

    async def do_log_stats(self) -> None:
        self.session.telemetry.log()

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        await self.call_utility("start_trace", MAX_STEPS)
        self.session.begin_profile(profile_prefix)

    async def stop_profile(self) -> Trace:
        from .trace.stages import async_places

        self.session.require_profile()
        result = await self.call_utility("end_trace")
        return self.session.end_profile(result, async_places(self.session.client))

    async def resume(self) -> None:
        await self.call_utility("resume")

    async def is_paused(self) -> bool:
        return await self.call_utility("is_paused")

    async def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        return await self.call_utility("reset_prefix_cache", reset_running)

    async def sleep(self, level: int = 1) -> None:
        await self.call_utility("sleep", level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self.call_utility("wake_up", tags)

    async def is_sleeping(self) -> bool:
        return await self.call_utility("is_sleeping")

    async def load_weights(self, path: str) -> None:
        await self.call_utility("load_weights", str(find_model_directory(path)))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        return await self.call_utility("add_lora", placed(lora_request))

    async def remove_lora(self, lora_int_id: int) -> bool:
        return await self.call_utility("remove_lora", lora_int_id)

    async def list_loras(self) -> set[int]:
        return set(await self.call_utility("list_loras"))

    async def pin_lora(self, lora_int_id: int) -> bool:
        return await self.call_utility("pin_lora", lora_int_id)

    async def collective_rpc(self, method: str, args: list[Any] | None = None) -> list[Any]:
        return await self.call_utility("collective_rpc", method, args or [])

    async def restart_engines(self, drain_timeout_s: float = 30.0) -> None:
        """Replaces the engine by a new process, or with data_parallel_size each in turn while the
        others take requests. No request fails.

        An engine gets no new requests, and has `drain_timeout_s` seconds for those that it has;
        then they continue elsewhere. A single engine's requests continue on its next process.
        Raises EngineUsageError if this is in progress, or if the engine is not a child process that
        is replaced when it dies (on_engine_death).
        """
        await self.session.client.restart_engines_async(drain_timeout_s)
