"""Beam search outside the engine: each step requests one token of every beam with the most likely
candidates.

Must not know: engines, clients, who runs the steps (LLM.beam_search and AsyncLLM.beam_search do).

Each beam is a request for one token after prompt + beam. The beams of a prompt share their KV cache
through the prefix cache: a step computes only the tokens after the last full block. The search
follows the rules of transformers' `generate(num_beams=...)`; the names are vLLM's.
"""

from __future__ import annotations

import heapq
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgspec

from ...ipc.checks import INT64_MAX, NamedArguments, is_finite, require, require_int, require_kind
from ...ipc.config import ModelConfig
from ...ipc.params import ALL_LOGPROBS, RequestOutputKind, SamplingParams
from ..outputs import PositionLogprobs, RequestOutput
from ..text.tokenizer import Tokenizer
from .input_processor import ProcessedRequest
from .prompts import IMAGES, PreparedImages


class BeamSearchParams(msgspec.Struct, metaclass=NamedArguments, frozen=True):
    """Parameters of a beam search. Raises InvalidParameterError on construction.

    A finished beam's score is its log-probability / (number of its output tokens **
    length_penalty). A length_penalty above 0 favours long beams. early_stopping: True ends as soon
    as beam_width beams are finished; False when no running beam could be better at its present
    length; "never" when none could at any length.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    # the search uses the model's own log-probabilities, so only 0 and 1 are accepted; both change
    # nothing
    temperature: float = 0.0
    length_penalty: float = 1.0
    # keeps the end-of-sequence token at the end of `tokens` and `text`
    include_stop_str_in_output: bool = False
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        require_int("beam_width", self.beam_width, 1, INT64_MAX)
        require_int("max_tokens", self.max_tokens, 1, INT64_MAX)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            value = getattr(self, name)
            require_kind(isinstance(value, bool), name, "True or False", value)
        is_plain = is_finite(self.temperature) and self.temperature in (0, 1)
        kind = "0 or 1 for a beam search, which uses the model's own log-probabilities"
        require_kind(is_plain, "temperature", kind, self.temperature)
        in_range = is_finite(self.length_penalty) and -100 <= self.length_penalty <= 100
        require_kind(in_range, "length_penalty", "between -100 and 100", self.length_penalty)
        is_known = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        require_kind(is_known, "early_stopping", 'True, False or "never"', self.early_stopping)


@dataclass(slots=True)
class BeamSearchSequence:
    """One finished beam.

    `tokens` and `text` begin with the prompt, as in vLLM; `logprobs` covers the output tokens.
    """

    tokens: list[int]
    logprobs: list[PositionLogprobs]
    cum_logprob: float  # of all output tokens, the end-of-sequence token included
    score: float  # sorts the sequences
    text: str | None = None
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | None = None  # the end-of-sequence token

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for json.dumps."""
        return asdict(self)


@dataclass(slots=True)
class BeamSearchOutput:
    """The result: `sequences` has beam_width entries, best first. If the search failed, it is empty
    and `error` has the reason.
    """

    sequences: list[BeamSearchSequence]
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for json.dumps, also those of the sequences."""
        return asdict(self)


@dataclass(slots=True)
class Beam:
    """A running beam with its output tokens so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    cum_logprob: float = 0.0


