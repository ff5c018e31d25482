"""Runs concurrent requests from one event loop, and ends one of them early."""

import asyncio

from quire import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams

PROMPTS = ["Once upon a time", "One day, a little fox", "In a village near the sea"]


async def complete(engine: AsyncLLM, request_id: str, prompt: str) -> str:
    params = SamplingParams(temperature=0, max_tokens=24, output_kind=RequestOutputKind.FINAL_ONLY)
    text = ""
    async for output in engine.generate(prompt, params, request_id=request_id):
        text = output.outputs[0].text
    return text


async def first_words(engine: AsyncLLM, prompt: str, num_characters: int) -> str:
    """Leaving the iterator aborts the request."""
    params = SamplingParams(temperature=0, max_tokens=500, output_kind=RequestOutputKind.DELTA)
    text = ""
    async for output in engine.generate(prompt, params, request_id="first-words"):
        text += output.outputs[0].text
        if len(text) >= num_characters:
            break
    return text[:num_characters]


async def main() -> None:
    engine = await AsyncLLM.start(EngineArgs(max_num_seqs=8))
    try:
        jobs = [complete(engine, f"request-{i}", prompt) for i, prompt in enumerate(PROMPTS)]
        *texts, beginning = await asyncio.gather(*jobs, first_words(engine, "The sun", 30))
        for prompt, text in zip(PROMPTS, texts, strict=True):
            print(prompt + text)
        print(f"aborted after: {beginning!r}")
        await engine.wait_until_idle(timeout_s=10)
    finally:
        await engine.shutdown_async()


if __name__ == "__main__":
    asyncio.run(main())
