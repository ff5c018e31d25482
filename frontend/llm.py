"""LLM: the class for scripts. It takes prompts and returns all outputs in order.

Must not know: clients, messages, steps of the engine beyond LLMEngine.step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, cast, overload

from ..ipc.checks import require_kind
from ..ipc.errors import InvalidParameterError
from ..ipc.lora import LoRARequest
from ..ipc.params import PoolingParams, RequestOutputKind, SamplingParams, require_sampling
from .arguments import vllm_arguments
from .clients.guard import Guard
from .engine_args import EngineArgs, LLMArguments, takes
from .engine_calls import BlockingCalls
from .llm_engine import LLMEngine, run_in_windows
from .outputs import RequestOutput
from .pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    Rows,
    ScoringRequestOutput,
)
from .progress import ProgressBar
from .requests.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, first_params
from .requests.input_processor import ProcessedRequest
from .requests.lora_requests import to_reload
from .requests.pooling_inputs import with_task
from .requests.prompts import (
    IMAGES,
    NO_IMAGES,
    GivenImages,
    Prompt,
    error_in_request,
    one_each,
    prompt_list,
    with_processor_kwargs,
)
from .requests.scoring import pair_up, score_prompts, scores_of, scoring_task

if TYPE_CHECKING:
    import numpy as np

ChatMessage = dict[str, Any]
Loras = LoRARequest | Sequence[LoRARequest | None] | None


class LLM(BlockingCalls):
    """A loaded model.

    model: "bundled", a directory, a GGUF file, or a name on the hub (also "org/name:Q4_K_M" and
    "org/name/file.gguf"). engine: "process" (a child of this process), "inproc" (this process), or
    the address of a running daemon ("ipc://..."). arguments: those of EngineArgs, such as
    tokenizer, dtype, max_model_len, max_num_seqs, enable_prefix_caching, seed.

    Threads may share one instance: their calls run one after the other. A fork of the process
    cannot use it and gets EngineUsageError.
    """

    @takes(LLMArguments)
    def __init__(self, model: str = "bundled", *, engine: str = "process", **arguments: Any):
        self.llm_engine = LLMEngine.from_engine_args(EngineArgs(model, **arguments), engine)
        self.session = self.llm_engine.session
        self._num_requests = 0
        self._enqueued: list[ProcessedRequest] = []  # sent; wait_for_completion returns them
        self._turn = Guard(waits=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine, or disconnects from the daemon.

        May be called twice and by any thread. A call of another thread ends with EngineDeadError,
        as does every later call. In a fork of the process it does nothing.
        """
        self.llm_engine.client.shutdown()  # a call of another thread ends and releases the guard
        if not self._turn.is_in_fork:
            with self._turn:
                self.llm_engine.shutdown()

    def call_utility(self, method: str, *args: Any) -> Any:
        with self._turn:
            return self.llm_engine.call_utility(method, *args)

    def restart_engines(self) -> None:
        with self._turn:
            self.llm_engine.restart_engines()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        priority: int | Sequence[int] | None = None,
        trace_headers: dict[str, str] | None = None,
        lora_request: Loras = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Returns one RequestOutput per prompt, in the order of the prompts.

        prompts: one or several; each a string, a list of token ids, or a dict with `prompt` or
        `prompt_token_ids` and, for its placeholders, `multi_modal_data`, {"image": [picture]}.
        sampling_params: one for all, or one per prompt; None: get_default_sampling_params().
        trace_headers: the caller's trace context for all requests (LLMEngine.add_request).
        lora_request: the adapter for all, or one per prompt. mm_processor_kwargs: replace keys of
        preprocessor_config.json for the images. tokenization_kwargs: vLLM's; must be None.

        Raises InvalidParameterError before anything is submitted if a prompt or parameter is
        invalid. A request that fails inside the engine ends with finish_reason "error" and a
        message in `error`; the other requests continue. Errors that only the engine can detect,
        such as a grammar that does not compile, also set `error_parameter`; with a single prompt
        they raise InvalidParameterError. Any exception during the call, KeyboardInterrupt included,
        aborts all submitted requests.
        """
        if tokenization_kwargs is not None:
            vllm_arguments.require_nothing(tokenization_kwargs=tokenization_kwargs)
        if mm_processor_kwargs:
            self.llm_engine.images.require_vision("mm_processor_kwargs")
            prompts = with_processor_kwargs(prompt_list(prompts), mm_processor_kwargs)
        with self._turn:
            self._require_idle()
            requests = self._process(prompts, sampling_params, priority, lora_request)
            outputs = self._run(requests, use_tqdm, trace_headers)
        if len(outputs) == 1 and outputs[0].error_parameter is not None:
            raise _refusal(outputs[0])
        return outputs

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        lora_request: Loras = None,
    ) -> list[str]:
        """Sends the prompts and returns their request ids; may be called several times before
        wait_for_completion. The parameters are those of `generate`. An engine in another process
        computes meanwhile.
        """
        with self._turn:
            if not self._enqueued:
                self._require_idle()
            requests = self._process(prompts, sampling_params, priority, lora_request)
            for request in requests:
                self.session.submit(request)
                self._enqueued.append(request)
        return [request.request_id for request in requests]

    def wait_for_completion(
        self, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[RequestOutput]:
        """Returns the outputs of all enqueued prompts, in the order in which they were enqueued.

        An exception, KeyboardInterrupt included, aborts them.
        """
        with self._turn:
            sent, self._enqueued = self._enqueued, []
            return self._run([], use_tqdm, sent=sent)

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Calls function(model) in the engine and returns the result of each rank. Use it to
        inspect the model only: kernels keep packed copies of weights, and a change does not reach
        them.

        Raises EngineUsageError unless the engine is "inproc" with one rank.
        """
        with self._turn:
            return self.llm_engine.client.apply_model(function)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        trace_headers: dict[str, str] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Returns an iterator over one prompt's new output, as soon as it arrives:

            for output in llm.stream("Once upon a time"):
                print(output.outputs[0].text, end="", flush=True)

        The parameters are those of `generate`; output_kind is DELTA. Raises InvalidParameterError
        at once. Other calls that generate raise RuntimeError until the iterator is read to its end
        or closed, which aborts the request. Leaving the loop closes it. Any thread may read it.
        """
        if sampling_params is None:
            sampling_params = self.session.default_sampling_params
        with self._turn:
            self._require_idle()
            request = self.session.process(
                str(self._num_requests),
                prompt,
                require_sampling(sampling_params),
                priority=priority,
                lora_request=lora_request,
                output_kind=RequestOutputKind.DELTA,
            )
            self._num_requests += 1
            for adapter in to_reload([lora_request]):
                self.llm_engine.add_lora(adapter)
        return self._read_stream(request, trace_headers)

    def _read_stream(
        self, request: ProcessedRequest, trace_headers: dict[str, str] | None
    ) -> Iterator[RequestOutput]:
        """Submits the request when it is read first, since an iterator that never was is not
        closed.
        """
        with self._turn:
            self._require_idle()
            self.session.submit(request, trace_headers)
        try:
            while self.llm_engine.has_unfinished_requests():
                with self._turn:
                    outputs = self.llm_engine.step()
                for output in outputs:
                    assert isinstance(output, RequestOutput)  # of what was submitted here
                    if output.error_parameter is not None:
                        raise _refusal(output)
                    yield output
        finally:
            if self.llm_engine.has_unfinished_requests():
                with self._turn:
                    self.llm_engine.abort_request(request.request_id)

    def _process(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None = None,
        lora_request: Loras = None,
    ) -> list[ProcessedRequest]:
        """Checks and tokenizes the prompts, and reloads adapters. Raises InvalidParameterError for
        an invalid one.
        """
        prompts = prompt_list(prompts)
        if sampling_params is None:
            sampling_params = self.session.default_sampling_params
        params = one_each("sampling_params", sampling_params, len(prompts))
        options: list[dict[str, Any]] = [{}] * len(prompts)
        if priority is not None or lora_request is not None:
            options = _options_of_each(len(prompts), priority, lora_request)
        requests: list[ProcessedRequest] = []
        try:
            for i, prompt in enumerate(prompts):
                request = self.session.process(
                    str(self._num_requests + i),
                    prompt,
                    params[i],
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    **options[i],
                )
                requests.append(request)
        except InvalidParameterError as error:
            raise error_in_request(error, len(requests), len(prompts)) from None
        self._num_requests += len(requests)
        if lora_request is not None:
            for adapter in to_reload([own["lora_request"] for own in options]):
                self.llm_engine.add_lora(adapter)
        return requests

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool | Callable[..., Any] = False,
        lora_request: Loras = None,
    ) -> list[BeamSearchOutput]:
        """Returns the params.beam_width most likely continuations of each prompt, best first. The
        beams of all prompts are computed in the same steps.

        Raises the errors of `generate`. If a step of a search fails inside the engine, that search
        ends with the message in `error`; the others continue.
        """
        with self._turn:
            self._require_idle()
            searches = self._search(prompts, params, use_tqdm, lora_request)
        return [search.output(self.tokenizer) for search in searches]

    def _search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool | Callable[..., Any],
        lora_request: Loras,
    ) -> list[BeamSearch]:
        """Runs the beam searches of all prompts to their ends."""
        requests = self._process(prompts, first_params(params), lora_request=lora_request)
        searches = [
            BeamSearch(request, params, self.llm_engine.config.model_config) for request in requests
        ]
        progress = ProgressBar(len(searches), use_tqdm)
        try:
            while running := [search for search in searches if not search.is_done]:
                prompts_of_step = [prompt for search in running for prompt in search.step_prompts]
                params_of_step = [search.step_params for search in running for _ in search.running]
                loras = [search.lora_request for search in running for _ in search.running]
                requests = self._process(prompts_of_step, params_of_step, lora_request=loras)
                outputs = iter(self._run(requests, use_tqdm=False))
                for search in running:
                    search.advance([next(outputs) for _ in search.running])
                    if search.is_done:
                        progress.update(
                            len(search.prompt_token_ids),
                            sum(len(sequence.tokens) for sequence in search.finished),
                        )
        finally:
            progress.close()
        return searches

    def chat(
        self,
        messages: str | Sequence[ChatMessage] | Sequence[str | Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        chat_template_content_format: str = "auto",
        lora_request: Loras = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Returns one answer per conversation; `messages` is one conversation or several. Text
        alone stands for a conversation of one message, the user's. The content of a message may be
        a list of parts, of text and of images: {"type": "image_url", "image_url": {"url": ...}},
        or {"type": "image", "image": picture}.

        For the other parameters see `generate` and Tokenizer.apply_chat_template.
        """
        vllm_arguments.accept("chat_template_content_format", chat_template_content_format)
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidParameterError(
                "messages", "need a tokenizer: this engine runs with skip_tokenizer_init=True"
            )
        options = {
            "tools": tools,
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **(chat_template_kwargs or {}),
        }
        placeholder = self.llm_engine.images.placeholder
        prompts: list[Prompt] = []
        for conversation in _conversations(messages):
            text, images = tokenizer.render_chat(conversation, placeholder, **options)
            if images:
                given = GivenImages(images, add_special_tokens=False)
                prompts.append({"prompt": text, IMAGES: given})
            else:
                token_ids = tokenizer.encode(text, add_special_tokens=False)
                prompt = {"prompt": text, "prompt_token_ids": token_ids, IMAGES: NO_IMAGES}
                prompts.append(prompt)
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )

    # ------------------------------------------------------------ pooling

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        prompt_name: str | None = None,
        trace_headers: dict[str, str] | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Returns one PoolingRequestOutput per prompt, in the order of the prompts.

        prompts: as for `generate`; a dict may hold a pair of texts, `prompt` and `text_pair`.
        pooling_params: one for all, or one per prompt. pooling_task: "embed", "classify",
        "token_embed" or "token_classify"; None: that of the parameters, else the model's first.
        prompt_name: the model's prompt to put in front of each text; None: its default one, if any.

        Prompts are tokenized and submitted in windows, so memory depends on the results alone.
        Raises InvalidParameterError for an invalid prompt or parameter. A request that fails inside
        the engine has a message in `error`; its `outputs` raise it. Any exception during the call,
        KeyboardInterrupt included, aborts all submitted requests.
        """
        vllm_arguments.require_nothing(
            lora_request=lora_request, tokenization_kwargs=tokenization_kwargs
        )
        several = prompt_list(prompts)
        params = PoolingParams() if pooling_params is None else pooling_params
        found: list[Any] = [None] * len(several)
        self._pool(
            several, params, pooling_task, found.__setitem__, use_tqdm, prompt_name, trace_headers
        )
        if len(found) == 1 and found[0].error_parameter is not None:
            raise _refusal(found[0])
        return found

    @overload
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        as_array: Literal[False] = False,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Any,
    ) -> list[EmbeddingRequestOutput]: ...

    @overload
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        as_array: Literal[True],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Any,
    ) -> np.ndarray: ...

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        as_array: bool = False,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Any,
    ) -> Any:
        """Returns the embedding of each prompt: `outputs.data` is a numpy array,
        `outputs.embedding` a list.

        as_array: returns one array instead, f4 [number of prompts, size], and keeps nothing else; a
        request that fails raises QuireError. `options` are use_tqdm, prompt_name and the others of
        `encode`.
        """
        if not as_array:
            return self.encode(prompts, pooling_params, pooling_task="embed", **options)
        vllm_arguments.require_nothing(
            lora_request=options.pop("lora_request", None),
            tokenization_kwargs=options.pop("tokenization_kwargs", None),
        )
        rows = Rows(several := prompt_list(prompts))
        params = PoolingParams() if pooling_params is None else pooling_params
        self._pool(several, params, "embed", rows.take, **options)
        return rows.array()

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Any,
    ) -> list[ClassificationRequestOutput]:
        """Returns the classes of each prompt, as `outputs.probs`. `options` are those of
        `encode`.
        """
        found = self.encode(prompts, pooling_params, pooling_task="classify", **options)
        return cast("list[ClassificationRequestOutput]", found)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """Scores one text with each of several, or two lists text by text. The score is
        `outputs.score`.

        A model that classifies with one class reads both texts together (a cross-encoder). For a
        model that embeds, the score is the cosine of both embeddings. For one with an embedding for
        each token, it is MaxSim. `options` are those of `encode`.
        """
        pooling = self.session.input_processor.pooling
        task = scoring_task(pooling)
        first, second = ([d] if isinstance(d, str) else list(d) for d in (data_1, data_2))
        pairs = pair_up(first, second, ("data_1", "data_2"))
        prompts = score_prompts(task, first, second, pairs)
        found = self.encode(prompts, pooling_params, pooling_task=task, **options)
        return scores_of(task, found, len(first), pairs, pooling)

    def _pool(
        self,
        prompts: list[Prompt],
        params: PoolingParams | Sequence[PoolingParams],
        task: str | None,
        take: Callable[[int, PoolingRequestOutput], None],
        use_tqdm: bool | Callable[..., Any] = True,
        prompt_name: str | None = None,
        trace_headers: dict[str, str] | None = None,
    ) -> None:
        """Calls `take` with each prompt's index and output."""
        several = with_task(one_each("pooling_params", params, len(prompts)), task)
        progress = ProgressBar(len(prompts), use_tqdm)

        def taken(index: int, output: PoolingRequestOutput) -> None:
            take(index, output)
            progress.update(len(output.prompt_token_ids), 0)

        with self._turn:
            self._require_idle()
            first_id, self._num_requests = self._num_requests, self._num_requests + len(prompts)
            try:
                run_in_windows(
                    self.llm_engine,
                    zip(prompts, several, strict=True),
                    len(prompts),
                    first_id,
                    taken,
                    trace_headers,
                    prompt_name=prompt_name,
                )
            except BaseException:
                self.llm_engine.abort_all_requests()
                raise
            finally:
                progress.close()

    def _require_idle(self) -> None:
        if self.llm_engine.has_unfinished_requests():
            raise RuntimeError(
                "requests of llm_engine, enqueue or a stream are unfinished: step the engine until "
                "they end, wait_for_completion, or read the stream to its end"
            )

    def _run(
        self,
        requests: list[ProcessedRequest],
        use_tqdm: bool | Callable[..., Any],
        trace_headers: dict[str, str] | None = None,
        sent: Sequence[ProcessedRequest] = (),
    ) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        progress = ProgressBar(len(sent) + len(requests), use_tqdm) if use_tqdm else None
        try:
            for request in requests:
                self.session.submit(request, trace_headers)
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step():
                    assert isinstance(output, RequestOutput)  # of what was submitted here
                    finished[output.request_id] = output
                    if progress is not None:
                        num_tokens = sum(len(one.token_ids) for one in output.outputs)
                        progress.update(len(output.prompt_token_ids), num_tokens)
        except BaseException:
            self.llm_engine.abort_all_requests()
            raise
        finally:
            if progress is not None:
                progress.close()
        return [finished[request.request_id] for request in (*sent, *requests)]


