"""Every pair of features works together or raises an error that names the conflict.

Both features of a pair must show an effect, and neither may change the other's outputs. The outputs
of a pair are compared with those of the same requests, run one at a time by an engine without the
features. If a feature changes the requests, those outputs are also compared with the outputs of the
same requests without it.

Five pairs need special treatment:

- recompute and offload: what is kept elsewhere is not computed again, so the place is small.
- recompute and swap are two values of preemption_mode. The pair is "swap" with little host memory,
  where some requests must recompute.
- n > 1 is refused with temperature=0 (REFUSED). Requests with n > 1 are sampled here.
- BeamSearchParams does not accept most sampling parameters (REFUSED). Beam searches run beside the
  other requests.
- GGUF's blocks are multiplied in bfloat16, where transformers' code rounds differently from
  Quire's: that pair is not compared with either of its features alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from quire import (
    LLM,
    BeamSearchOutput,
    BeamSearchParams,
    EngineArgs,
    InvalidParameterError,
    LLMEngine,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.kernels.cpu.native.library import library
from quire.tests.answers import Answers, answer_alone, assert_same, assert_same_beams
from quire.tests.feature_loras import EngineWithAdapters, adapter_of
from quire.tests.feature_run import (
    BEAM_PARAMS,
    BEAM_PROMPTS,
    BLOCK_BYTES,
    JOBS,
    Feature,
    run,
    settings_of,
)
from quire.tests.features import (
    FALLBACK,
    FEATURES,
    GGUF,
    HYBRID,
    KIMI,
    LORA,
    MULTI_STEP,
    OFFLOAD,
    OVERLAP,
    PREFIX_CACHE,
    QUANTIZED,
    RECOMPUTE,
    SPECULATION,
    SWAP,
)
from quire.tests.workloads import Job

# EngineArgs refuses multi-step with speculation. Steps of requests with drafts do not overlap, so
# that overlap has nothing to show; tests/test_speculation.py runs the two together.
APART = (
    {MULTI_STEP.name, SPECULATION.name},
    {OVERLAP.name, SPECULATION.name},
    # blocks of adapters are not kept (tests/test_kv_offload.py)
    {LORA.name, OFFLOAD.name},
    # these are other models: a file of the bundled one, its adapters, transformers' code
    *({hybrid.name, other.name} for hybrid in (HYBRID, KIMI) for other in (GGUF, LORA, FALLBACK)),
    {HYBRID.name, KIMI.name},
)
PAIRS = [(a, a) for a in FEATURES] + [
    pair for pair in itertools.combinations(FEATURES, 2) if {f.name for f in pair} not in APART
]
HOST_BLOCKS = 3  # some requests of the workload that are preempted are smaller, some larger
TOGETHER = {
    frozenset({RECOMPUTE.name, SWAP.name}): dict(
        preemption_mode="swap", swap_space=HOST_BLOCKS * BLOCK_BYTES / 2**30
    ),
    frozenset({RECOMPUTE.name, OFFLOAD.name}): dict(
        kv_offloading_size=2 * HOST_BLOCKS * BLOCK_BYTES / 2**30
    ),
}

EXAMPLES = dict(
    n=3,
    temperature=0.0,
    beam_width=2,
    max_tokens=5,
    logprobs=2,
    prompt_logprobs=2,
    repetition_penalty=1.5,
    stop="x",
    priority=1,
    seed=4,
    ignore_eos=True,
    structured_outputs=StructuredOutputsParams(json_object=True),
    detokenize=False,
)
REFUSED = {
    (
        "n",
        "temperature",
    ): r"n: must be 1 with temperature=0 \(greedy\), where all completions are the same, got 3",
    (
        "structured_outputs",
        "ignore_eos",
    ): "ignore_eos: must be False with structured_outputs: an end-of-sequence token ends a "
    "structured output",
    ("stop", "detokenize"): "stop: needs detokenize=True: stop strings are found in the text",
} | {
    ("beam_width", "max_tokens", name): f"{name}: there is no such argument"
    for name in (
        "n",
        "logprobs",
        "prompt_logprobs",
        "repetition_penalty",
        "structured_outputs",
        "stop",
        "priority",
        "seed",
    )
}


def settings_together(*features: Feature) -> dict[str, Any]:
    """Return the engine's settings with features that may need other ones than each alone."""
    names = frozenset(feature.name for feature in features)
    return settings_of(*features) | TOGETHER.get(names, {})


