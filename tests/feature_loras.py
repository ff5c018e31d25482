"""LoRA adapters for the feature tests: each request has one, or none, by a token of its prompt."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from quire import LLMEngine, LoRARequest
from quire.frontend.model_info.model_files import find_model_directory
from quire.tests.feature_run import JOBS, Run
from quire.tests.lora_adapters import adapted_weights, random_pairs, write_peft

NUM_ADAPTERS = 2
# the first token in which the prompts of JOBS differ; that of a beam search does not change
DECIDING = 19
BY_TOKEN = {job.prompt_token_ids[DECIDING]: i % (NUM_ADAPTERS + 1) for i, job in enumerate(JOBS)}
# All may run together: with fewer places, requests would not preempt each other.
SETTINGS = dict(enable_lora=True, max_loras=NUM_ADAPTERS, max_cpu_loras=NUM_ADAPTERS)


@cache
def folder(model: str) -> tempfile.TemporaryDirectory[str]:
    """Return a folder with adapters of a model, for all tests of a process. Experts that a router
    chooses take none.
    """
    found = tempfile.TemporaryDirectory()
    path = Path(find_model_directory(model))
    if path.is_file():  # a GGUF file of the bundled model
        path = Path(find_model_directory("bundled"))
    weights = adapted_weights(path)
    weights = {name: weight for name, weight in weights.items() if ".experts." not in name}
    for i in range(1, NUM_ADAPTERS + 1):
        write_peft(Path(found.name) / str(i), random_pairs(weights, seed=i, size=0.1))
    return found


def adapter_of(prompt_token_ids: list[int], model: str = "bundled") -> LoRARequest | None:
    if len(prompt_token_ids) <= DECIDING:
        return None
    token = prompt_token_ids[DECIDING]
    number = BY_TOKEN.get(token, 1 + token % NUM_ADAPTERS)
    return adapter(number, model) if number else None


class EngineWithAdapters(LLMEngine):
    """Gives each request the adapter of its prompt."""

    def add_request(self, request_id: str, prompt: Any, *args: Any, **options: Any) -> None:
        ids = prompt if isinstance(prompt, list) else prompt.get("prompt_token_ids")
        options["lora_request"] = adapter_of(ids, self.config.model_config.model)
        super().add_request(request_id, prompt, *args, **options)


def adapter(number: int, model: str = "bundled", **fields: Any) -> LoRARequest:
    return LoRARequest(f"a{number}", number, f"{folder(model).name}/{number}", **fields)


class EngineByNumber(LLMEngine):
    """Two of three requests have an adapter, by the number at the end of their ids."""

    def add_request(self, request_id: str, *args: Any, **options: Any) -> None:
        if number := int(request_id.rpartition("-")[2]) % (NUM_ADAPTERS + 1):
            options["lora_request"] = adapter(number)
        super().add_request(request_id, *args, **options)


def shows_loras(seen: Run) -> None:
    names = {request["lora_name"] for state in seen.states for request in state["requests"]}
    assert None in names and len(names) == NUM_ADAPTERS + 1, names
