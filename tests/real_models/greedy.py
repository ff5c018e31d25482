"""Greedy answers of a GGUF file's model beside those of transformers with the same weights, and the
prompts for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import torch
from quire.executor.worker import Worker
from quire.tests.executor.driver import generate, make_config

NUM_TOKENS = 40
TOPICS = (
    *("the sea", "a bicycle", "photosynthesis", "the Roman Empire", "bread", "gravity", "a cat"),
    *("the violin", "volcanoes", "chess", "the number seven", "glass", "rain"),
)
FORMS = (
    "Explain {} to a child.",
    "{} is",
    "def describe():\n    # about {}\n    return",
    "Q: What do you know of {}?\nA:",
)
PROMPTS = [form.format(topic) for topic in TOPICS for form in FORMS][:50]


def start(path: Path, hf_config: dict[str, Any], directory: Path) -> Worker:
    """The engine's executor in fp32 on the file's weights, with room for PROMPTS.

    directory: empty, for config.json.
    """
    (directory / "config.json").write_text(json.dumps(hf_config))
    config = make_config(directory, max_num_seqs=len(PROMPTS), max_num_batched_tokens=2048)
    model_config = msgspec.structs.replace(config.model_config, model=str(path))
    cache_config = msgspec.structs.replace(config.cache_config, kv_cache_memory_bytes=2**29)
    executor = Worker(
        msgspec.structs.replace(config, model_config=model_config, cache_config=cache_config)
    )
    executor.load_model(lambda stage, fraction: None)
    executor.initialize_kv_cache(executor.determine_num_blocks())
    return executor


def count_equal(executor: Worker, oracle: Any, prompts: list[list[int]], near_tie: float) -> int:
    """The number of tokens that are the oracle's first choice, given the tokens before them; a row
    is compared up to its first difference.

    Fails where the oracle's logits of the two tokens differ by `near_tie` or more, and if a tenth
    of the tokens is not compared.
    """
    rows = generate(executor, prompts, NUM_TOKENS)
    num_equal, ties = 0, []
    for row in rows:
        with torch.no_grad():
            logits = oracle(torch.tensor([row.prompt + row.output])).logits[0]
        logits = logits[len(row.prompt) - 1 : -1]
        chosen = torch.tensor(row.output)
        gaps = logits.amax(-1) - logits.gather(1, chosen[:, None])[:, 0]
        (others,) = torch.where(logits.argmax(-1) != chosen)
        num_equal += len(chosen) if not len(others) else int(others[0])
        ties += [gaps[others[0]].item()] if len(others) else []
    print(f"{num_equal} of {len(rows) * NUM_TOKENS} tokens compared equal; gaps of ties: {ties}")
    assert all(gap < near_tie for gap in ties)
    assert num_equal > 0.9 * len(rows) * NUM_TOKENS
    return num_equal
