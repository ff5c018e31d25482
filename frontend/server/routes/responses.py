"""/v1/responses: OpenAI's API of conversations that the server can store.

Must not know: templates, the engine.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..apis.responses_answer import (
    ResponsesAnswer,
    compacted,
    head_of,
    new_response_id,
    whole_without_generation,
    without_generation,
)
from ..apis.responses_items import MAX_CONVERSATION, Item, items_of, num_parts, too_long
from ..apis.responses_tools import CheckedTools, checked_tools
from ..apis.responses_turn import NAMES, ResponsesBody, check_body, params_of, turn_of
from ..http.call import HttpCall, call_of
from ..http.errors import ApiError, invalid, not_found, renaming, unsupported
from ..http.openapi import EVENTS, ApiRoute
from ..http.sse import JsonAnswer
from ..request_body import read_body
from ..response_store import Stored
from ..state import ServerState
from ..turns.answer_run import AnswerRun
from ..turns.chat_turn import ChatTurn, prepare_chat, render_turn
from .conversations import PREFIX as CONVERSATION
from .conversations import add_to_conversation, find_conversation, page_of

logger = logging.getLogger(__name__)
SUMMARIZE = (
    "Summarize the conversation so far, for someone who continues it without having seen it. Keep "
    "what was asked, what was decided and why, what was done with its results (files, commands, "
    "errors), and what remains to be done. Write only the summary."
)

MAX_REFERENCES = 5_000  # in one request


def routes(state: ServerState) -> list[ApiRoute]:
    api = ResponsesApi(state)
    one = "/v1/responses/{response_id}"
    return [
        ApiRoute(
            "/v1/responses", api.create, body=ResponsesBody, answer=dict[str, Any], streams=EVENTS
        ),
        ApiRoute("/v1/responses/compact", api.compact, body=ResponsesBody, answer=dict[str, Any]),
        ApiRoute(
            "/v1/responses/input_tokens",
            api.count_tokens,
            body=ResponsesBody,
            answer=dict[str, Any],
        ),
        ApiRoute(one, api.one, methods=["GET", "DELETE"], answer=dict[str, Any]),
        ApiRoute(f"{one}/cancel", api.cancel, methods=["POST"]),
        ApiRoute(f"{one}/input_items", api.input_items, answer=dict[str, Any]),
    ]


class ResponsesApi:
    """The handlers, which have the store of responses."""

    def __init__(self, state: ServerState):
        self._state = state
        self._store = state.responses

    async def create(self, request: Request) -> Any:
        """OpenAI's Responses"""
        state = self._state
        body, call = await read_body(request, state.server_config, ResponsesBody), call_of(request)
        model = state.select_model(body.model, call)
        check_body(body)
        if body.store and not self._store.keeps:
            raise unsupported(
                "store", "'store' is not possible: this server runs with --max-stored-responses 0."
            )
        items, num_earlier = self._conversation(call, body)
        tools = checked_tools(body.tools, body.tool_choice)
        if body.generate is False or not items:
            return self._without_generation(call, body, model)
        with renaming(NAMES):
            turn = turn_of(state, call, body, new_response_id(), tools, items, num_earlier)
            chat = (
                await prepare_truncated(state, call, turn)
                if body.truncation == "auto"
                else await prepare_chat(state, call, turn)
            )
        body.store = body.store is not False and self._store.keeps

        def keep(response: dict[str, Any]) -> None:
            if body.store:
                output = msgspec.convert(response["output"], list[Item])
                self._store.put(call.tenant, Stored(response, items, output))
            if body.conversation is not None:
                new = [*items[num_earlier:], *msgspec.convert(response["output"], list[Item])]
                add_to_conversation(self._store, call.tenant, body.conversation_id, new)

        answer = ResponsesAnswer(state, call, body, model, chat, tools, keep)
        return await answer.respond(streams=body.stream)

    def _without_generation(self, call: HttpCall, body: ResponsesBody, model: str) -> Any:
        """Answers a body that asks for nothing, with which clients try out a server."""
        with renaming(NAMES):
            params = params_of(self._state, body)
        body.store = False
        head = head_of(body, model, new_response_id(), params)
        if body.stream:
            return self._state.event_stream(without_generation(head), call)
        return JsonAnswer(whole_without_generation(head))

    async def compact(self, request: Request) -> Response:
        """A conversation in short: what the user said, and the model's summary of the rest"""
        state = self._state
        body, call = await read_body(request, state.server_config, ResponsesBody), call_of(request)
        state.select_model(body.model, call)
        check_body(body)
        items, num_earlier = self._conversation(call, body)
        asked = items_of([*items, Item(role="user", content=SUMMARIZE)] if items else [])
        body.stream = None
        with renaming(NAMES):
            turn = turn_of(state, call, body, new_response_id(), CheckedTools(), asked, num_earlier)
            run = await prepare_chat(state, call, turn)
        [message] = await run.messages()
        if not (summary := message.answer().content):
            logger.warning("the model wrote no summary (%s)", call.request_id)
            raise ApiError(500, "The model wrote no summary.", code="no_summary")
        return JsonAnswer(compacted(turn.request_id, items, summary, run.usage))

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens a response's prompt has"""
        body = await read_body(request, self._state.server_config, ResponsesBody)
        call = call_of(request)
        self._state.check_model(body.model)
        check_body(body)
        items, num_earlier = self._conversation(call, body)
        tools = checked_tools(body.tools, body.tool_choice)
        with renaming(NAMES):
            turn = turn_of(self._state, call, body, new_response_id(), tools, items, num_earlier)
            rendered = await render_turn(self._state, call, turn)
        num_tokens = len(rendered.token_ids)
        return JsonAnswer({"object": "response.input_tokens", "input_tokens": num_tokens})

    def _conversation(self, call: HttpCall, body: ResponsesBody) -> tuple[list[Item], int]:
        """Returns all items of the conversation, those of earlier turns first, and the number of
        those.
        """
        self._state.check_generates()
        items = self._resolved(call, items_of(body.input))
        if body.conversation is not None:
            previous = find_conversation(self._store, call.tenant, body.conversation_id)
            return self._continued(previous, items, "conversation")
        if body.previous_response_id is None:
            return items, 0
        previous = self._response(call, body.previous_response_id)
        if previous is None:
            message = (
                f"Previous response with id {body.previous_response_id!r:.100} not found. It is "
                f"kept only if it was stored, and not indefinitely."
            )
            raise invalid("previous_response_id", message, "previous_response_not_found")
        return self._continued(previous, items, "previous_response_id")

    def _continued(self, previous: Stored, items: list[Item], param: str) -> tuple[list[Item], int]:
        earlier = previous.conversation()
        if sum(map(num_parts, earlier)) + sum(map(num_parts, items)) > MAX_CONVERSATION:
            raise too_long(param)
        return [*earlier, *items], len(earlier)

    def _resolved(self, call: HttpCall, items: list[Item]) -> list[Item]:
        """Returns `items` with the stored items in place of the references to them."""
        num_left = MAX_CONVERSATION - sum(map(num_parts, items))
        places: dict[str | None, str] = {}  # of the references, by id
        resolved = []
        for i, item in enumerate(items):
            if item.type == "item_reference":
                where = f"input[{i}].id"
                if len(places) == MAX_REFERENCES:
                    raise invalid(
                        "input",
                        f"'input' may have at most {MAX_REFERENCES} references to items.",
                        "array_above_max_length",
                    )
                if item.id in places:
                    raise invalid(
                        where, f"'{where}' refers to the same item as '{places[item.id]}'."
                    )
                places[item.id] = where
                item = self._found(call, item.id, where)
                num_left -= num_parts(item)
                if num_left < 0:
                    raise too_long(where)
            resolved.append(item)
        return resolved

    def _found(self, call: HttpCall, item_id: str | None, where: str) -> Item:
        found = self._store.find_item(call.tenant, item_id)
        if found is None:
            raise invalid(
                where,
                f"'{where}' refers to the item {item_id!r:.100}, which is not stored.",
                "item_not_found",
            )
        return found

    # ------------------------------------------------------------ stored responses

    def _response(self, call: HttpCall, response_id: str) -> Stored | None:
        """Returns a response, which a conversation in the store is not."""
        is_one = not response_id.startswith(CONVERSATION)
        return self._store.get(call.tenant, response_id) if is_one else None

    def _stored(self, request: Request) -> Stored:
        self._state.check_open()
        response_id = request.path_params["response_id"]
        found = self._response(call_of(request), response_id)
        if found is None:
            raise not_found(f"Response with id {response_id!r:.100} not found.")
        return found

    async def one(self, request: Request) -> Response:
        """A stored response, or its deletion"""
        if request.method == "DELETE":
            response_id = self._stored(request).response["id"]
            self._store.pop(call_of(request).tenant, response_id)
            return JsonAnswer({"id": response_id, "object": "response", "deleted": True})
        if request.query_params.get("stream") == "true":
            raise unsupported(
                "stream",
                "Only background responses can be streamed again, and there are none here.",
            )
        return JsonAnswer(self._stored(request).response)

    async def cancel(self, request: Request) -> Response:
        """Not supported: responses are not generated in the background"""
        self._stored(request)
        raise ApiError(
            400,
            "Only background responses can be cancelled, and there are none here: close "
            "the connection.",
            code="not_cancellable",
        )

    async def input_items(self, request: Request) -> Response:
        """The conversation before a response"""
        return JsonAnswer(page_of(request, self._stored(request).input_items))


async def prepare_truncated(state: ServerState, call: HttpCall, turn: ChatTurn) -> AnswerRun:
    """Does the same as prepare_chat, after leaving out as few of the oldest messages as necessary
    to make the rest fit. System messages stay. It cuts only before a user message, so no answer or
    tool result is kept without its question.
    """
    try:
        return await prepare_chat(state, call, turn)
    except ApiError as error:
        if error.code != "context_length_exceeded":
            raise
        refusal, best = error, None
    messages = turn.messages
    num_system = next(
        (i for i, message in enumerate(messages) if message["role"] != "system"), len(messages)
    )
    starts = [i for i in range(num_system + 1, len(messages)) if messages[i]["role"] == "user"]
    while starts:  # the smallest cut that suffices
        middle = len(starts) // 2
        turn.messages = messages[:num_system] + messages[starts[middle] :]
        try:
            best = await prepare_chat(state, call, turn)
            starts = starts[:middle]
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            starts = starts[middle + 1 :]
    if best is None:
        raise refusal
    return best
