"""What a request can ask for and what a step can do, one object per feature, so that any two can be
put together and each be seen at work.

A feature has an engine's side (settings), a request's side (a change of its parameters) or a
driver's side (something done in mid-run, or beside it), and `shows`, which fails if a run gives no
sign that the feature was at work. A request's side also says what it does to the answers: `relates`
compares them with those of the same requests without it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from quire import (
    BeamSearchParams,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.frontend.beam_search import BeamSearch, BeamSearchOutput, first_params
from quire.kernels.cpu.native.library import library
from quire.tests.answers import Answers
from quire.tests.workloads import Job, drive

MAX_MODEL_LEN, BLOCK_SIZE = 96, 8
# keys and values, layers, tokens, KV heads, head_dim, fp32 (of the bundled model)
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
# one request of the longest kind fits; a few ordinary ones preempt each other
FEW_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE + 1
PAUSE_AT_STEP = 6

replace = msgspec.structs.replace


@dataclass
class Run:
    """One workload from its beginning to its end, and what could be seen from outside."""

    answers: Answers = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)  # what the run added to get_metrics
    states: list[dict[str, Any]] = field(default_factory=list)  # scheduler_state between steps
    # request id -> step of its first token
    first_seen: dict[str, int] = field(default_factory=dict)
    most_at_once: int = 0  # new tokens of one completion in one step
    disturbances: list[str] = field(default_factory=list)
    # of BEAM_PROMPTS, when they were searched beside the jobs
    beams: list[BeamSearchOutput] = field(default_factory=list)


@dataclass(frozen=True)
class Feature:
    name: str
    shows: Callable[[Run], None]
    settings: dict[str, Any] = field(default_factory=dict)
    # (params, index of the job, answer without it)
    change: Callable[[SamplingParams, int, RequestOutput | None], SamplingParams] | None = None
    # (answers, those of the same requests without this feature)
    relates: Callable[[Answers, Answers], None] | None = None
    disturb: Callable[[LLMEngine], str] | None = None  # once, in mid-run; returns what it was
    searches_beams: bool = False  # beside the jobs, from the first step on
    # its settings make other logits: what is compared with has them too
    changes_model: bool = False

    def __str__(self) -> str:
        return self.name


def make_jobs() -> list[Job]:
    """Seven requests that come at several steps, all beginning alike, every other one greedy; the
    later the more urgent.
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


def run(engine: LLMEngine, jobs: list[Job], *features: Feature) -> Run:
    """Drives the jobs through an engine with nothing in its cache, looking at it after every
    step.
    """
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

    drive(beams or engine, jobs, aborts=False, watch=watch)
    seen.beams = beams.outputs() if beams else []
    seen.counters = {name: value - before[name] for name, value in engine.get_metrics().items()}
    assert len(seen.answers) == len(jobs) and all(
        answer.finished and answer.error is None for answer in seen.answers.values()
    ), seen.answers
    return seen


def learn_grammars(engine: LLMEngine, jobs: list[Job]) -> None:
    """A grammar is checked once, for as long as that takes; afterwards requests are scheduled in
    the step in which they arrive.
    """
    for job in jobs:
        if job.params.structured_outputs is not None:
            engine.add_request(
                job.request_id, job.prompt_token_ids[:1], replace(job.params, n=1, max_tokens=1)
            )
    while engine.has_unfinished_requests():
        engine.step()


# ---------------------------------------------------------------- the engine's side


def _requests(seen: Run) -> list[dict[str, Any]]:
    return [request for state in seen.states for request in state["requests"]]


def _shows_chunks(seen: Run) -> None:
    assert any(0 < r["num_computed_tokens"] < r["num_prompt_tokens"] for r in _requests(seen)), (
        "no prompt was ever half computed"
    )


def _shows_hits(seen: Run) -> None:
    assert seen.counters["prefix_cache_hits"] > 0
    assert any(answer.num_cached_tokens for answer in seen.answers.values())


