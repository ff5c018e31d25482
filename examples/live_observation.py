"""Prints what the engine does while it works: its steps, its requests, its KV cache.

A server shows the same at `/`, at `/v1/engine/state` and in `quire top`.
"""

import asyncio
import contextlib

from quire import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams

PROMPTS = ["Once upon a time", "One day, a little fox", "In a village", "The sun"]


async def complete(engine: AsyncLLM, request_id: str, prompt: str) -> int:
    params = SamplingParams(
        temperature=0.8, max_tokens=800, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    async for output in engine.generate(prompt, params, request_id=request_id):
        num_tokens = len(output.outputs[0].token_ids)
    return num_tokens


async def watch(engine: AsyncLLM) -> None:
    """Each look asks only for the steps since the last one."""
    last_step = -1
    while True:
        seen = await engine.observe(since_step=last_step)
        last_step = seen["step"]
        if seen["steps"]:
            schedule_s, execute_s, process_s = (
                sum(step[part] for step in seen["steps"]) for part in (2, 3, 4)
            )
            running = [r for r in seen["requests"] if r["state"] == "running"]
            num_blocks = sum(request["num_blocks"] for request in running)
            print(
                f"step {last_step}: {len(running)} requests hold {num_blocks} of "
                f"{seen['num_blocks']} blocks; schedule {schedule_s * 1e3:.1f} ms, "
                f"execute {execute_s * 1e3:.1f} ms, process {process_s * 1e3:.1f} ms"
            )
        await asyncio.sleep(0.05)


async def main() -> None:
    engine = await AsyncLLM.start(EngineArgs())
    try:
        watcher = asyncio.create_task(watch(engine))
        jobs = [complete(engine, f"request-{i}", prompt) for i, prompt in enumerate(PROMPTS)]
        num_tokens = sum(await asyncio.gather(*jobs))
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
        metrics = await engine.get_metrics()
        print(f"{num_tokens} tokens; {metrics['num_finished_length']} requests finished")
    finally:
        await engine.shutdown_async()


if __name__ == "__main__":
    asyncio.run(main())