class BeamSearch:
    """The search for one prompt.

    Until is_done, run `step_prompts` with `step_params` and pass the outputs to `advance`.
    """

    def __init__(
        self, request: ProcessedRequest, params: BeamSearchParams, model_config: ModelConfig
    ):
        """`request`: the prompt, processed with first_params(params).

        Raises InvalidParameterError if beam_width is too large.
        """
        core_request = request.core_request
        self.prompt_token_ids = core_request.prompt_token_ids
        self.lora_request = core_request.lora_request
        self._images = core_request.images
        max_tokens = core_request.sampling_params.max_tokens
        assert max_tokens is not None  # set by the InputProcessor
        self.max_tokens = max_tokens
        self.params = params
        self.error: str | None = None
        self._eos_token_ids = frozenset(core_request.eos_token_ids)
        # A beam can end with each end-of-sequence token. One more candidate per beam ensures that
        # beam_width beams continue.
        num_per_beam = max(2, 1 + len(self._eos_token_ids))
        self.num_candidates = num_per_beam * params.beam_width
        _check_width(params.beam_width, num_per_beam, model_config)
        self.step_params = SamplingParams(
            temperature=0.0,
            seed=0,
            max_tokens=1,
            ignore_eos=True,
            logprobs=self.num_candidates,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.running = [Beam()]
        # the best beam_width so far, best first; `tokens` does not include the prompt
        self.finished: list[BeamSearchSequence] = []

    @property
    def is_done(self) -> bool:
        return not self.running

    @property
    def step_prompts(self) -> list[dict[str, Any]]:
        images = PreparedImages(self._images)
        return [
            {"prompt_token_ids": self.prompt_token_ids + beam.token_ids, IMAGES: images}
            for beam in self.running
        ]

    def advance(self, outputs: list[RequestOutput]) -> None:
        """Adds one token to each beam. `outputs` is parallel to step_prompts."""
        self.error = next((output.error for output in outputs if output.error is not None), None)
        if self.error is not None:
            self.running = []
            return
        candidates = [
            (beam.cum_logprob + candidate.logprob, beam, token_id, position)
            for beam, output in zip(self.running, outputs, strict=True)
            for position in output.outputs[0].logprobs or ()
            for token_id, candidate in position.items()
        ]
        num_tokens = len(self.running[0].token_ids) + 1
        running: list[Beam] = []
        for place, (cum_logprob, beam, token_id, position) in enumerate(
            heapq.nlargest(self.num_candidates, candidates, key=lambda c: c[0])
        ):
            extended = Beam([*beam.token_ids, token_id], [*beam.logprobs, position], cum_logprob)
            is_end = token_id in self._eos_token_ids
            if not is_end and num_tokens < self.max_tokens:
                running.append(extended)
            elif place < self.params.beam_width:
                # the other candidates only replace running beams that end
                self.finished.append(self._sequence(extended, is_end))
        self.finished = heapq.nlargest(
            self.params.beam_width, self.finished, key=lambda sequence: sequence.score
        )
        self.running = (
            [] if self._is_decided(running, num_tokens) else running[: self.params.beam_width]
        )

    def _sequence(self, beam: Beam, is_end: bool) -> BeamSearchSequence:
        score = beam.cum_logprob / len(beam.token_ids) ** self.params.length_penalty
        reasons = ("stop", beam.token_ids[-1]) if is_end else ("length", None)
        return BeamSearchSequence(
            beam.token_ids, beam.logprobs, beam.cum_logprob, score, None, *reasons
        )

    def _is_decided(self, running: list[Beam], num_tokens: int) -> bool:
        """Whether the finished beams are the result, by the rule of early_stopping.

        `running` is sorted best first; each beam has `num_tokens` tokens.
        """
        if not running or len(self.finished) < self.params.beam_width:
            return False
        early_stopping = self.params.early_stopping
        length_penalty = self.params.length_penalty
        best_length = (
            self.max_tokens if early_stopping == "never" and length_penalty > 0 else num_tokens
        )
        return (
            early_stopping is True
            or running[0].cum_logprob / best_length**length_penalty <= self.finished[-1].score
        )

    def output(self, tokenizer: Tokenizer | None) -> BeamSearchOutput:
        """Returns the result, once is_done."""
        if self.error is not None:
            return BeamSearchOutput([], self.error)
        for sequence in self.finished:
            if sequence.finish_reason == "stop" and not self.params.include_stop_str_in_output:
                sequence.tokens = sequence.tokens[:-1]
                sequence.logprobs = sequence.logprobs[:-1]
            sequence.tokens = self.prompt_token_ids + sequence.tokens
            sequence.text = None if tokenizer is None else tokenizer.decode(sequence.tokens)
        return BeamSearchOutput(self.finished)


def first_params(params: BeamSearchParams) -> SamplingParams:
    """Parameters with which the InputProcessor checks a prompt, finds the end-of-sequence tokens
    and limits max_tokens.
    """
    require(
        isinstance(params, BeamSearchParams),
        "params",
        f"must be BeamSearchParams, got {type(params).__name__}",
    )
    return SamplingParams(
        temperature=0.0, seed=0, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos
    )


def _check_width(beam_width: int, num_per_beam: int, model_config: ModelConfig) -> None:
    vocab_size = model_config.hf_config["vocab_size"]
    most = (
        vocab_size
        if model_config.max_logprobs == ALL_LOGPROBS
        else min(model_config.max_logprobs, vocab_size)
    )
    problem = (
        f"must be at most {most // num_per_beam}, got {beam_width}: a step needs the "
        f"{num_per_beam} * beam_width most likely tokens, "
        f"of which max_logprobs={model_config.max_logprobs} and the vocabulary give {most}"
    )
    require(beam_width * num_per_beam <= most, "beam_width", problem)
