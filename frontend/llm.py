"""LLM: the class for scripts. Takes prompts and returns all outputs in order.

Must not know: clients, messages, steps of the engine beyond LLMEngine.step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Self, Unpack

import msgspec

from ..ipc.errors import InvalidParameterError
from ..ipc.params import RequestOutputKind, SamplingParams
from .arguments import vllm_arguments
from .arguments.engine_arguments import EngineArguments
from .clients.guard import Guard
from .engine_args import EngineArgs
from .llm_engine import LLMEngine
from .outputs import RequestOutput
from .requests.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, first_params
from .requests.input_processor import ProcessedRequest, Prompt
from .session import BlockingCalls

Message = dict[str, Any]


class LLM(BlockingCalls):
    """A loaded model.

    model: "bundled", a directory, a GGUF file, or a name on the hub (also "org/name:Q4_K_M" and
    "org/name/file.gguf"). engine: "process" (a child of this process), "inproc" (this process), or
    the address of a running daemon ("ipc://..."). arguments: those of EngineArgs, such as
    tokenizer, dtype, max_model_len, max_num_seqs, enable_prefix_caching, seed.

    Threads may share one instance: their calls run one after the other. A fork of the process
    cannot use it and gets EngineUsageError.
    """

    def __init__(
        self,
        model: str = "bundled",
        *,
        engine: str = "process",
        **arguments: Unpack[EngineArguments],
    ):
        self.llm_engine = LLMEngine.from_engine_args(EngineArgs(model, **arguments), engine)
        self.session = self.llm_engine.session
        self._num_requests = 0
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

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        priority: int | Sequence[int] | None = None,
        trace_headers: dict[str, str] | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Returns one RequestOutput per prompt, in the order of the prompts.

        prompts: one or several; each a string, a list of token ids, or a dict with `prompt` or
        `prompt_token_ids`. sampling_params: one for all, or one per prompt; None:
        get_default_sampling_params(). trace_headers: the caller's trace context for all requests
        (LLMEngine.add_request). lora_request, tokenization_kwargs, mm_processor_kwargs: vLLM's
        arguments that Quire does not support; must be None.

        Raises InvalidParameterError before anything is submitted if a prompt or parameter is
        invalid. A request that fails inside the engine ends with finish_reason "error" and a
        message in `error`; the other requests continue. Errors that only the engine can detect,
        such as a grammar that does not compile, also set `error_parameter`; with a single prompt
        they raise InvalidParameterError. Any exception during the call, KeyboardInterrupt included,
        aborts all submitted requests.
        """
        vllm_arguments.require_nothing(
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        several = _prompt_list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _one_each("sampling_params", sampling_params, len(several))
        priorities = _one_each("priority", 0 if priority is None else priority, len(several))
        with self._turn:
            outputs = self._run(self._process(several, params, priorities), use_tqdm, trace_headers)
        if len(outputs) == 1 and (parameter := outputs[0].error_parameter) is not None:
            problem = (outputs[0].error or "").removeprefix(f"{parameter}: ")
            raise InvalidParameterError(parameter, problem)
        return outputs

    def _process(
        self, prompts: Sequence[Prompt], params: list[Any], priorities: list[Any]
    ) -> list[ProcessedRequest]:
        """Checks and tokenizes the prompts. Raises InvalidParameterError for an invalid one."""
        final_only = {id(p): _final_only(p) for p in params}
        requests = []
        for i, prompt in enumerate(prompts):
            try:
                request_id = str(self._num_requests + i)
                requests.append(
                    self.llm_engine.process_inputs(
                        request_id, prompt, final_only[id(params[i])], priority=priorities[i]
                    )
                )
            except InvalidParameterError as error:
                if len(prompts) == 1:
                    raise
                where = f"(in request {i} of {len(prompts)}, counted from 0)"
                raise InvalidParameterError(error.parameter, f"{error.problem} {where}") from None
        self._num_requests += len(requests)
        return requests

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[BeamSearchOutput]:
        """Returns the params.beam_width most likely continuations of each prompt, best first. The
        beams of all prompts are computed in the same steps.

        Raises the errors of `generate`. If a step of a search fails inside the engine, that search
        ends with the message in `error`; the others continue.
        """
        several = _prompt_list(prompts)
        with self._turn:
            searches = self._search(several, params, use_tqdm)
        return [search.output(self.tokenizer) for search in searches]

    def _search(
        self, prompts: list[Prompt], params: BeamSearchParams, use_tqdm: bool | Callable[..., Any]
    ) -> list[BeamSearch]:
        """Runs the beam searches of all prompts to their ends."""
        step_params = first_params(params)
        requests = self._process(prompts, [step_params] * len(prompts), [0] * len(prompts))
        searches = [
            BeamSearch(request, params, self.llm_engine.config.model_config) for request in requests
        ]
        progress = Progress(len(searches), use_tqdm)
        try:
            while running := [search for search in searches if not search.is_done]:
                prompts_of_step = [prompt for search in running for prompt in search.step_prompts]
                params_of_step = [search.step_params for search in running for _ in search.running]
                requests = self._process(
                    prompts_of_step, params_of_step, [0] * len(prompts_of_step)
                )
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
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        chat_template_content_format: str = "auto",
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Returns one answer per conversation; `messages` is one conversation or several.

        For the other parameters see `generate` and Tokenizer.apply_chat_template.
        """
        vllm_arguments.accept("chat_template_content_format", chat_template_content_format)
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidParameterError(
                "messages", "need a tokenizer: this engine runs with skip_tokenizer_init=True"
            )
        is_one = bool(messages) and isinstance(messages[0], dict)
        conversations: Any = [messages] if is_one else messages
        prompts = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template(
                list(conversation),
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **(chat_template_kwargs or {}),
            )
            prompts.append(
                {
                    "prompt": text,
                    "prompt_token_ids": tokenizer.encode(str(text), add_special_tokens=False),
                }
            )
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )

    def _run(
        self,
        requests: list[ProcessedRequest],
        use_tqdm: bool | Callable[..., Any],
        trace_headers: dict[str, str] | None = None,
    ) -> list[RequestOutput]:
        if self.llm_engine.has_unfinished_requests():
            raise RuntimeError(
                "requests that were added through llm_engine are unfinished: step it until they "
                "end, or abort them"
            )
        finished: dict[str, RequestOutput] = {}
        progress = Progress(len(requests), use_tqdm)
        try:
            for request in requests:
                self.llm_engine.submit(request, trace_headers)
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step():
                    finished[output.request_id] = output
                    progress.update(
                        len(output.prompt_token_ids),
                        sum(len(completion.token_ids) for completion in output.outputs),
                    )
        except BaseException:
            self.llm_engine.abort_all_requests()
            raise
        finally:
            progress.close()
        return [finished[request.request_id] for request in requests]


class Progress:
    """A tqdm progress bar over finished requests with tokens per second. Does nothing if use_tqdm
    is false.
    """

    def __init__(self, num_requests: int, use_tqdm: bool | Callable[..., Any]):
        self._bar = None
        self._num_input_tokens = self._num_output_tokens = 0
        self._start = time.perf_counter()
        if use_tqdm and num_requests:
            make_bar = use_tqdm if callable(use_tqdm) else _tqdm()
            self._bar = make_bar(total=num_requests, desc="Processed prompts", dynamic_ncols=True)

    def update(self, num_input_tokens: int, num_output_tokens: int) -> None:
        """Counts one finished request."""
        if self._bar is None:
            return
        self._num_input_tokens += num_input_tokens
        self._num_output_tokens += num_output_tokens
        elapsed_s = max(time.perf_counter() - self._start, 1e-9)
        speeds = (self._num_input_tokens / elapsed_s, self._num_output_tokens / elapsed_s)
        self._bar.set_postfix_str(
            "est. speed input: {:.2f} toks/s, output: {:.2f} toks/s".format(*speeds), refresh=False
        )
        self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _tqdm() -> Callable[..., Any]:
    from tqdm import tqdm

    return tqdm


def _prompt_list(prompts: Any) -> list[Prompt]:
    """Converts the argument to a list. A single prompt is a string, a dict, or a list of integers;
    anything else must be a sequence of prompts.
    """
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidParameterError(
            "prompts", f"must be a prompt or a sequence of prompts, got {type(prompts).__name__}"
        )
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def _one_each(name: str, value: Any, num_prompts: int) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise InvalidParameterError(
            name,
            f"must be one for all or one per prompt, got {len(value)} for {num_prompts} prompts",
        )
    return list(value)


def _final_only(params: Any) -> Any:
    """A copy with output_kind FINAL_ONLY.

    A value that is not SamplingParams is returned as it is; the InputProcessor raises the error.
    """
    if not isinstance(params, SamplingParams) or params.output_kind == RequestOutputKind.FINAL_ONLY:
        return params
    return msgspec.structs.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
