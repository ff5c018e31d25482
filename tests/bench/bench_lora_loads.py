"""How long a stream waits from step to step while adapters are loaded beside it, and what a load
takes, for the bundled model in an engine process.

    python tests/bench/bench_lora_loads.py [--rounds 2]
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import pairwise
from pathlib import Path
from time import perf_counter

from quire import LLMEngine, LoRARequest, SamplingParams
from quire.frontend.model_info.model_files import find_model_directory
from quire.tests.client_forms import closing, make_engine
from quire.tests.lora_adapters import adapted_weights, random_pairs, write_peft

NUM_ADAPTERS, STEPS_PER_LOAD = 8, 12
PARAMS = SamplingParams(temperature=0.0, max_tokens=350, ignore_eos=True)


def stream(engine: LLMEngine, adapters: list[LoRARequest]) -> None:
    """Streams one request; every STEPS_PER_LOAD steps one of `adapters`, if any, is loaded."""
    before, loads, num_steps = engine.call_utility("observe")["step"], [], 0
    engine.add_request("stream", "Once upon a time", PARAMS)
    while engine.has_unfinished_requests():
        engine.step()
        num_steps += 1
        if adapters and num_steps % STEPS_PER_LOAD == 0:
            begin = perf_counter()
            engine.add_lora(adapters[num_steps // STEPS_PER_LOAD % len(adapters)])
            loads.append(1000 * (perf_counter() - begin))
    starts = [step[1] for step in engine.call_utility("observe", before)["steps"]]
    gaps = sorted(1000 * (later - earlier) for earlier, later in pairwise(starts))
    print(
        f"{len(loads):3} loads: from step to step median {gaps[len(gaps) // 2]:.1f} ms, p99 "
        f"{gaps[len(gaps) * 99 // 100]:.1f} ms, longest {gaps[-1]:.1f} ms"
    )
    if loads:
        loads.sort()
        print(f"           a load: median {loads[len(loads) // 2]:.1f} ms, longest {loads[-1]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    weights = adapted_weights(Path(find_model_directory("bundled")))
    settings = dict(enable_lora=True, max_loras=2, max_cpu_loras=NUM_ADAPTERS)
    with tempfile.TemporaryDirectory() as folder:
        adapters = [
            LoRARequest(
                str(i),
                i,
                str(write_peft(Path(folder) / str(i), random_pairs(weights, seed=i, size=0.02))),
                load_inplace=True,
            )
            for i in range(1, NUM_ADAPTERS + 1)
        ]
        with closing(make_engine("process", num_scheduler_steps=1, **settings)) as engine:
            for _ in range(rounds):
                stream(engine, [])
                stream(engine, adapters)


if __name__ == "__main__":
    main()