def _options_of_each(
    num_prompts: int, priority: int | Sequence[int] | None, lora_request: Loras
) -> list[dict[str, Any]]:
    """Returns the options of LLM._process that may differ from prompt to prompt."""
    priorities = one_each("priority", 0 if priority is None else priority, num_prompts)
    loras = one_each("lora_request", lora_request, num_prompts)
    return [
        {"priority": own_priority, "lora_request": adapter}
        for own_priority, adapter in zip(priorities, loras, strict=True)
    ]


def _conversations(messages: Any) -> list[list[ChatMessage]]:
    """Returns the conversations in the argument `messages` of LLM.chat."""
    is_one = isinstance(messages, str | dict) or (
        isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], dict)
    )
    several = [messages] if is_one else messages
    kind = "a text, a list of messages, or a list of these"
    require_kind(isinstance(several, Sequence), "messages", kind, messages)
    conversations: list[list[ChatMessage]] = []
    for one in several:
        require_kind(isinstance(one, Sequence), "messages", kind, one)
        conversations.append(
            [{"role": "user", "content": one}] if isinstance(one, str) else list(one)
        )
    return conversations


def _refusal(output: RequestOutput | PoolingRequestOutput) -> InvalidParameterError:
    """Returns the error of a request for which the engine refused a parameter."""
    parameter = output.error_parameter or ""
    return InvalidParameterError(parameter, (output.error or "").removeprefix(f"{parameter}: "))