def _shows_recompute(seen: Run) -> None:
    assert seen.counters["num_preemptions"] > 0 and seen.counters["num_recomputed_tokens"] > 0, (
        seen.counters
    )


def _shows_swap(seen: Run) -> None:
    assert 0 < seen.counters["num_blocks_swapped_in"] <= seen.counters["num_blocks_swapped_out"], (
        seen.counters
    )


def _shows_overlap(seen: Run) -> None:
    """Between two steps the newest token of a request is never computed, unless a step is under
    way.
    """
    assert any(r["num_computed_tokens"] >= r["num_tokens"] for r in _requests(seen)), (
        "no step was ever in flight"
    )


def _shows_multi_step(seen: Run) -> None:
    assert seen.most_at_once == 4, f"at most {seen.most_at_once} tokens came at once"


def _shows_priority(seen: Run) -> None:
    jobs = {job.request_id: job for job in JOBS}
    overtaken = [
        (a, b)
        for a in seen.first_seen
        for b in seen.first_seen
        if jobs[a].arrives_at_step < jobs[b].arrives_at_step
        and seen.first_seen[b] < seen.first_seen[a]
    ]
    assert overtaken and all(jobs[b].priority < jobs[a].priority for a, b in overtaken), overtaken


# ---------------------------------------------------------------- the driver's side


def _pause_and_resume(engine: LLMEngine) -> str:
    """Freezes everything, sees that a newcomer waits outside and that nothing moves, and lets it go
    on.
    """
    engine.call_utility("pause", "keep")
    # comes when what was computed before the pause is delivered
    reason = engine.call_utility("stall_reason")
    engine.add_request("late", JOBS[0].prompt_token_ids[:5], JOBS[0].params)
    state, metrics = engine.call_utility("scheduler_state"), engine.get_metrics()
    assert state["is_paused"] and len(state["held"]) == 1, state
    assert engine.call_utility("stall_reason") == reason and engine.get_metrics() == metrics
    [last] = engine.abort_request("late")
    assert last.outputs[0].token_ids == []
    engine.call_utility("resume")
    return reason if state["running"] else "everybody had just finished"


def _shows_pause(seen: Run) -> None:
    assert seen.disturbances == ["the engine is paused: resume() first"]


BEAM_PROMPTS = [job.prompt_token_ids[-20:] for job in JOBS[:2]]
BEAM_PARAMS = BeamSearchParams(beam_width=3, max_tokens=8)


