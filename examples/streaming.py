"""Prints tokens as they come, without asyncio: LLMEngine, one step at a time."""

from quire import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams


def main() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs())
    try:
        # DELTA: each output has only the new text
        params = SamplingParams(temperature=0, max_tokens=48, output_kind=RequestOutputKind.DELTA)
        engine.add_request("story", "Once upon a time", params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                print(output.outputs[0].text, end="", flush=True)
        print()
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
