"""Records a model's step as one native call, and checks the record against the model's own code.

Must not know: architectures, requests, what a program consists of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ...kernels.cpu.native.program import recording
from ...kernels.cpu.native.recorder import Guard, Limits, Recorder, Unrecordable
from ...kernels.cpu.native.replay import Program
from ...kernels.ops import AttentionMetadata, ImageRows, StateRows, make_metadata
from ...kernels.registry import OpTable
from ..model import Forward, Model, Taps, uncounted

logger = logging.getLogger(__name__)

OPERATIONS = (
    "embedding",
    "pack_linear",
    "rms_norm",
    "fused_add_rms_norm",
    "rotary_embedding",
    "reshape_and_cache",
    "paged_attention",
    "silu_and_mul",
    "gelu_tanh_and_mul",
    "scale",
    "soft_cap",
    "multiply",
    "add",
    "gather_rows",
    "argmax",
    "route_experts",
    "count_experts",
    "fused_moe",
    "add_gated",
    "scale_by_expert",
    "stack_streams",
    "match_magnitude",
    "altup_predict",
    "altup_correct",
    "gaussian_top_k",
    "layer_norm",
    "fused_add_layer_norm",
    "gelu",
    "gelu_tanh",
    "silu",
    "relu",
    "relu_squared",
    "gelu_and_mul",
)  # what a model may be made of
LORA_OPERATIONS = ("add_lora", "add_lora_embedding")  # if its layers take adapters
ENCODER_OPERATIONS = ("encoder_attention",)  # if no layer has a KV cache
# if it has layers that keep states
STATE_OPERATIONS = "short_conv", "gated_delta_rule", "selective_scan", "gated_rms_norm"
# if it reads images
IMAGE_OPERATIONS = "replace_rows", "add_rows", "rotary_embedding_by_component"
TRIED_TOKENS = 5  # of the prompt that a program is checked with; fits in one block


class OpByOp:
    """A Forward that calls the model's code."""

    def __init__(self, model: Model, ops: OpTable):
        self.model, self.ops = model, ops

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor,
        token_types: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """See Forward."""
        model, ops = self.model, self.ops
        types = (token_types,) if model.num_token_types else ()
        if model.adapter_rows is not None:  # which adapters the rows of this step use
            model.adapter_rows.begin(metadata.adapters, logits_indices)
        hidden = model(token_ids, positions, metadata, *types)
        if not model.has_head:
            return (hidden,)
        logits = model.compute_logits(
            hidden
            if len(logits_indices) == len(hidden)
            else ops.gather_rows(hidden, logits_indices)
        )
        return hidden, logits, *ops.argmax(logits)


class WrappedForward:
    """A Forward around another one."""

    def __init__(self, forward: Forward):
        self.forward = forward


class StagedForward(WrappedForward):
    """A Forward of a model that is divided into stages."""

    def __init__(self, model: Model, forward: Forward):
        super().__init__(forward)
        self._model = model

    def __call__(self, token_ids: torch.Tensor, *step: Any) -> tuple[torch.Tensor, ...]:
        """See Forward."""
        self._model.receive_stream(len(token_ids))
        results = self.forward(token_ids, *step)
        self._model.send_stream(results[0])
        return results


class TappedForward(WrappedForward):
    """A Forward of a model whose layers a head that drafts reads."""

    def __init__(self, taps: Taps, forward: Forward):
        super().__init__(forward)
        self._taps = taps

    def __call__(self, token_ids: torch.Tensor, *step: Any) -> tuple[torch.Tensor, ...]:
        """See Forward."""
        self._taps.state[: len(token_ids)].zero_()
        return self.forward(token_ids, *step)


def record_step(
    model: Model,
    ops: OpTable,
    limits: Limits,
    num_groups: int = 1,
    all_agree: Callable[[bool], bool] = bool,
) -> Program | None:
    """Records the program of a model whose layers have their caches.

    `num_groups`: of layers that have block tables of their own. `all_agree`: whether something is
    true on all ranks that have parts of the layers; they run the program together or not at all.

    Returns None, and logs why, where the model must run operation by operation. The caches must
    hold nothing in block 0, which is never allocated to a request: it is overwritten during the
    check.
    """
    if not _is_native(model, ops):
        return None
    recorder = _recorder_for(model, limits, num_groups)
    program, reason = _attempt(lambda: _record(model, ops, recorder))
    if all_agree(program is not None) and program is not None:
        program, reason = _check(program, model, ops, num_groups)
        if not all_agree(program is not None):
            program = None
    else:
        program = None
    if program is None:
        logger.warning(
            "the model runs operation by operation, several times slower for small models; it "
            "cannot be recorded: %s",
            reason,
        )
        return None
    logger.info(
        "a step is one call of %d native kernels; at most %.1f MiB for what is between them",
        len(program.calls),
        program.num_bytes / 2**20,
    )
    return program


def _is_native(model: Model, ops: OpTable) -> bool:
    """Whether there is a native kernel for all that the model calls. Logs why not."""
    if model.UNRECORDABLE:
        logger.info("the model runs operation by operation: %s", model.UNRECORDABLE)
        return False
    operations = OPERATIONS + model.head_operations
    operations += () if model.adapter_rows is None else LORA_OPERATIONS
    operations += () if model.attention_layers() else ENCODER_OPERATIONS
    operations += STATE_OPERATIONS if model.state_layers() else ()
    operations += () if model.images is None else IMAGE_OPERATIONS
    others = [f"{op}={ops.chosen[op]}" for op in operations if op not in ops.native]
    if len(others) == len(operations):
        logger.info("the model runs operation by operation: there are no native kernels for it")
    elif others:
        logger.warning(
            "the model runs operation by operation, several times slower for small models, since "
            "not all are native: %s",
            " ".join(others),
        )
    return not others