class BeamsBeside:
    """An LLMEngine whose steps also bring some beam searches forward, as AsyncLLM.beam_search
    would; their outputs are kept here.
    """

    def __init__(self, engine: LLMEngine):
        self._engine = engine
        requests = [
            engine.process_inputs("beams", prompt, first_params(BEAM_PARAMS))
            for prompt in BEAM_PROMPTS
        ]
        self._searches = [
            BeamSearch(request, BEAM_PARAMS, engine.config.model_config) for request in requests
        ]
        self._steps: list[dict[str, RequestOutput | None]] = [
            self._ask(i) for i in range(len(requests))
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _ask(self, index: int) -> dict[str, RequestOutput | None]:
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
                self._steps[i] = self._ask(i)
        return others

    def outputs(self) -> list[BeamSearchOutput]:
        assert all(search.is_done for search in self._searches)
        return [search.output(self._engine.tokenizer) for search in self._searches]


def _shows_beams(seen: Run) -> None:
    for output in seen.beams:
        assert len(output.sequences) == BEAM_PARAMS.beam_width and output.error is None
        assert (
            len({tuple(sequence.tokens) for sequence in output.sequences}) == BEAM_PARAMS.beam_width
        )
    assert len(seen.beams) == len(BEAM_PROMPTS)


# ---------------------------------------------------------------- the request's side


def _with_n(params: SamplingParams, index: int, without: RequestOutput | None) -> SamplingParams:
    """n > 1 is refused for greedy requests, whose completions would all be the same."""
    return replace(params, n=3, temperature=params.temperature or 0.7)


def _shows_n(seen: Run) -> None:
    assert all([c.index for c in answer.outputs] == [0, 1, 2] for answer in seen.answers.values())
    assert any(
        len({tuple(c.token_ids) for c in answer.outputs}) == 3 for answer in seen.answers.values()
    )


def _shows_logprobs(seen: Run) -> None:
    for answer in seen.answers.values():
        for c in answer.outputs:
            assert len(c.logprobs) == len(c.token_ids) and all(
                len(entries) in (3, 4) for entries in c.logprobs
            )
            chosen = [
                entries[token_id].logprob for entries, token_id in zip(c.logprobs, c.token_ids)
            ]
            assert (
                c.cumulative_logprob == pytest.approx(sum(chosen))
                and max(chosen, default=0.0) <= 0.0
            )


def _with_prompt_logprobs(
    params: SamplingParams, index: int, without: RequestOutput | None
) -> SamplingParams:
    """Not for all: a request that wants them does not read the prefix cache, and somebody
    should.
    """
    return params if index % 3 == 1 else replace(params, prompt_logprobs=2)


def _shows_prompt_logprobs(seen: Run) -> None:
    for index, job in enumerate(JOBS):
        answer = seen.answers[job.request_id]
        if index % 3 == 1:
            assert answer.prompt_logprobs is None
            continue
        first, *rest = answer.prompt_logprobs
        assert first is None and len(rest) == len(job.prompt_token_ids) - 1
        assert all(token_id in entries for token_id, entries in zip(job.prompt_token_ids[1:], rest))


SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "name": {"type": "string", "minLength": 9, "maxLength": 12},
    },
    "required": ["age", "name"],
    "additionalProperties": False,
}
STRUCTURES = (
    StructuredOutputsParams(regex=r"[a-z]{3}( [a-z]{3}){5}"),
    StructuredOutputsParams(
        choice=["the red fox sleeps under the tree", "the old owl watches over the river", "a fish"]
    ),
    StructuredOutputsParams(json=json.dumps(SCHEMA), disable_any_whitespace=True),
)


def _with_structure(
    params: SamplingParams, index: int, without: RequestOutput | None
) -> SamplingParams:
    """Its end is an end-of-sequence token, so it needs room for one, and must not ignore it."""
    return replace(
        params, structured_outputs=STRUCTURES[index % 3], ignore_eos=False, max_tokens=40
    )


def _shows_structure(seen: Run) -> None:
    for index, job in enumerate(JOBS):
        for c in seen.answers[job.request_id].outputs:
            # cut: see how `relates` of stop strings compares it with the whole
            if isinstance(c.stop_reason, str):
                continue
            assert c.finish_reason == "stop", c
            structure = STRUCTURES[index % 3]
            if structure.regex is not None:
                assert re.fullmatch(structure.regex, c.text), c
            elif structure.choice is not None:
                assert c.text in structure.choice
            else:
                value = json.loads(c.text)
                assert (
                    value.keys() == {"age", "name"}
                    and 0 <= value["age"] <= 999
                    and 9 <= len(value["name"]) <= 12
                )


