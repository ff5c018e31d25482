"""The workload of the feature tests, and a run that records what is visible from outside."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from quire import BeamSearchParams, LLMEngine, RequestOutput, SamplingParams
from quire.frontend.model_info.model_files import find_model_directory
from quire.frontend.requests.beam_search import BeamSearch, BeamSearchOutput, first_params
from quire.frontend.trace.trace import Trace
from quire.ipc.trace import MAX_STEPS
from quire.tests.answers import Answers
from quire.tests.gguf_checkpoints import write_gguf
from quire.tests.tiny_models import save_tiny_model
from quire.tests.workloads import Job, drive

MAX_MODEL_LEN, BLOCK_SIZE = 96, 8
# keys and values × layers × tokens × KV heads × head_dim × bytes of fp32, for the bundled model
BLOCK_BYTES = 2 * 5 * BLOCK_SIZE * 2 * 64 * 4
PLAIN = dict(
    dtype="float32",
    num_threads=1,
    max_model_len=MAX_MODEL_LEN,
    block_size=BLOCK_SIZE,
    max_num_seqs=16,
    num_gpu_blocks_override=300,
    enable_prefix_caching=False,
    enable_jump_forward=False,
    num_scheduler_steps=1,
)
GGUF_MODEL = "the bundled model as a GGUF file"  # in settings: written when it is needed
GGUF_FILE = "bundled-Q4_0.gguf"
# random models with recurrent layers, and the bundled tokenizer: their kinds in tiny_models.py
HYBRID_MODELS = HYBRID_MODEL, KIMI_MODEL = "qwen3_5_text", "kimi_linear"
EXPERTS_MODEL = "qwen3_moe"  # a mixture of experts, likewise
# One request of the longest kind fits; shorter ones preempt each other.
FEW_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE + 1
PAUSE_AT_STEP = 6

replace = msgspec.structs.replace


@dataclass
class Run:
    """The outputs of one workload and what was observed while it ran."""

    answers: Answers = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)  # what the run added to get_metrics
    states: list[dict[str, Any]] = field(default_factory=list)  # scheduler_state between steps
    # request id -> step of its first token
    first_seen: dict[str, int] = field(default_factory=dict)
    most_at_once: int = 0  # new tokens of one completion in one step
    disturbances: list[str] = field(default_factory=list)
    # of BEAM_PROMPTS, if they were searched beside the jobs
    beams: list[BeamSearchOutput] = field(default_factory=list)
    trace: Trace | None = None


@dataclass(frozen=True)
class Feature:
    name: str
    shows: Callable[[Run], None]
    settings: dict[str, Any] = field(default_factory=dict)
    # (params, index of the job, answer without the feature)
    change: Callable[[SamplingParams, int, RequestOutput | None], SamplingParams] | None = None
    # (answers, answers of the same requests without this feature)
    relates: Callable[[Answers, Answers], None] | None = None
    # called once in mid-run; returns its observation
    disturb: Callable[[LLMEngine], str] | None = None
    traces: bool = False  # whether its steps are recorded, all of them
    searches_beams: bool = False  # whether it runs beside the jobs from the first step on
    # its settings change the logits, so they also apply to the baseline
    changes_model: bool = False

    def __str__(self) -> str:
        return self.name


def settings_of(*features: Feature) -> dict[str, Any]:
    """Return the engine's settings with the features: PLAIN, and each one's own."""
    settings: dict[str, Any] = dict(PLAIN)
    for feature in features:
        settings |= feature.settings
    if settings.get("model") == GGUF_MODEL:
        settings["model"] = str(Path(gguf_folder().name) / GGUF_FILE)
    if settings.get("model") in HYBRID_MODELS:
        settings["model"] = random_model(settings["model"])
    return settings


# with these seeds answers repeat tokens; blocks of the mixture of experts have BLOCK_BYTES
_OF_RANDOM: dict[str, dict[str, Any]] = {
    HYBRID_MODEL: {"tie_word_embeddings": True},
    KIMI_MODEL: {"seed": 3},
    EXPERTS_MODEL: {"num_hidden_layers": 5, "head_dim": 64, "tie_word_embeddings": True, "seed": 3},
}


@cache
def gguf_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with GGUF_FILE, the bundled model in blocks, for all tests of a process."""
    folder = tempfile.TemporaryDirectory()
    write_gguf(Path(folder.name) / GGUF_FILE, find_model_directory("bundled"), "Q4_0")
    return folder


def random_model(kind: str) -> str:
    """Return the directory of one of HYBRID_MODELS, or of EXPERTS_MODEL."""
    return _random_folder(kind).name


@cache
def _random_folder(kind: str) -> tempfile.TemporaryDirectory[str]:
    """Return a folder with such a model for all tests of a process."""
    folder, bundled = tempfile.TemporaryDirectory(), Path(find_model_directory("bundled"))
    config = json.loads((bundled / "config.json").read_text())
    keys = "vocab_size", "bos_token_id", "eos_token_id", "max_position_embeddings"
    sizes = {key: config[key] for key in keys}
    own: dict[str, Any] = _OF_RANDOM[kind]
    save_tiny_model(folder.name, kind, **own, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / name, folder.name)
    return folder


