"""The server over a scripted engine: every route, in this process, called over HTTP without a
socket.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx2 as httpx
import msgspec
from quire.frontend.clients.connect import load_tokenizer
from quire.frontend.engine_args import EngineArgs
from quire.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.frontend.server.app import App, make_app
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.http.call import HttpCall
from quire.frontend.server.state import ServerState
from quire.frontend.session import default_sampling_params
from quire.ipc.params import RequestOutputKind, SamplingParams

# A template of models with reasoning and tool calls: Hermes' calls, <think>.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Calls go into <tool_call></tool_call>, thoughts into <think></think>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ "
    "message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% "
    "endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_THOUGHT_AND_CALL = [
    "<think>We",
    "ll.</think>",
    "Let me ",
    "see.",
    '<tool_call>{"name": "add", "arguments": {"a": 1,',
    ' "b": 2}}</tool_call>',
]


class EngineError(Exception):
    """Among the pieces of a ScriptedEngine: the request ends with this error."""


class ScriptedEngine:
    """Yields the given pieces, one token each. An exception among them is raised, an EngineError
    ends the request, and a number is a pause in seconds.
    """

    errored = False

    def __init__(
        self,
        pieces: list[str | float | BaseException],
        reason: str = "stop",
        stop_reason: str | None = None,
    ):
        self.pieces, self.reason, self.stop_reason = pieces, reason, stop_reason
        self.config = EngineArgs(max_model_len=512, device="cpu").create_engine_config()
        self.tokenizer = load_tokenizer(self.config.model_config)
        defaults = default_sampling_params(self.config.model_config)
        self.get_default_sampling_params = lambda: defaults
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.num_running = 0

    def set_record_token_times(self, is_wanted: bool) -> None:
        """Its requests have no times."""

    def set_max_outputs_per_s(self, number: int) -> None:
        """Each piece is one output."""

    async def generate(
        self, prompt: dict[str, Any], params: SamplingParams, request_id: str, **_: object
    ) -> AsyncIterator[RequestOutput]:
        self.prompts.append(prompt.get("prompt", ""))
        self.params.append(params)
        self.num_running += 1
        try:
            async for output in self._yield_pieces(prompt, params, request_id):
                yield output
        finally:
            self.num_running -= 1

    async def _yield_pieces(
        self, prompt: dict[str, Any], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        metrics = RequestMetrics(
            1.0,
            finished_time=4.0,
            queued_ts=1.0,
            scheduled_ts=1.5,
            first_token_ts=2.0,
            last_token_ts=3.5,
        )
        whole = CompletionOutput(0, "", [])
        for i, piece in enumerate(self.pieces):
            if isinstance(piece, EngineError):
                ended = CompletionOutput(0, "", [], finish_reason="error")
                yield RequestOutput(
                    request_id,
                    None,
                    prompt["prompt_token_ids"],
                    [ended],
                    True,
                    metrics,
                    error=str(piece),
                )
                return
            if isinstance(piece, BaseException):
                raise piece
            await asyncio.sleep(piece if isinstance(piece, float) else 0)
            if isinstance(piece, float):
                continue
            is_last = i == len(self.pieces) - 1
            delta = CompletionOutput(
                0,
                piece,
                [i],
                finish_reason=self.reason if is_last else None,
                stop_reason=self.stop_reason if is_last else None,
            )
            whole.extend(delta)
            if params.output_kind == RequestOutputKind.DELTA or is_last:
                said = delta if params.output_kind == RequestOutputKind.DELTA else whole
                yield RequestOutput(
                    request_id,
                    None,
                    prompt["prompt_token_ids"],
                    [said],
                    is_last,
                    metrics,
                    num_cached_tokens=3,
                )


def a_call() -> HttpCall:
    """For what is no handler."""
    return HttpCall("req-1", 0.0, None)


def scripted_app(engine: ScriptedEngine, template: str = TOOL_TEMPLATE, **config: Any) -> App:
    """`config` is the ServerConfig."""
    return make_app(ServerState(ServerConfig(chat_template=template, **config), "scripted", engine))


def talk(
    app: App, speak: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]], **headers: str
) -> Any:
    """Return what `speak` returns, called with a client of the app."""

    async def run() -> Any:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://scripted", headers=headers
        ) as client:
            return await speak(client)

    return asyncio.run(run())


def post(app: App, path: str, body: Any, **headers: str) -> httpx.Response:
    return talk(app, lambda client: client.post(path, json=body), **headers)


def named_events(answer: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, data) of every server-sent event."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(
            (name.removeprefix("event: "), msgspec.json.decode(data.removeprefix("data: ")))
        )
    return found
