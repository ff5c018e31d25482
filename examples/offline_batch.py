"""Completes many prompts in one batch and prints how long each waited and ran."""

from quire import LLM, SamplingParams

PROMPTS = [
    "Once upon a time",
    "One day, a little fox",
    "In a village near the sea",
    "12 + 30 =",
    "The sun",
]


def main() -> None:
    params = SamplingParams(temperature=0.7, max_tokens=32, seed=1)
    with LLM() as llm:  # LLM("path/or/hub-name") loads another model
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        metrics = llm.get_metrics()
    for output in outputs:  # in the order of the prompts
        [completion] = output.outputs
        times = output.metrics
        print(f"{output.prompt}{completion.text}")
        print(f"  {completion.finish_reason}, queued {times.queued_time * 1000:.1f} ms, ", end="")
        print(f"decoded {len(completion.token_ids)} tokens in {times.decode_time * 1000:.1f} ms")
    print(f"{metrics['num_generation_tokens']} tokens generated")


if __name__ == "__main__":
    main()
