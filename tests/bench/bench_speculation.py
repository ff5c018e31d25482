"""Engines with and without speculation, in turns, on texts that repeat themselves and texts that
do not.

    python tests/bench/bench_speculation.py MODEL [--quantization int8] [--config JSON]
        [--num-threads 1] [--rounds 5] [--temperature 0]

Both engines are in this process. A round asks both for each kind of text, in changing order, after
their prompts are in the prefix cache; the answers must be equal. The result is the median of the
rounds' ratios, seconds without over seconds with speculation. With one thread CPU time is measured,
which other programs disturb less.

With --temperature 0 every round has the same answers, which suffix decoding remembers from the
first; with another temperature each round has a seed of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.ipc.params import StructuredOutputsParams

NUM_TOKENS = 160
SOURCE = Path(__file__).with_name("timing.py").read_text()
CODE = (
    SOURCE
    + """

def best_of(function: Callable[[], Any], count: int) -> float:
    best = host_seconds(function)
    for _ in range(count - 1):
        best = min(best, host_seconds(function))
    return best


def report(name: str, seconds: float) -> None:
    print(f"{name}: {1000 * seconds:.2f} ms")
"""
)
EDITED = CODE.replace("function", "call")
ARTICLE = (
    "The committee met on Monday in the old town hall. The committee agreed to build a new bridge "
    "over the river for 3.2 million dollars. The bridge will open in spring of next year, said the "
    "mayor, Anna Lindqvist. Fishermen protested against the plan."
)
PEOPLE = [
    {"first_name": "Ada", "last_name": "Lovelace", "birth_year": 1815, "died": True},
    {"first_name": "Alan", "last_name": "Turing", "birth_year": 1912, "died": True},
    {"first_name": "Grace", "last_name": "Hopper", "birth_year": 1906, "died": True},
]
SCHEMA = {
    "type": "array",
    "minItems": 4,
    "maxItems": 4,
    "items": {
        "type": "object",
        "properties": {
            "first_name": {"type": "string", "maxLength": 12},
            "last_name": {"type": "string", "maxLength": 12},
            "birth_year": {"type": "integer", "minimum": 1000, "maximum": 2020},
            "died": {"type": "boolean"},
        },
        "required": ["first_name", "last_name", "birth_year", "died"],
        "additionalProperties": False,
    },
}
CHAT = (
    "User: What is a fox?\nAssistant: A fox is a small animal of the dog family. It has a red coat "
    "and a long tail, and it eats mice and birds.\nUser: Where does it live?\nAssistant: A fox "
    "lives in forests and fields. It has a den, which is a hole in the ground.\nUser: What does it "
    "eat, and what does its coat look like?\nAssistant:"
)
TEXTS: dict[str, str] = {
    "edit": f"# version 1\n\n{CODE}\n\n# version 2: `function` is now `call`\n\n{EDITED[:420]}",
    "JSON by schema": f"People: {json.dumps(PEOPLE)}\nOther people, likewise: ",
    "quotes": f"Article: {ARTICLE}\n\nSummary with quotes from the article: The article says that "
    '"The committee met',
    "chat": CHAT,
    "free text": "Tell me a story about a fox and a river. Once",
}


def seconds(llm: LLM, prompts: list[str], params: SamplingParams, clock: Any) -> tuple[float, Any]:
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    begin = clock()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return clock() - begin, [output.outputs[0].token_ids for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--quantization")
    parser.add_argument("--config", type=json.loads, default={"method": "ngram"})
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=32, help="requests of the last row")
    args = parser.parse_args()
    settings = dict(engine="inproc", num_threads=args.num_threads, max_model_len=2048)
    if args.quantization:
        settings["quantization"] = args.quantization
    plain = LLM(args.model, **settings)
    drafting = LLM(args.model, speculative_config=args.config, **settings)
    clock = time.process_time if args.num_threads == 1 else time.perf_counter
    texts: dict[str, list[str]] = {name: [text] for name, text in TEXTS.items()}
    words = ["fox", "river", "hill", "bridge", "stone", "bird", "night", "snow"]
    texts[f"{args.batch} requests"] = [
        f"{number}. A story about a {words[number % 8]} and a {words[number // 8 % 8]}. Once"
        for number in range(args.batch)
    ]
    print("| text | ratio | least, most | tokens per draft | accepted |\n|---|---|---|---|---|")
    for name, prompts in texts.items():
        before, ratios = drafting.get_metrics(), []
        for number in range(args.rounds):
            params = SamplingParams(
                temperature=args.temperature,
                seed=number,
                max_tokens=NUM_TOKENS if len(prompts) == 1 else 40,
                ignore_eos="JSON" not in name,
                structured_outputs=StructuredOutputsParams(json=SCHEMA) if "JSON" in name else None,
            )
            pair = [plain, drafting][:: 1 - 2 * (number % 2)]
            found = {id(llm): seconds(llm, prompts, params, clock) for llm in pair}
            (without, expected), (with_, answers) = found[id(plain)], found[id(drafting)]
            assert answers == expected, name
            ratios.append(without / with_)
        after = drafting.get_metrics()
        drafts, tokens, accepted = (
            after[key] - before[key]
            for key in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        )
        print(
            f"| {name} | {statistics.median(ratios):.2f} | {min(ratios):.2f}, {max(ratios):.2f} | "
            f"{tokens / max(1, drafts):.1f} | {accepted / max(1, drafts):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
