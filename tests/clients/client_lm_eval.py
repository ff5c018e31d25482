"""lm-eval's local-completions: log-likelihoods and generation on a small local task, without
downloads.
"""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["OPENAI_API_KEY"] = "none"

import lm_eval
from checks import run
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

REQUIREMENTS = {"lm_eval": "lm-eval[api]"}
DISTRIBUTION = "lm-eval"
SUMS = [(a, b) for a in range(1, 5) for b in range(1, 5)]


def model(address: str, **fields: Any) -> LocalCompletionsAPI:
    """The tokenizer is the server's: /tokenizer_info, /tokenize and /detokenize."""
    return LocalCompletionsAPI(
        base_url=f"{address}/v1/completions",
        model="quire",
        max_length=1024,
        **{"num_concurrent": 1} | fields,
    )


def tasks(directory: Path) -> TaskManager:
    """Sums with three answers to choose from, a text whose words are scored, and sums whose answer
    is generated.
    """
    rows = [
        {
            "question": f"What is {a} + {b}?",
            "choices": [str(a + b + i) for i in range(3)],
            "label": 0,
            "answer": str(a + b),
        }
        for a, b in SUMS
    ]
    (directory / "rows.json").write_text("\n".join(json.dumps(row) for row in rows))
    base = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(directory / "rows.json")}},
        "test_split": "test",
        "doc_to_text": "{{question}} Answer:",
        "num_fewshot": 0,
    }
    choice = base | {
        "task": "sums",
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
    }
    rolling = base | {
        "task": "words",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
    }
    generated = base | {
        "task": "written",
        "output_type": "generate_until",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
    }
    choice["metric_list"] = [{"metric": "acc"}]
    rolling["metric_list"] = [{"metric": "word_perplexity"}]
    generated["metric_list"] = [{"metric": "exact_match"}]
    for task in (choice, rolling, generated):
        (directory / f"{task['task']}.yaml").write_text(json.dumps(task))
    return TaskManager(include_path=str(directory), include_defaults=False)


def evaluate(address: str, task: str, **fields: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        found = lm_eval.simple_evaluate(
            model(address, **fields),
            tasks=[task],
            task_manager=tasks(Path(directory)),
            bootstrap_iters=0,
            log_samples=True,
        )
    return found


def check_the_servers_tokenizer_is_used(address: str, _: str) -> None:
    found = model(address)
    assert (
        found.tokenizer_backend == "remote"
        and found.tok_encode("Once upon a time")
        and found.eot_token_id is not None
    )


def check_log_likelihoods(address: str, _: str) -> None:
    found = evaluate(address, "sums")
    assert 0 <= found["results"]["sums"]["acc,none"] <= 1 and len(found["samples"]["sums"]) == len(
        SUMS
    )
    likelihoods = [
        response[0] for sample in found["samples"]["sums"] for response in sample["filtered_resps"]
    ]
    assert all(math.isfinite(value) and value < 0 for value in map(float, likelihoods)) and len(
        set(likelihoods)
    ) > len(SUMS)


def check_batches_and_concurrency_give_the_same(address: str, _: str) -> None:
    one, many = (
        evaluate(address, "sums"),
        evaluate(address, "sums", num_concurrent=4, batch_size=5),
    )
    pairs = zip(one["samples"]["sums"], many["samples"]["sums"], strict=True)
    for first, second in pairs:
        for (a, _greedy), (b, _same) in zip(
            first["filtered_resps"], second["filtered_resps"], strict=True
        ):
            assert abs(float(a) - float(b)) < 1e-3


def check_rolling_log_likelihoods(address: str, _: str) -> None:
    assert evaluate(address, "words")["results"]["words"]["word_perplexity,none"] > 1


def check_generation(address: str, _: str) -> None:
    found = evaluate(address, "written")
    assert all("\n" not in sample["resps"][0][0] for sample in found["samples"]["written"])


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
