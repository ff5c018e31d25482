"""The texts and conversations of one call as requests that pool: checked, tokenized beside the
event loop, admitted as one, and run.

Must not know: the format of any API's response.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ....ipc.errors import InvalidParameterError
from ....ipc.models.pooling import Pooling
from ....ipc.params import PoolingParams, SamplingParams
from ...outputs import RequestMetrics
from ...pooling_outputs import PoolingRequestOutput
from ...requests.input_processor import ProcessedRequest
from ...requests.prompts import IMAGES, PreparedImages, Prompt
from ...text.chat_images import Messages
from ..admission import in_turn
from ..http.call import HttpCall
from ..http.errors import ApiError, invalid, refused, unsupported
from ..state import ServerState
from .chat_turn import ChatTurn, render_turn
from .generation import failure, running_id, summary_of, until
from .tokenizing import check_num_characters

if TYPE_CHECKING:
    from ..admission import Slot

# At most this many characters and texts are tokenized at once, which takes about one millisecond.
SHORT_CHARACTERS, SHORT_BATCH = 4000, 32
SLICE_CHARACTERS, SLICE_TEXTS = 500_000, 256  # that are tokenized in one turn
BATCHES_AT_ONCE = 4  # large batches that the engine may hold


@dataclass(slots=True)
class PoolingJob:
    """What one call asks of its texts.

    `names` maps the engine's parameters to the body's fields, for errors; `prompt` is the field of
    the texts.
    """

    prefix: str  # of the request's id
    prompts: Sequence[Prompt]
    params: PoolingParams
    names: dict[str, str] = field(default_factory=dict)
    prompt_name: str | None = None
    priority: int = 0


async def prompts_of_conversations(
    state: ServerState,
    call: HttpCall,
    conversations: Sequence[Messages],
    name: str,
    held: ExitStack,
    *,
    add_generation_prompt: bool = False,
) -> list[Prompt]:
    """Returns a prompt of token ids, with its images, for each conversation. Their memory is
    counted until `held` is closed. name: the field of the body, for errors. Raises ApiError.
    """
    prompts: list[Prompt] = []
    for number, messages in enumerate(conversations):
        turn = ChatTurn(
            request_id=f"{call.request_id}-{number}",
            messages=messages,
            params=SamplingParams(),
            add_generation_prompt=add_generation_prompt,
            names={"prompt": name, "multi_modal_data": name},
        )
        rendered = await render_turn(state, call, turn)
        num_bytes = sum(len(item.pixels.data) for item in rendered.images)
        held.enter_context(state.held_pixels.holding(call.tenant, num_bytes))
        images = PreparedImages(rendered.images)
        prompts.append({"prompt_token_ids": rendered.token_ids, IMAGES: images})
    return prompts


def pooling_of(state: ServerState, tasks: Sequence[str], model: str | None) -> Pooling:
    """Returns how the model pools, which must have one of the tasks. Raises ApiError that names
    `model`.
    """
    engine, name = state.ready_engine(), state.check_base(model)
    config = engine.config.model_config
    pooling = config.pooling
    if pooling is None or not set(tasks) & set(pooling.tasks):
        can = [] if pooling is None else list(pooling.tasks)
        if config.runner != "pooling":
            can.append("generate text")
        raise unsupported(
            "model",
            f"The model {name!r} cannot {' or '.join(tasks)}; it can {', '.join(can)}.",
        )
    return pooling


async def run_pooling(
    state: ServerState, call: HttpCall, job: PoolingJob
) -> list[PoolingRequestOutput]:
    """Returns the outputs of the texts, in their order. Each text has a result.

    If it is cancelled, all requests are aborted. Raises ApiError.
    """
    engine = state.ready_engine()
    metrics: list[RequestMetrics] = []
    slot: Slot | None = None
    outputs: list[PoolingRequestOutput] = []
    with running_id(state, job.prefix) as request_id:
        try:
            requests = await _processed(state, call, job, request_id)
            admission = state.ready_admission()
            num_tokens = sum(len(r.core_request.prompt_token_ids) for r in requests)
            weight = min(len(requests), max(1, admission.max_running // BATCHES_AT_ONCE))
            slot = admission.slot(
                call.tenant, id(call), weight, num_tokens, job.priority, call.deadline
            )
            async with slot:
                outputs = await engine.run_batch(requests, on_submitted=metrics.append)
            for output in outputs:
                if output.result is None:
                    raise _failure(output, job.names)
            return outputs
        except InvalidParameterError as error:
            raise refused(error.parameter, error.problem, job.names) from None
        finally:
            if metrics:
                # Without outputs, the client has disconnected.
                reason = "error" if engine.errored else "abort"
                reasons = [output.finish_reason for output in outputs] or [reason] * len(metrics)
                queued_s = slot.queued_s if slot is not None else 0.0
                for one, its_reason in zip(metrics, reasons):
                    state.meters.request_ended(job.params, one, its_reason, queued_s)
                summary = summary_of(state, call, reasons[-1]) | {"num_texts": len(job.prompts)}
                state.request_log.add(request_id, _together(metrics), summary)


async def _processed(
    state: ServerState, call: HttpCall, job: PoolingJob, request_id: str
) -> list[ProcessedRequest]:
    """Returns the requests of all texts, checked and tokenized."""
    engine, prompts = state.ready_engine(), job.prompts
    params = until(call.deadline, job.params)
    texts = [text for prompt in prompts for text in _texts(prompt)]
    if texts and engine.tokenizer is None:
        raise invalid(
            job.names.get("prompt", "prompt"),
            "This model has no tokenizer: prompts must be token ids.",
        )
    for text in texts:
        check_num_characters(len(text), job.names.get("prompt", "prompt"), state.max_model_len)
    if state.server_config.salt_per_key and call.tenant:
        prompts = [_salted(prompt, call.tenant) for prompt in prompts]
    options = {
        "priority": job.priority,
        "owner": call.tenant,
        "owner_weight": call.weight,
        "prompt_name": job.prompt_name,
    }
    session, found = engine.session, []
    for start, end in _slices(prompts):
        ids = [f"{request_id}-{i}" for i in range(start, end)]
        part = (start, len(prompts))
        read = partial(session.process_batch, ids, prompts[start:end], params, part=part, **options)
        if sum(map(len, texts)) < SHORT_CHARACTERS and len(prompts) <= SHORT_BATCH:
            found += read()
        else:
            found += await in_turn(state.work_turns, call, read)
    return found


def _slices(prompts: Sequence[Prompt]) -> list[tuple[int, int]]:
    """Returns start and end of what is tokenized together."""
    found, start, num_characters = [], 0, 0
    for i, prompt in enumerate(prompts):
        length = sum(map(len, _texts(prompt)))
        if i > start and (num_characters + length > SLICE_CHARACTERS or i - start == SLICE_TEXTS):
            found.append((start, i))
            start, num_characters = i, 0
        num_characters += length
    return [*found, (start, len(prompts))]


def _texts(prompt: Prompt) -> list[str]:
    if isinstance(prompt, dict):
        return [text for key in ("prompt", "text_pair") if (text := prompt.get(key)) is not None]
    return [prompt] if isinstance(prompt, str) else []


def _salted(prompt: Prompt, salt: str) -> Prompt:
    if isinstance(prompt, dict):
        return prompt | {"cache_salt": salt}
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, "cache_salt": salt}


def _failure(output: PoolingRequestOutput, names: dict[str, str]) -> ApiError:
    if output.finish_reason == "timeout":
        return ApiError(408, "The time of x-timeout-s was over.", code="request_timeout")
    if output.finish_reason == "abort":
        return ApiError(503, "The request was aborted.", code="aborted", retry_after_s=1.0)
    return failure(output, names)


def _together(metrics: list[RequestMetrics]) -> RequestMetrics:
    """Returns the first and last times of all requests of a call, and its tokens."""
    if len(metrics) == 1:
        return metrics[0]
    last = max(metrics, key=lambda one: one.finished_time or 0.0)
    return replace(
        metrics[0],
        first_token_time=min((m.first_token_time or 0.0 for m in metrics), default=None),
        last_token_time=last.last_token_time,
        finished_time=last.finished_time,
        last_token_ts=last.last_token_ts,
        num_prompt_tokens=sum(m.num_prompt_tokens for m in metrics),
        num_cached_tokens=sum(m.num_cached_tokens or 0 for m in metrics),
    )