def _with_stop(params: SamplingParams, index: int, without: RequestOutput | None) -> SamplingParams:
    """Three characters from the middle of what it would say, so that the answer is cut but not at
    once.
    """
    text = without.outputs[0].text
    return replace(params, stop=[text[len(text) // 2 : len(text) // 2 + 3]])


def _shows_stop(seen: Run) -> None:
    stopped = [
        c
        for answer in seen.answers.values()
        for c in answer.outputs
        if isinstance(c.stop_reason, str)
    ]
    assert len(stopped) >= len(JOBS) and all(
        c.finish_reason == "stop" and c.stop_reason not in c.text for c in stopped
    )


def _relates_stop(stopped: Answers, without: Answers) -> None:
    for request_id, answer in stopped.items():
        for got, whole in zip(answer.outputs, without[request_id].outputs, strict=True):
            assert got.token_ids == whole.token_ids[: len(got.token_ids)] and whole.text.startswith(
                got.text
            )
            if isinstance(got.stop_reason, str):
                assert whole.text.startswith(got.text + got.stop_reason)


def _relates_as_equal(answers: Answers, without: Answers) -> None:
    """The first completion of each is what it would be without."""
    for request_id, answer in answers.items():
        got, expected = answer.outputs[0], without[request_id].outputs[0]
        assert (got.token_ids, got.text, got.finish_reason) == (
            expected.token_ids,
            expected.text,
            expected.finish_reason,
        ), request_id


def _relates_n(answers: Answers, without: Answers) -> None:
    """The first completion has the seed of the whole request; the greedy requests are greedy no
    more.
    """
    sampled = [job.request_id for job in JOBS if not job.params.is_greedy]
    _relates_as_equal({request_id: answers[request_id] for request_id in sampled}, without)


def _relates_as_different(answers: Answers, without: Answers) -> None:
    differ = [
        answer.outputs[0].token_ids != without[request_id].outputs[0].token_ids
        for request_id, answer in answers.items()
    ]
    assert sum(differ) > 1  # not all: a grammar, for one, leaves few choices


def _shows_nothing_of_its_own(seen: Run) -> None:
    """What it does is in the tokens alone: see `relates`."""


CHUNKED_PREFILL = Feature("chunked prefill", _shows_chunks, dict(max_num_batched_tokens=16))
PREFIX_CACHE = Feature("prefix cache", _shows_hits, dict(enable_prefix_caching=True))
RECOMPUTE = Feature(
    "recompute",
    _shows_recompute,
    dict(preemption_mode="recompute", num_gpu_blocks_override=FEW_BLOCKS),
)
SWAP = Feature(
    "swap", _shows_swap, dict(preemption_mode="swap", num_gpu_blocks_override=FEW_BLOCKS)
)
OVERLAP = Feature("overlap", _shows_overlap, dict(async_scheduling=True))
MULTI_STEP = Feature("multi-step", _shows_multi_step, dict(num_scheduler_steps=4))
PRIORITY = Feature("priority", _shows_priority, dict(scheduling_policy="priority", max_num_seqs=3))
PAUSE = Feature("pause", _shows_pause, disturb=_pause_and_resume)
BEAMS = Feature("beam search", _shows_beams, searches_beams=True)
N = Feature("n", _shows_n, change=_with_n, relates=_relates_n)
LOGPROBS = Feature(
    "logprobs",
    _shows_logprobs,
    change=lambda params, i, _: replace(params, logprobs=3),
    relates=_relates_as_equal,
)
PROMPT_LOGPROBS = Feature(
    "prompt logprobs",
    _shows_prompt_logprobs,
    change=_with_prompt_logprobs,
    relates=_relates_as_equal,
)
PENALTIES = Feature(
    "penalties",
    _shows_nothing_of_its_own,
    change=lambda params, i, _: replace(
        params, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.8
    ),
    relates=_relates_as_different,
)
STRUCTURED = Feature(
    "structured output",
    _shows_structure,
    dict(enable_jump_forward=True),
    change=_with_structure,
    relates=_relates_as_different,
)
QUANTIZED = Feature(
    "quantized",
    _shows_nothing_of_its_own,
    dict(quantization="int4", kernels={} if library else {"pack_quantized_linear": "reference"}),
    relates=_relates_as_different,
    changes_model=True,
)
STOP = Feature("stop", _shows_stop, change=_with_stop, relates=_relates_stop)

FEATURES = (
    CHUNKED_PREFILL,
    PREFIX_CACHE,
    RECOMPUTE,
    SWAP,
    N,
    BEAMS,
    LOGPROBS,
    PROMPT_LOGPROBS,
    PENALTIES,
    STRUCTURED,
    STOP,
    OVERLAP,
    MULTI_STEP,
    PAUSE,
    PRIORITY,
    QUANTIZED,
)
