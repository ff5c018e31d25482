"""/tokenize, /detokenize and /tokenizer_info, in vLLM's format.

Must not know: the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ....ipc.params import SamplingParams
from ...text.tokenizer import SPECIAL_TOKEN_KEYS, Tokenizer
from ..admission import in_turn
from ..apis.openai_messages import OpenAIMessage, plain_messages
from ..apis.openai_tools import SentTool, checked_tools
from ..http.call import HttpCall, call_of
from ..http.errors import ApiError, invalid, missing
from ..http.openapi import ApiRoute
from ..http.sse import JsonAnswer
from ..request_body import read_body
from ..state import ServerState
from ..turns.chat_turn import ChatTurn, render_turn
from ..turns.tokenizing import tokenize_all
from .chat import checked_variables

LONG_TOKENS = 10_000


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[OpenAIMessage], Meta(min_length=1)] | None = None
    tools: list[SentTool] | None = None
    # The default is true for a text, and false for a conversation, whose template writes the
    # special tokens.
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[Annotated[int, Meta(ge=0, lt=2**31)]]
    model: str | None = None


class Detokenized(msgspec.Struct):
    prompt: str


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """In the format of tokenizer_config.json."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    chat_template: str | None
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    sep_token: str | None = None
    pad_token: str | None = None
    cls_token: str | None = None
    mask_token: str | None = None


def routes(state: ServerState) -> list[ApiRoute]:
    async def to_tokens(request: Request) -> Response:
        """Token ids of a text or of a conversation"""
        body = await read_body(request, state.server_config, TokenizeBody)
        tokenizer = tokenizer_of(state)
        state.check_model(body.model)
        token_ids = await _token_ids(state, call_of(request), body)
        texts = None
        if body.return_token_strs:
            texts = await beside_loop(
                state, call_of(request), len(token_ids), partial(_token_texts, tokenizer, token_ids)
            )
        return JsonAnswer(Tokenized(len(token_ids), state.max_model_len, token_ids, texts))

    async def to_text(request: Request) -> Response:
        """The text of token ids"""
        body = await read_body(request, state.server_config, DetokenizeBody)
        tokenizer = tokenizer_of(state)
        state.check_model(body.model)
        if body.tokens and max(body.tokens) >= tokenizer.vocab_size:
            raise invalid(
                "tokens",
                f"'tokens' must be ids between 0 and {tokenizer.vocab_size - 1}, got "
                f"{max(body.tokens)}.",
            )
        decode = partial(tokenizer.decode_batch, [body.tokens])
        [text] = await beside_loop(state, call_of(request), len(body.tokens), decode)
        return JsonAnswer(Detokenized(text))

    async def info(request: Request) -> Response:
        """The tokenizer's special tokens and chat template"""
        tokenizer = tokenizer_of(state)
        special = {key: tokenizer.special_tokens_map.get(key) for key in SPECIAL_TOKEN_KEYS}
        return JsonAnswer(
            TokenizerInfo(
                # In transformers, this class reads such files.
                tokenizer_class="PreTrainedTokenizerFast",
                vocab_size=tokenizer.vocab_size,
                model_max_length=state.max_model_len,
                chat_template=state.template_text or None,
                **special,
            )
        )

    return [
        ApiRoute("/tokenize", to_tokens, body=TokenizeBody, answer=Tokenized),
        ApiRoute("/detokenize", to_text, body=DetokenizeBody, answer=Detokenized),
        ApiRoute("/tokenizer_info", info, answer=TokenizerInfo),
    ]


def tokenizer_of(state: ServerState) -> Tokenizer:
    tokenizer = state.ready_engine().tokenizer
    if tokenizer is None:
        raise ApiError(
            404, "This model has no tokenizer: it accepts token ids only.", code="no_tokenizer"
        )
    return tokenizer


def _token_texts(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    return [tokenizer.id_to_token(token_id) or "" for token_id in token_ids]


async def beside_loop(
    state: ServerState, call: HttpCall, num_tokens: int, work: Callable[[], Any]
) -> Any:
    """Returns the result of `work`, which runs in a thread if it takes long."""
    return work() if num_tokens < LONG_TOKENS else await in_turn(state.work_turns, call, work)


async def _token_ids(state: ServerState, call: HttpCall, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise (
            missing("prompt")
            if body.prompt is None
            else invalid("messages", "Only one of 'prompt' and 'messages' is allowed.")
        )
    if body.prompt is not None:
        [token_ids] = await tokenize_all(
            state,
            call,
            [body.prompt],
            add_special_tokens=body.add_special_tokens is not False,
            param="prompt",
            must_fit=False,
        )
        return token_ids
    assert body.messages is not None
    tools, _ = checked_tools(body.tools, None)
    continues = bool(body.continue_final_message)
    turn = ChatTurn(
        request_id=call.request_id,
        messages=plain_messages(body.messages, call, state.reads_images),
        params=SamplingParams(),
        tools=tools,
        template_variables=checked_variables(body.chat_template_kwargs),
        add_generation_prompt=not continues
        if body.add_generation_prompt is None
        else body.add_generation_prompt,
        continue_final_message=continues,
    )
    rendered = await render_turn(
        state, call, turn, add_special_tokens=bool(body.add_special_tokens)
    )
    return rendered.token_ids