def _attempt(step: Callable[[], Program]) -> tuple[Program | None, str]:
    """The result of `step`, or None and why it failed: a user's layer may raise anything."""
    try:
        return step(), "another rank cannot record its part"
    except Unrecordable as error:
        return None, str(error)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _check(
    program: Program, model: Model, ops: OpTable, num_groups: int
) -> tuple[Program | None, str]:
    """The program if it computes what the model does, else None and the reason."""

    def tried() -> Program:
        with uncounted(model):
            _try(program, model, ops, num_groups)
        return program

    try:
        return _attempt(tried)
    finally:
        for layer in model.attention_layers():
            for cache in (layer.key_cache, layer.value_cache):
                if cache is not None:  # a layer may have no values
                    cache[0] = 0


@torch.inference_mode()
def record_origins(
    model: Model, ops: Any, limits: Limits, num_groups: int, origin: Callable[[], Any]
) -> list[Any]:
    """Records a program that `record_step` has made once more, and returns what `origin` gives for
    each of its calls while it is recorded.
    """
    recorder = _recorder_for(model, limits, num_groups, origin)
    return [call.origin for call in _record(model, ops, recorder).calls]


def _recorder_for(
    model: Model, limits: Limits, num_groups: int, origin: Callable[[], Any] | None = None
) -> Recorder:
    has_adapters = model.adapter_rows is not None
    has = has_adapters, bool(model.state_layers()), model.images is not None
    return Recorder(limits, num_groups, model.num_token_types > 0, *has, origin)


@torch.inference_mode()
def _record(model: Model, ops: OpTable, recorder: Recorder) -> Program:
    with recording(recorder, Guard()):
        results = OpByOp(model, ops)(
            recorder.token_ids,
            recorder.positions,
            recorder.metadata,
            recorder.logits_indices,
            recorder.token_types,
        )
    return Program(recorder, *results, owners=model)


@torch.inference_mode()
def _try(program: Program, model: Model, ops: OpTable, num_groups: int) -> None:
    """Runs a decode and a prompt, or two texts, both ways and compares bits.

    This detects what the recorder cannot see, such as a layer that computes with numpy.
    """
    num_tokens = min(TRIED_TOKENS, program.limits.num_tokens)
    num_decodes = int(num_tokens > 1 and program.limits.num_requests > 1)
    query_lens = [1] * num_decodes + [num_tokens - num_decodes]
    positions = torch.tensor([0] * num_decodes + list(range(query_lens[-1])))
    slots = positions.clone()
    slots[:num_decodes] = -1  # reads the prompt's first key
    metadata = make_metadata(
        torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32),
        torch.tensor(query_lens, dtype=torch.int32),
        torch.zeros(num_groups, len(query_lens), 1, dtype=torch.int32).unbind(),
        slots.repeat(num_groups, 1).unbind(),
        sum(length == 1 for length in query_lens),
        query_lens,
        query_lens,
        torch.zeros(num_tokens, dtype=torch.int32) - 1 if model.adapter_rows is not None else None,
        _padding(len(query_lens)) if model.state_layers() else None,
        None if model.images is None else _tried_images(query_lens, positions),
    )
    token_ids = torch.arange(num_tokens, dtype=torch.int32) % model.config.vocab_size
    token_types = torch.zeros_like(token_ids) if model.num_token_types else None
    step = token_ids, positions, metadata, metadata.query_start_loc[1:].long() - 1, token_types
    state = model.state  # a head that drafts changes it
    state[:num_tokens] = torch.arange(state[:num_tokens].numel()).view_as(state[:num_tokens]) % 7
    before = state[:num_tokens].clone()
    recorded = [result.clone() for result in program(*step)]
    state[:num_tokens] = before
    for name, mine, own in zip(
        ("hidden states", "logits", "argmax", "finite rows"),
        recorded,
        OpByOp(model, ops)(*step),
    ):
        if (
            mine.shape != own.shape
            or mine.dtype != own.dtype
            or not torch.equal(*(t.contiguous().view(torch.uint8) for t in (mine, own)))
        ):
            raise Unrecordable(f"the record gives other {name} than the model's own code")


def _tried_images(query_lens: list[int], positions: torch.Tensor) -> ImageRows:
    """An image in the place of the last request's tokens but one, which see each other."""
    num_tokens, first = sum(query_lens), len(query_lens) - 1
    end = num_tokens - 1
    rows = torch.full((num_tokens,), -1, dtype=torch.int32)
    rows[first:end] = 0
    later = torch.zeros(num_tokens, dtype=torch.int32)
    later[first:end] = torch.arange(end - first - 1, -1, -1, dtype=torch.int32)
    offsets = torch.stack((positions * 0, -(positions // 2), -(positions // 3))).int()
    return ImageRows(rows, offsets, later)


def _padding(num_requests: int) -> StateRows:
    """Rows of padding, which change no state."""
    none = torch.full((num_requests,), -1)
    return StateRows(none.int(), none, none, none.int())
