"""Rows of the error table for /v1/chat/completions; see test_error_table.py."""

from __future__ import annotations

from quire.tests.frontend.server.error_rows.bodies import DEEP, C, Table, chat

ROWS: Table = {
    ("POST", C): [
        (
            {},
            400,
            "messages",
            "missing_required_parameter",
            "Missing required parameter: 'messages'.",
        ),
        (chat(messages=[]), 400, "messages", "empty_array", "expected 'array' of length >= 1."),
        (chat(messages="hi"), 400, "messages", "invalid_type", "expected 'array', got 'str'."),
        (
            chat(messages=[{"content": "x"}]),
            400,
            "messages[0].role",
            "missing_required_parameter",
            "Missing required parameter: 'messages[0].role'.",
        ),
        (
            chat(messages=[{"role": "king", "content": "x"}]),
            400,
            "messages[0].role",
            "invalid_value",
            "invalid value 'king'.",
        ),
        (
            chat(messages=[{"role": "user"}]),
            400,
            "messages[0].content",
            "missing_required_parameter",
            "Missing required parameter: 'messages[0].content'.",
        ),
        (
            chat(messages=[{"role": "user", "content": 5}]),
            400,
            "messages[0].content",
            "invalid_type",
            "expected 'str | array', got 'int'.",
        ),
        (
            chat(
                messages=[
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:"}}],
                    }
                ]
            ),
            400,
            "messages[0].content[0].type",
            "unsupported_value",
            "This model reads text only: a content part of type",
        ),
        (
            chat(messages=[{"role": "tool", "content": "x"}]),
            400,
            "messages[0].tool_call_id",
            "missing_required_parameter",
            "Missing required parameter: 'messages[0].tool_call_id'.",
        ),
        (chat(max_tokens=0), 400, "max_tokens", "integer_below_min_value", "expected 'int' >= 1."),
        (
            chat(max_completion_tokens=5000),
            400,
            "messages",
            "context_length_exceeded",
            "you requested 5009 tokens (9 in the messages, 5000 in the",
        ),
        (
            chat(top_logprobs=2),
            400,
            "top_logprobs",
            "invalid_value",
            "'logprobs' must be true where 'top_logprobs' is given.",
        ),
        (
            chat(logprobs=True, top_logprobs=99),
            400,
            "top_logprobs",
            "integer_above_max_value",
            "expected 'int' <= 20.",
        ),
        (
            chat(tools=[{"type": "function"}]),
            400,
            "tools[0].function",
            "missing_required_parameter",
            "Missing required parameter: 'tools[0].function'.",
        ),
        (
            chat(tools=[{"type": "web"}]),
            400,
            "tools[0].type",
            "unsupported_value",
            "'tools[0].type' must be \"function\", got 'web': other tools",
        ),
        (
            chat(tool_choice="required"),
            400,
            "tool_choice",
            "invalid_value",
            "'tool_choice' is only allowed when 'tools' are specified.",
        ),
        (
            chat(tool_choice={"type": "function", "function": {"name": "x"}}),
            400,
            "tool_choice.function.name",
            "invalid_value",
            "'tool_choice.function.name' is 'x', which is not one of",
        ),
        (
            chat(
                tools=[{"type": "function", "function": {"name": "f"}}],
                tool_choice={"type": "function", "function": {"name": "x"}},
            ),
            400,
            "tool_choice.function.name",
            "invalid_value",
            "'tool_choice.function.name' is 'x', which is not one of",
        ),
        (
            chat(
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
                }
            ),
            400,
            "response_format",
            "invalid_value",
            "response_format: cannot be compiled: Invalid type: nonsense",
        ),
        (
            chat(reasoning_effort=5),
            400,
            "reasoning_effort",
            "invalid_type",
            "expected 'str | null', got 'int'.",
        ),
        (
            chat(chat_template_kwargs={"messages": 1}),
            400,
            "chat_template_kwargs.messages",
            "invalid_value",
            "'chat_template_kwargs.messages' cannot be set: the",
        ),
        (
            chat(messages=[{"role": "user", "content": "x" * 100000}]),
            400,
            "messages",
            "context_length_exceeded",
            "the text of your messages has 100050 characters, which are",
        ),
        (
            chat(model="gpt-4"),
            404,
            "model",
            "model_not_found",
            "The model 'gpt-4' does not exist. This server has 'bundled'.",
        ),
        (
            chat(continue_final_message=True, add_generation_prompt=True),
            400,
            "continue_final_message",
            "invalid_value",
            "The last of 'messages' must be an assistant message to",
        ),
        (chat(n=0), 400, "n", "integer_below_min_value", "expected 'int' >= 1."),
        (
            chat(functions=[{"name": "f"}]),
            400,
            "functions",
            "unsupported_value",
            "'functions' is deprecated and not supported; use",
        ),
        (
            chat(modalities=["audio"]),
            400,
            "modalities",
            "unsupported_value",
            "This model generates text only: 'modalities' can only be",
        ),
        (DEEP, 400, None, "invalid_json", "nested too deeply"),
        (
            chat(tools=[{"type": "function", "function": {"name": "f", "parameters": 5}}]),
            400,
            "tools[0].function.parameters",
            "invalid_type",
            "expected 'object | null', got 'int'.",
        ),
    ],
}
