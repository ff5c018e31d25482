"""Judges a checkpoint on held-out prompts: greedy answers per skill, and recall per distance;
prints a table and writes JSON.
"""

import argparse
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import data
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = HERE.parents[1] / "frontend" / "bundled_model"
SEED = 20_000_000  # training uses seeds that are strings; no random stream is shared
SKILLS: dict[str, Callable[[Random], data.Sample]] = {
    "addition, two digits, held-out pairs": data.addition_prompt,
    "addition in chat, held-out pairs": lambda rng: data.addition_prompt(rng, chat=True),
    "subtraction, two digits, held-out pairs": data.subtraction_prompt,
    "copy, up to 24 words": data.copy_prompt,
    "copy in chat": lambda rng: data.copy_prompt(rng, chat=True),
    "JSON of a record": data.json_prompt,
    "JSON in chat": lambda rng: data.json_prompt(rng, chat=True),
    "translation, English and Chinese": data.translation_prompt,
    "small talk": data.chat_prompt,
    "story in chat (hero named, story ended)": lambda rng: data.story_prompt(rng, chat=True),
}
RECALL_DISTANCES = [100, 500, 1000, 1500, 1900]


def load(folder: Path, dtype: torch.dtype):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), tokenizer


@torch.inference_mode()
def greedy_outputs(
    model, tokenizer, prompts: list[str], max_new_tokens: int, batch_size: int = 10
) -> list[str]:
    """The continuation of each prompt with its end token, if it came to one."""
    outputs = []
    for start in range(0, len(prompts), batch_size):
        batch = tokenizer(
            prompts[start : start + batch_size],
            return_tensors="pt",
            padding=True,
            return_token_type_ids=False,
        )
        token_ids = model.generate(
            **batch,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
        )
        outputs += tokenizer.batch_decode(token_ids[:, batch["input_ids"].shape[1] :])
    return outputs


def is_correct(skill: str, sample: data.Sample, output: str) -> bool:
    """Recall: the code is in the first line.

    Stories: the hero is in the first sentence and the end is marked. Else: equal.
    """
    text, turn_end, _ = output.partition(data.TURN_END)
    first_line = text.split(data.END_OF_TEXT)[0].strip().split("\n")[0]
    if skill.startswith("recall"):
        return sample.answer in first_line
    if skill.startswith("story"):
        return bool(turn_end) and f" {sample.answer} " in first_line.split(".")[0] + " "
    return first_line == sample.completion.strip()


def accuracy(
    model, tokenizer, skill: str, samples: list[data.Sample]
) -> tuple[float, list[tuple[data.Sample, str]]]:
    """The share of right answers, and the wrong ones."""
    longest = max(len(tokenizer(sample.completion).input_ids) for sample in samples)
    outputs = greedy_outputs(
        model,
        tokenizer,
        [sample.prompt for sample in samples],
        longest + 40 * skill.startswith("story") + 2,
    )
    wrong = [
        (sample, output)
        for sample, output in zip(samples, outputs)
        if not is_correct(skill, sample, output)
    ]
    return 1 - len(wrong) / len(samples), wrong


def recall_samples(tokenizer, distance: int, chat: bool, num_samples: int) -> list[data.Sample]:
    def count_tokens(text: str) -> int:
        return len(tokenizer(text).input_ids)

    return [
        data.recall_prompt(Random(SEED + index), distance, chat, count_tokens=count_tokens)
        for index in range(num_samples)
    ]


def evaluate(
    folder: Path, dtype: torch.dtype, num_samples: int, num_recall_samples: int, show_wrong: bool
) -> dict[str, float]:
    model, tokenizer = load(folder, dtype)
    tasks = {
        skill: [make(Random(SEED + index)) for index in range(num_samples)]
        for skill, make in SKILLS.items()
    }
    for chat in (False, True):
        for distance in RECALL_DISTANCES:
            name = f"recall{' in chat' if chat else ''}, {distance} tokens between"
            tasks[name] = recall_samples(tokenizer, distance, chat, num_recall_samples)
    result = {}
    for skill, samples in tasks.items():
        start = time.monotonic()
        result[skill], wrong = accuracy(model, tokenizer, skill, samples)
        print(
            f"{skill:45s} {len(samples):5d} {result[skill]:7.1%}   {time.monotonic() - start:5.1f} "
            f"s",
            flush=True,
        )
        for sample, output in wrong[:3] if show_wrong else []:
            print(f"    {sample.prompt[-60:]!r} -> {output[:80]!r}, not {sample.completion[:80]!r}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--num-samples", type=int, default=200)
    parser.add_argument("--num-recall-samples", type=int, default=100)
    parser.add_argument("--show-wrong", action="store_true")
    parser.add_argument(
        "--json", type=Path, help="where to write the table", default=HERE / "accuracy.json"
    )
    arguments = parser.parse_args()
    table = {}
    for dtype in arguments.dtypes:
        print(f"\n{dtype:45s} count   right")
        table[dtype] = evaluate(
            arguments.model,
            getattr(torch, dtype),
            arguments.num_samples,
            arguments.num_recall_samples,
            arguments.show_wrong,
        )
    content = dict(
        num_samples=arguments.num_samples,
        num_recall_samples=arguments.num_recall_samples,
        seed=SEED,
        accuracy=table,
    )
    arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