def make_jobs() -> list[Job]:
    """Make seven requests with a common prefix that arrive over several steps. Every other one is
    greedy. Later requests have higher priority.
    """
    rng = random.Random(3)
    beginning = [rng.randrange(300, 1000) for _ in range(2 * BLOCK_SIZE + 3)]
    jobs = []
    for i in range(7):
        prompt = beginning + [rng.randrange(300, 1000) for _ in range(rng.randint(2, 12))]
        params = SamplingParams(
            temperature=0.8 * (i % 2), seed=100 * i, max_tokens=14, ignore_eos=True
        )
        jobs.append(
            Job(
                f"job-{i}",
                prompt,
                params,
                priority=-i,
                arrives_at_step=2 * i // 3,
                abort_after=None,
            )
        )
    return jobs


JOBS = make_jobs()


BEAM_PROMPTS = [job.prompt_token_ids[-20:] for job in JOBS[:2]]
BEAM_PARAMS = BeamSearchParams(beam_width=3, max_tokens=8)


class BeamsBeside:
    """An LLMEngine whose steps also advance beam searches, as AsyncLLM.beam_search does.

    It keeps their outputs.
    """

    def __init__(self, engine: LLMEngine):
        self._engine = engine
        requests = [
            engine.session.process("beams", prompt, first_params(BEAM_PARAMS))
            for prompt in BEAM_PROMPTS
        ]
        self._searches = [
            BeamSearch(request, BEAM_PARAMS, engine.config.model_config) for request in requests
        ]
        self._steps: list[dict[str, RequestOutput | None]] = [
            self._submit_step(i) for i in range(len(requests))
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _submit_step(self, index: int) -> dict[str, RequestOutput | None]:
        search = self._searches[index]
        step: dict[str, RequestOutput | None] = {}
        for i, prompt in enumerate(search.step_prompts):
            request_id = f"beam-{index}-{i}"
            self._engine.add_request(request_id, prompt, search.step_params)
            step[request_id] = None
        return step

    def step(self) -> list[RequestOutput]:
        others = []
        for output in self._engine.step():
            step = next((step for step in self._steps if output.request_id in step), None)
            if step is None:
                others.append(output)
                continue
            step[output.request_id] = output
        for i, step in enumerate(self._steps):
            if step and all(step.values()):
                self._searches[i].advance(list(step.values()))
                self._steps[i] = self._submit_step(i)
        return others

    def outputs(self) -> list[BeamSearchOutput]:
        assert all(search.is_done for search in self._searches)
        return [search.output(self._engine.tokenizer) for search in self._searches]


def run(engine: LLMEngine, jobs: list[Job], *features: Feature) -> Run:
    """Run the jobs through an engine with an empty cache and observe it after every step."""
    learn_grammars(engine, jobs)
    assert engine.reset_prefix_cache()
    seen, before = Run(), engine.get_metrics()
    disturb = next((feature.disturb for feature in features if feature.disturb is not None), None)
    beams = BeamsBeside(engine) if any(feature.searches_beams for feature in features) else None
    num_tokens: dict[tuple[str, int], int] = {}

    def watch(step: int, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            seen.answers[output.request_id] = output
            seen.first_seen.setdefault(output.request_id, step)
            for completion in output.outputs:
                key, count = (output.request_id, completion.index), len(completion.token_ids)
                seen.most_at_once = max(seen.most_at_once, count - num_tokens.get(key, 0))
                num_tokens[key] = count
        seen.states.append(engine.call_utility("scheduler_state"))
        if (
            disturb is not None
            and not seen.disturbances
            and step >= PAUSE_AT_STEP
            and seen.states[-1]["running"]
        ):
            seen.disturbances.append(disturb(engine))

    is_traced = any(feature.traces for feature in features)
    with engine.trace(MAX_STEPS) if is_traced else nullcontext() as seen.trace:
        drive(beams or engine, jobs, aborts=False, watch=watch)
    seen.beams = beams.outputs() if beams else []
    seen.counters = {name: value - before[name] for name, value in engine.get_metrics().items()}
    assert len(seen.answers) == len(jobs) and all(
        answer.finished and answer.error is None for answer in seen.answers.values()
    ), seen.answers
    return seen


def learn_grammars(engine: LLMEngine, jobs: list[Job]) -> None:
    """Compile the grammars of the jobs, so that requests are scheduled in the step they arrive."""
    for job in jobs:
        if job.params.structured_outputs is not None:
            engine.add_request(
                job.request_id, job.prompt_token_ids[:1], replace(job.params, n=1, max_tokens=1)
            )
    while engine.has_unfinished_requests():
        engine.step()