class Matrix:
    """The engines and answers that many pairs share. of_engines: further settings of all."""

    def __init__(self, **of_engines: Any) -> None:
        self._of_engines = of_engines
        self._engines: dict[str, LLMEngine] = {}
        self._alone: dict[tuple[str, ...], Answers] = {}
        self._beams: dict[str, list[BeamSearchOutput]] = {}

    def engine(self, *features: Feature) -> LLMEngine:
        settings = settings_together(*features) | self._of_engines
        key = repr(sorted(settings.items()))
        if key not in self._engines:
            kind = EngineWithAdapters if "enable_lora" in settings else LLMEngine
            self._engines[key] = kind.from_engine_args(EngineArgs(**settings), engine="inproc")
        return self._engines[key]

    def jobs(self, *features: Feature) -> list[Job]:
        """Return JOBS with the changes of the request features among `features`. Each job knows the
        answers without the feature.
        """
        jobs, changed = JOBS, tuple(feature for feature in features if feature.changes_model)
        for feature in features:
            if feature.change is not None and feature not in changed:
                without = self.alone(*changed)
                params = [
                    feature.change(job.params, i, without[job.request_id])
                    for i, job in enumerate(jobs)
                ]
                jobs = [
                    Job(
                        job.request_id,
                        job.prompt_token_ids,
                        p,
                        job.priority,
                        job.arrives_at_step,
                        None,
                    )
                    for job, p in zip(jobs, params)
                ]
                changed += (feature,)
        return jobs

    def alone(self, *features: Feature) -> Answers:
        """Return the plain engine's answers to each of these jobs alone. Of the engine features
        only those of the model apply.
        """
        model = [feature for feature in features if feature.changes_model]
        key = tuple(
            feature.name
            for feature in features
            if feature.change is not None or feature.changes_model
        )
        if key not in self._alone:
            self._alone[key] = answer_alone(self.engine(*model), self.jobs(*features))
        return self._alone[key]

    def beams_alone(self, *features: Feature) -> list[BeamSearchOutput]:
        """Return the plain engine's beams. Of the engine features only those of the model apply."""
        model = [feature for feature in features if feature.changes_model]
        settings = settings_of(*model) | self._of_engines
        key = repr(settings)
        if key not in self._beams:
            with LLM(engine="inproc", **settings) as llm:
                of_model = llm.llm_engine.config.model_config.model
                loras = (
                    [adapter_of(ids, of_model) for ids in BEAM_PROMPTS] if LORA in model else None
                )
                self._beams[key] = llm.beam_search(BEAM_PROMPTS, BEAM_PARAMS, lora_request=loras)
        return self._beams[key]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.shutdown()


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    matrix = Matrix()
    yield matrix
    matrix.close()


def tolerance(*features: Feature) -> float:
    """Return the tolerance of log-probabilities. torch's float32 products depend on the batch in
    their last bits. A quantized layer amplifies this where a value lies at the boundary between two
    8-bit levels.
    """
    return 0.1 if library is None and QUANTIZED in features else 1e-3


@pytest.mark.sampled(step=8)
@pytest.mark.parametrize(("a", "b"), PAIRS, ids=lambda feature: feature.name)
def test_pair(matrix: Matrix, a: Feature, b: Feature) -> None:
    pair = {feature.name: feature for feature in (a, b)}.values()
    jobs, alone = matrix.jobs(*pair), matrix.alone(*pair)
    seen = run(matrix.engine(*pair), jobs, *pair)
    assert_same(seen.answers, alone, tolerance(*pair))
    if seen.beams:
        assert_same_beams(seen.beams, matrix.beams_alone(*pair))
    for feature in pair:
        feature.shows(seen)
        if feature.relates is not None and {a.name, b.name} != {GGUF.name, FALLBACK.name}:
            feature.relates(alone, matrix.alone(*[other for other in pair if other is not feature]))


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(
    "left_out",
    [
        (RECOMPUTE, FALLBACK, SPECULATION, LORA, OFFLOAD, HYBRID, KIMI),
        (SWAP, FALLBACK, MULTI_STEP, OVERLAP, OFFLOAD, HYBRID, KIMI),
        (RECOMPUTE, FALLBACK, SPECULATION, LORA, OFFLOAD, GGUF, KIMI),
    ],
    ids=["several steps", "drafts and adapters", "hybrid"],
)
def test_everything_at_once(matrix: Matrix, left_out: tuple[Feature, ...]) -> None:
    """Combine all features in every request and step, with one of the two preemption modes and
    Quire's own code. See `tolerance`: with torch's products, beams of equal score may change places
    in quantized models. Requests with different adapters share no prefix: only beams find theirs.
    """
    if library is None:
        left_out = (*left_out, QUANTIZED)
    features = [feature for feature in FEATURES if feature not in left_out]
    alone = matrix.alone(*features)
    seen = run(matrix.engine(*features), matrix.jobs(*features), *features)
    assert_same(seen.answers, alone)
    assert_same_beams(seen.beams, matrix.beams_alone(*features))
    for feature in features:
        if feature is PREFIX_CACHE and LORA in features:
            assert seen.counters["prefix_cache_hits"] > 0
        elif feature not in (SWAP, SPECULATION):  # test_pair shows these: here grammars forbid what
            # is drafted, and no request has to be preempted
            feature.shows(seen)


@pytest.mark.parametrize(
    ("parameters", "words"),
    REFUSED.items(),
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_refused_in_one_request(matrix: Matrix, parameters: tuple[str, ...], words: str) -> None:
    engine = matrix.engine()
    with pytest.raises((InvalidParameterError, TypeError), match=words):
        if "beam_width" in parameters:
            BeamSearchParams(**{name: EXAMPLES[name] for name in parameters})
        else:
            engine.add_request(
                "refused", "Once", SamplingParams(**{name: EXAMPLES[name] for name in parameters})
            )
    assert not engine.has_unfinished_requests()
