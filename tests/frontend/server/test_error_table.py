"""The error table: one row per way in which a request can be wrong, over every route, against the session's server.
May know: the routes, what each API calls its errors.
Must not know: how a route finds out.

Keys, queues, loading and draining need servers of their own: test_auth, test_leaving, test_serving. What is no HTTP at all: test_protocol."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2 as httpx
import pytest
from quire.frontend.server.app import all_routes
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.http.errors import TYPES
from quire.frontend.server.state import ServerState
from starlette.routing import Match

T, C, R, M = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
hi = [{"role": "user", "content": "hi"}]
DEEP = b'{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": ' + b'{"a":' * 10000 + b"1" + b"}" * 10000 + b"}"
INTERNAL = re.compile(r"0x[0-9a-f]{6,}|Traceback|File \"|site-packages|\.py\b|(?<![\w.])/(?:root|home|usr|tmp|work|opt|var|proc)/")


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Once", "max_tokens": 1} | fields


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": hi, "max_tokens": 1} | fields


def resp(**fields: Any) -> dict[str, Any]:
    return {"input": "hi", "max_output_tokens": 16} | fields


def msg(**fields: Any) -> dict[str, Any]:
    return {"model": "bundled", "messages": hi, "max_tokens": 1} | fields


# method, path, body (JSON, or bytes as they are), status, param, code, a piece of the sentence. Anthropic's and Ollama's errors have no param and code.
ROWS: list[tuple[str, str, Any, int, str | None, str | None, str]] = [
    ("POST", T, b"", 400, None, "invalid_json", "Input data was truncated"),
    ("POST", T, b"{", 400, None, "invalid_json", "Input data was truncated"),
    ("POST", T, b'{"prompt": "\xff"}', 400, None, "invalid_json", "'utf-8' codec can't decode byte 0xff in position 0: invalid"),
    ("POST", T, b"[]", 400, None, "invalid_type", "Invalid body: expected 'object', got 'array'."),
    ("POST", T, b'"x"', 400, None, "invalid_type", "Invalid body: expected 'object', got 'str'."),
    ("POST", T, b'{"prompt": "\\ud800"}', 400, None, "invalid_json", "Input data was truncated"),
    ("POST", T, b'{"prompt": "x", "max_tokens": NaN}', 400, None, "invalid_json", "JSON is malformed: invalid character (byte 30)"),
    ("POST", T, b'{"prompt": ' + b"[" * 10000 + b"]" * 10000 + b"}", 400, "prompt[0][0]", "invalid_type", "expected 'int', got 'array'."),
    ("POST", T, b'{"prompt": "x", "max_tokens": 1e400}', 400, "max_tokens", "invalid_type", "number out of range."),
    ("POST", T, {}, 400, "prompt", "missing_required_parameter", "Missing required parameter: 'prompt'."),
    ("POST", T, {"prompt": None}, 400, "prompt", "invalid_type", "expected 'str | array', got 'null'."),
    ("POST", T, text(prompt=5), 400, "prompt", "invalid_type", "expected 'str | array', got 'int'."),
    ("POST", T, text(prompt=""), 400, "prompt", "invalid_value", "'prompt' must not be empty."),
    ("POST", T, text(prompt=[]), 400, "prompt", "empty_array", "expected 'array' of length >= 1."),
    ("POST", T, text(prompt=[""]), 400, "prompt", "invalid_value", "'prompt' must not be empty."),
    ("POST", T, text(prompt=[[]]), 400, "prompt", "invalid_value", "'prompt' must not be empty."),
    ("POST", T, text(prompt=[1, "a"]), 400, "prompt", "invalid_type", "'prompt' must be a string, a list of strings, a list of"),
    ("POST", T, text(prompt=[1.5]), 400, "prompt[0]", "invalid_type", "expected 'int | str | array', got 'float'."),
    ("POST", T, text(prompt=[-1]), 400, "prompt[0]", "integer_below_min_value", "expected 'int' >= 0."),
    ("POST", T, text(prompt=[10 ** 6]), 400, "prompt", "invalid_value", "prompt: must be ids between 0 and 2047, the model's"),
    ("POST", T, text(prompt=[10 ** 30]), 400, "prompt", "invalid_value", "prompt: must be ids between 0 and 2047, the model's"),
    ("POST", T, text(prompt=["a"] * 3000), 400, "prompt", "array_above_max_length", "'prompt' can hold at most 2048 prompts, got 3000."),
    ("POST", T, text(prompt=[1] * 5000), 400, "prompt", "context_length_exceeded", "your prompt resulted in 5000 tokens, which leaves none for"),
    ("POST", T, text(prompt="x" * 100000),
     400, "prompt", "context_length_exceeded", "the text of your prompt has 100000 characters, which are at"),
    ("POST", T, text(max_tokens=5000), 400, "prompt", "context_length_exceeded", "you requested 5001 tokens (1 in the prompt, 5000 in the"),
    ("POST", T, text(max_tokens=-1), 400, "max_tokens", "integer_below_min_value", "expected 'int' >= 0."),
    ("POST", T, text(max_tokens="5"), 400, "max_tokens", "invalid_type", "expected 'int | null', got 'str'."),
    ("POST", T, text(max_tokens=1.5), 400, "max_tokens", "invalid_type", "expected 'int | null', got 'float'."),
    ("POST", T, text(temperature=-1), 400, "temperature", "decimal_below_min_value", "expected 'float' >= 0.0."),
    ("POST", T, text(temperature="hot"), 400, "temperature", "invalid_type", "expected 'float | null', got 'str'."),
    ("POST", T, text(top_p=0), 400, "top_p", "decimal_below_min_value", "expected 'float' > 0.0."),
    ("POST", T, text(top_p=1.1), 400, "top_p", "decimal_above_max_value", "expected 'float' <= 1.0."),
    ("POST", T, text(top_k=-5), 400, "top_k", "integer_below_min_value", "expected 'int' >= -1."),
    ("POST", T, text(min_p=2), 400, "min_p", "decimal_above_max_value", "expected 'float' <= 1.0."),
    ("POST", T, text(n=0), 400, "n", "integer_below_min_value", "expected 'int' >= 1."),
    ("POST", T, text(n=129), 400, "n", "integer_above_max_value", "'n' must be at most 128, got 129."),
    ("POST", T, text(n=2, temperature=0), 400, "n", "invalid_value", "n: must be 1 with temperature=0 (greedy), where all"),
    ("POST", T, text(best_of=1, n=2), 400, "best_of", "integer_below_min_value", "'best_of' must be at least 'n', which is 2; got 1."),
    ("POST", T, text(best_of=3, n=2, stream=True), 400, "best_of", "unsupported_value", "'best_of' cannot be streamed: which completions are the"),
    ("POST", T, text(logprobs=99), 400, "logprobs", "integer_above_max_value", "expected 'int' <= 20."),
    ("POST", T, text(logprobs=-3), 400, "logprobs", "integer_below_min_value", "expected 'int' >= -1."),
    ("POST", T, text(suffix="x"), 400, "suffix", "unsupported_value", "This model cannot fill in the middle: 'suffix' is not"),
    ("POST", T, text(stop=["x"] * 17), 400, "stop", "array_above_max_length", "expected 'array' of length <= 16."),
    ("POST", T, text(stop=[1]), 400, "stop[0]", "invalid_type", "expected 'str', got 'int'."),
    ("POST", T, text(presence_penalty=3), 400, "presence_penalty", "decimal_above_max_value", "expected 'float' <= 2.0."),
    ("POST", T, text(frequency_penalty=-3), 400, "frequency_penalty", "decimal_below_min_value", "expected 'float' >= -2.0."),
    ("POST", T, text(repetition_penalty=0), 400, "repetition_penalty", "decimal_below_min_value", "expected 'float' >"),
    ("POST", T, text(logit_bias={"x": 1}), 400, "logit_bias", "invalid_value", "of a key: expected 'str' matching regex"),
    ("POST", T, text(logit_bias={"1": 200}), 400, "logit_bias", "decimal_above_max_value", "expected 'float' <= 100.0."),
    ("POST", T, text(logit_bias={"999999": 1}), 400, "logit_bias", "invalid_value", "logit_bias: must be ids between 0 and 2047, the model's"),
    ("POST", T, text(logit_bias=[1]), 400, "logit_bias", "invalid_type", "expected 'object | null', got 'array'."),
    ("POST", T, text(seed="a"), 400, "seed", "invalid_type", "expected 'int | null', got 'str'."),
    ("POST", T, text(seed=2 ** 70), 400, "seed", "integer_above_max_value", "expected 'int' <= 9223372036854775807."),
    ("POST", T, text(stream="yes"), 400, "stream", "invalid_type", "expected 'bool | null', got 'str'."),
    ("POST", T, text(stream_options={"include_usage": "x"}), 400, "stream_options.include_usage", "invalid_type", "expected 'bool | null', got 'str'."),
    ("POST", T, text(stream_options={"include_usage": True}), 400, "stream_options", "invalid_value", "The 'stream_options' parameter is only allowed when"),
    ("POST", T, text(model="gpt-4"), 404, "model", "model_not_found", "The model 'gpt-4' does not exist. This server has 'bundled'."),
    ("POST", T, text(priority="x"), 400, "priority", "invalid_type", "expected 'int | null', got 'str'."),
    ("POST", T, text(min_tokens=5), 400, "min_tokens", "invalid_value", "min_tokens: must be at most max_tokens=1, got 5"),
    ("POST", T, text(truncate_prompt_tokens=-5), 400, "truncate_prompt_tokens", "integer_below_min_value", "expected 'int' >= -1."),
    ("POST", T, text(allowed_token_ids=[10 ** 7]), 400, "allowed_token_ids", "invalid_value", "allowed_token_ids: must be ids between 0 and 2047, the"),
    ("POST", T, text(structured_outputs={"regex": "("}),
     400, "structured_outputs", "invalid_value", "structured_outputs: cannot be compiled: at 1(8): invalid"),
    ("POST", T, text(structured_outputs={"color": 1}),
     400, "structured_outputs", "invalid_value", "structured_outputs: must give exactly one of json, regex,"),
    ("POST", T, text(structured_outputs={"regex": "a", "choice": ["b"]}),
     400, "structured_outputs", "invalid_value", "structured_outputs: must give exactly one of json, regex,"),
    ("POST", T, text(response_format={"type": "yaml"}),
     400, "response_format.type", "unsupported_value", "'response_format.type' must be text, json_object or"),
    ("POST", T, text(response_format={"type": "json_schema"}),
     400, "response_format.json_schema", "missing_required_parameter", "Missing required parameter: 'response_format.json_schema'."),
    ("POST", T, text(cache_salt=""), 400, "cache_salt", "empty_string", "expected 'str' of length >= 1."),
    ("GET", T, None, 405, None, "method_not_allowed", "/v1/completions does not take GET"),
    ("PUT", T, text(), 405, None, "method_not_allowed", "/v1/completions does not take PUT"),
    ("POST", T + "/", text(), 404, None, "unknown_url", "Unknown route: POST /v1/completions/. Did you mean"),
    ("POST", "/completions", text(), 404, None, "unknown_url", "Unknown route: POST /completions. Did you mean"),
    ("POST", "/v1/v1/completions", text(), 404, None, "unknown_url", "Unknown route: POST /v1/v1/completions. Did you mean"),
    ("POST", "/v1/completion", text(), 404, None, "unknown_url", "Unknown route: POST /v1/completion. Did you mean"),
    ("GET", "/v1/nowhere", None, 404, None, "unknown_url", "Unknown route: GET /v1/nowhere"),
    ("GET", "/etc/passwd", None, 404, None, "unknown_url", "Unknown route: GET /etc/passwd"),
    ("POST", C, {}, 400, "messages", "missing_required_parameter", "Missing required parameter: 'messages'."),
    ("POST", C, chat(messages=[]), 400, "messages", "empty_array", "expected 'array' of length >= 1."),
    ("POST", C, chat(messages="hi"), 400, "messages", "invalid_type", "expected 'array', got 'str'."),
    ("POST", C, chat(messages=[{"content": "x"}]), 400, "messages[0].role", "missing_required_parameter", "Missing required parameter: 'messages[0].role'."),
    ("POST", C, chat(messages=[{"role": "king", "content": "x"}]), 400, "messages[0].role", "invalid_value", "invalid value 'king'."),
    ("POST", C, chat(messages=[{"role": "user"}]),
     400, "messages[0].content", "missing_required_parameter", "Missing required parameter: 'messages[0].content'."),
    ("POST", C, chat(messages=[{"role": "user", "content": 5}]), 400, "messages[0].content", "invalid_type", "expected 'str | array', got 'int'."),
    ("POST", C, chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]),
     400, "messages[0].content[0].type", "unsupported_value", "This model reads text only: a content part of type"),
    ("POST", C, chat(messages=[{"role": "tool", "content": "x"}]),
     400, "messages[0].tool_call_id", "missing_required_parameter", "Missing required parameter: 'messages[0].tool_call_id'."),
    ("POST", C, chat(max_tokens=0), 400, "max_tokens", "integer_below_min_value", "expected 'int' >= 1."),
    ("POST", C, chat(max_completion_tokens=5000), 400, "messages", "context_length_exceeded", "you requested 5009 tokens (9 in the messages, 5000 in the"),
    ("POST", C, chat(top_logprobs=2), 400, "top_logprobs", "invalid_value", "'logprobs' must be true where 'top_logprobs' is given."),
    ("POST", C, chat(logprobs=True, top_logprobs=99), 400, "top_logprobs", "integer_above_max_value", "expected 'int' <= 20."),
    ("POST", C, chat(tools=[{"type": "function"}]),
     400, "tools[0].function", "missing_required_parameter", "Missing required parameter: 'tools[0].function'."),
    ("POST", C, chat(tools=[{"type": "web"}]), 400, "tools[0].type", "unsupported_value", "'tools[0].type' must be \"function\", got 'web': other tools"),
    ("POST", C, chat(tool_choice="required"), 400, "tool_choice", "invalid_value", "'tool_choice' is only allowed when 'tools' are specified."),
    ("POST", C, chat(tool_choice={"type": "function", "function": {"name": "x"}}),
     400, "tool_choice.function.name", "invalid_value", "'tool_choice.function.name' is 'x', which is none of"),
    ("POST", C, chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice={"type": "function", "function": {"name": "x"}}),
     400, "tool_choice.function.name", "invalid_value", "'tool_choice.function.name' is 'x', which is none of"),
    ("POST", C, chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}),
     400, "response_format", "invalid_value", "response_format: cannot be compiled: Invalid type: nonsense"),
    ("POST", C, chat(reasoning_effort=5), 400, "reasoning_effort", "invalid_type", "expected 'str | null', got 'int'."),
    ("POST", C, chat(chat_template_kwargs={"messages": 1}),
     400, "chat_template_kwargs.messages", "invalid_value", "'chat_template_kwargs.messages' cannot be set: the"),
    ("POST", C, chat(messages=[{"role": "user", "content": "x" * 100000}]),
     400, "messages", "context_length_exceeded", "the text of your messages has 100050 characters, which are"),
    ("POST", C, chat(model="gpt-4"), 404, "model", "model_not_found", "The model 'gpt-4' does not exist. This server has 'bundled'."),
    ("POST", C, chat(continue_final_message=True, add_generation_prompt=True),
     400, "continue_final_message", "invalid_value", "The last of 'messages' must be the assistant's to be"),
    ("POST", C, chat(n=0), 400, "n", "integer_below_min_value", "expected 'int' >= 1."),
    ("POST", C, chat(functions=[{"name": "f"}]), 400, "functions", "unsupported_value", "'functions' is the old form of tools, with answers of"),
    ("POST", C, chat(modalities=["audio"]), 400, "modalities", "unsupported_value", "This model gives text only: 'modalities' can only be"),
    ("POST", R, {}, 400, "input", "missing_required_parameter", "Missing required parameter: 'input'."),
    ("POST", R, resp(input=[]), 400, "input", "empty_array", "'input' must hold at least one item."),
    ("POST", R, resp(input=5), 400, "input", "invalid_type", "expected 'str | array | null', got 'int'."),
    ("POST", R, resp(model="gpt-4"), 404, "model", "model_not_found", "The model 'gpt-4' does not exist. This server has 'bundled'."),
    ("POST", R, resp(max_output_tokens=0), 400, "max_output_tokens", "integer_below_min_value", "expected 'int' >= 1."),
    ("POST", R, resp(previous_response_id="resp_none"),
     400, "previous_response_id", "previous_response_not_found", "Previous response with id 'resp_none' not found. It is kept"),
    ("POST", R, resp(background=True), 400, "background", "unsupported_value", "'background' is not supported: answers are made while the"),
    ("POST", R, resp(tools=[{"type": "web_search"}]), 400, "tools[0].type", "unsupported_value", "'tools[0]' is a 'web_search', which OpenAI's servers run;"),
    ("POST", R, resp(input=[{"role": "user", "content": [{"type": "input_image"}]}]),
     400, "input[0].content[0].type", "unsupported_value", "'input[0].content[0]' is of the type 'input_image': this"),
    ("GET", R + "/resp_none", None, 404, None, "not_found", "Response with id 'resp_none' not found."),
    ("DELETE", R + "/resp_none", None, 404, None, "not_found", "Response with id 'resp_none' not found."),
    ("POST", R + "/resp_none/cancel", None, 404, None, "not_found", "Response with id 'resp_none' not found."),
    ("GET", R + "/resp_none/input_items", None, 404, None, "not_found", "Response with id 'resp_none' not found."),
    ("GET", R, None, 405, None, "method_not_allowed", "/v1/responses does not take GET"),
    ("POST", R + "/input_tokens", {}, 400, "input", "missing_required_parameter", "Missing required parameter: 'input'."),
    ("POST", M, {}, 400, None, None, "Missing required parameter: 'messages'."),
    ("POST", M, {"model": "bundled", "messages": hi}, 400, None, None, "Missing required parameter: 'max_tokens'."),
    ("POST", M, msg(messages=[]), 400, None, None, "Invalid value for 'messages': expected 'array' of length >="),
    ("POST", M, msg(model="claude"), 404, None, None, "The model 'claude' does not exist. This server has"),
    ("POST", M, msg(max_tokens=0), 400, None, None, "Invalid value for 'max_tokens': expected 'int' >= 1."),
    ("POST", M, msg(temperature=-1), 400, None, None, "Invalid value for 'temperature': expected 'float' >= 0.0."),
    ("POST", M, msg(messages=[{"role": "king", "content": "x"}]), 400, None, None, "'messages[0].role' must be user, assistant or system, got"),
    ("POST", M, msg(tools=[{"name": "x"}]), 400, None, None, "Missing required parameter: 'tools[0].input_schema'."),
    ("POST", M, msg(tool_choice={"type": "tool"}), 400, None, None, "'tool_choice' can be tool only with 'tools'."),
    ("POST", M, msg(messages=[{"role": "user", "content": [{"type": "image"}]}]),
     400, None, None, "'messages[0].content[0]' is of the type image: this model"),
    ("POST", M, b"{", 400, None, None, "Input data was truncated"),
    ("GET", M, None, 405, None, None, "/v1/messages does not take GET"),
    ("POST", M + "/count_tokens", {}, 400, None, None, "Missing required parameter: 'messages'."),
    ("POST", M + "/batches", {}, 404, None, None, "Unknown route: POST /v1/messages/batches"),
    ("POST", "/api/chat", {}, 400, None, None, "Missing required parameter: 'model'."),
    ("POST", "/api/chat", {"model": "llama3", "messages": hi}, 404, None, None, "The model 'llama3' does not exist. This server has"),
    ("POST", "/api/chat", {"model": "bundled", "messages": hi, "format": "xml"}, 400, None, None, "'format' must be \"json\" or a JSON schema, got 'xml'."),
    ("POST", "/api/chat", {"model": "bundled", "messages": hi, "options": {"temperature": -1}},
     400, None, None, "options.temperature: must be 0 (greedy) or greater, at most"),
    ("POST", "/api/generate", {"model": "bundled", "prompt": "x", "suffix": "y"}, 400, None, None, "This model cannot fill in the middle: 'suffix' is not"),
    ("POST", "/api/generate", {"model": "bundled", "prompt": "x", "images": ["a"]}, 400, None, None, "'images': this model reads text only."),
    ("POST", "/api/generate", b"{", 400, None, None, "Input data was truncated"),
    ("POST", "/api/pull", {"model": "x"}, 400, None, None, "This server has the one model that it was started with:"),
    ("POST", "/api/show", {"model": "nope"}, 404, None, None, "The model 'nope' does not exist. This server has 'bundled'."),
    ("GET", "/api/chat", None, 405, None, None, "/api/chat does not take GET"),
    ("POST", "/api/embed", {"model": "bundled", "input": "x"}, 400, None, None, "This model writes text; it cannot embed."),
    ("POST", "/v1/embeddings", {"input": "x"}, 400, "model", "unsupported_value", "The model 'bundled' generates text; this server cannot"),
    ("POST", "/v1/embeddings", {}, 400, "input", "missing_required_parameter", "Missing required parameter: 'input'."),
    ("POST", "/v1/embeddings", {"input": "x", "encoding_format": "int8"}, 400, "encoding_format", "invalid_value", "invalid enum value 'int8'."),
    ("POST", "/score", {"text_1": "a", "text_2": "b"}, 400, "model", "unsupported_value", "The model 'bundled' generates text; this server cannot"),
    ("POST", "/rerank", {"query": "a", "documents": ["b"]}, 400, "model", "unsupported_value", "The model 'bundled' generates text; this server cannot rank"),
    ("POST", "/v1/rerank", {"query": "a", "documents": []}, 400, "documents", "empty_array", "expected 'array' of length >= 1."),
    ("POST", "/pooling", {"input": "x"}, 404, None, "unknown_url", "Unknown route: POST /pooling"),
    ("POST", "/classify", {"input": "x"}, 404, None, "unknown_url", "Unknown route: POST /classify"),
    ("POST", "/tokenize", {}, 400, "prompt", "missing_required_parameter", "Missing required parameter: 'prompt'."),
    ("POST", "/tokenize", {"prompt": 5}, 400, "prompt", "invalid_type", "expected 'str | null', got 'int'."),
    ("POST", "/tokenize", {"prompt": "a", "messages": hi}, 400, "messages", "invalid_value", "Give 'prompt' or 'messages', not both."),
    ("POST", "/detokenize", {}, 400, "tokens", "missing_required_parameter", "Missing required parameter: 'tokens'."),
    ("POST", "/detokenize", {"tokens": ["a"]}, 400, "tokens[0]", "invalid_type", "expected 'int', got 'str'."),
    ("POST", "/detokenize", {"tokens": [-1]}, 400, "tokens[0]", "integer_below_min_value", "expected 'int' >= 0."),
    ("POST", "/detokenize", {"tokens": [10 ** 9]}, 400, "tokens", "invalid_value", "'tokens' must be ids between 0 and 2047, got 1000000000."),
    ("GET", "/v1/models/gpt-4", None, 404, "model", "model_not_found", "The model 'gpt-4' does not exist. This server has 'bundled'."),
    ("POST", "/v1/models", {}, 405, None, "method_not_allowed", "/v1/models does not take POST"),
    ("DELETE", "/v1/models/bundled", None, 405, None, "method_not_allowed", "/v1/models/bundled does not take DELETE"),
    ("POST", "/health", None, 405, None, "method_not_allowed", "/health does not take POST"),
    ("GET", "/v1/engine/state?since=x", None, 400, "since", "invalid_value", "since must be a whole number from -1 to"),
    ("GET", "/v1/requests/none", None, 404, None, "request_not_found", "No finished request 'none' is known here; the last 1024 are."),
    ("GET", "/v1/requests/none/trace", None, 404, None, "request_not_found", "No finished request 'none' is known here; the last 1024 are."),
    ("GET", "/pause", None, 405, None, "method_not_allowed", "/pause does not take GET"),
    ("POST", "/pause", None, 403, None, "admin_disabled", "This route changes the engine for everybody and is switched"),
    ("POST", "/collective_rpc", None, 404, None, "unknown_url", "Unknown route: POST /collective_rpc"),
    ("POST", "/metrics", None, 405, None, "method_not_allowed", "/metrics does not take POST"),
    ("OPTIONS", T, None, 405, None, "method_not_allowed", "/v1/completions does not take OPTIONS"),
    ("POST", "/v1/audio/transcriptions", {}, 404, None, "unknown_url", "Unknown route: POST /v1/audio/transcriptions"),
    ("POST", "/v1/images/generations", {}, 404, None, "unknown_url", "Unknown route: POST /v1/images/generations"),
    ("POST", T, b"prompt=x", 400, None, "invalid_json", "JSON is malformed: invalid character (byte 0)"),
    ("POST", C, DEEP, 400, None, "invalid_json", "nested too deeply"),
    ("POST", C, chat(tools=[{"type": "function", "function": {"name": "f", "parameters": 5}}]),
     400, "tools[0].function.parameters", "invalid_type", "expected 'object | null', got 'int'."),
    ("POST", "/", {}, 405, None, "method_not_allowed", "/ does not take POST"),
    ("POST", "/version", {}, 405, None, "method_not_allowed", "/version does not take POST"),
    ("POST", "/openapi.json", {}, 405, None, "method_not_allowed", "/openapi.json does not take POST"),
    ("POST", "/health/ready", {}, 405, None, "method_not_allowed", "/health/ready does not take POST"),
    ("GET", "/tokenize", None, 405, None, "method_not_allowed", "/tokenize does not take GET"),
    ("POST", "/tokenizer_info", {}, 405, None, "method_not_allowed", "/tokenizer_info does not take POST"),
    ("GET", "/detokenize", None, 405, None, "method_not_allowed", "/detokenize does not take GET"),
    ("POST", "/v1/engine/state", {}, 405, None, "method_not_allowed", "/v1/engine/state does not take POST"),
    ("POST", "/v1/requests", {}, 405, None, "method_not_allowed", "/v1/requests does not take POST"),
    ("POST", "/v1/requests/x", {}, 405, None, "method_not_allowed", "/v1/requests/x does not take POST"),
    ("POST", "/v1/requests/x/trace", {}, 405, None, "method_not_allowed", "/v1/requests/x/trace does not take POST"),
    ("POST", "/api/tags", {}, 405, None, None, "/api/tags does not take POST"),
    ("POST", "/api/ps", {}, 405, None, None, "/api/ps does not take POST"),
    ("POST", "/api/version", {}, 405, None, None, "/api/version does not take POST"),
    ("POST", "/api/create", {}, 400, None, None, "This server has the one model that it was started with:"),
    ("POST", "/api/copy", {}, 400, None, None, "This server has the one model that it was started with:"),
    ("POST", "/api/push", {}, 400, None, None, "This server has the one model that it was started with:"),
    ("DELETE", "/api/delete", {}, 400, None, None, "This server has the one model that it was started with:"),
    ("POST", "/resume", {}, 403, None, "admin_disabled", "This route changes the engine for everybody and is switched"),
    ("GET", "/is_paused", None, 403, None, "admin_disabled", "This route changes the engine for everybody and is switched"),
    ("POST", "/sleep", {}, 403, None, "admin_disabled", "This route changes the engine for everybody and is switched"),
    ("POST", "/wake_up", {}, 403, None, "admin_disabled", "This route changes the engine for everybody and is switched"),
    ("GET", "/is_sleeping", None, 403, None, "admin_disabled", "This route changes the engine for everybody and is switched"),
    ("POST", "/reset_prefix_cache", {}, 403, None, "admin_disabled", "This route changes the engine for everybody and is switched"),
    ("POST", "/v1/load_lora_adapter", {}, 403, None, "admin_disabled", "This route changes the engine for everybody and is switched"),
    ("POST", "/v1/unload_lora_adapter", {}, 403, None, "admin_disabled", "This route changes the engine for everybody and is switched"),
    ("POST", "/v1/score", {"text_1": "a", "text_2": "b"}, 400, "model", "unsupported_value", "The model 'bundled' generates text; this server cannot"),
    ("POST", "/v2/rerank", {"query": "a", "documents": ["b"]},
     400, "model", "unsupported_value", "The model 'bundled' generates text; this server cannot rank"),
    ("POST", "/api/embeddings", {"model": "bundled", "prompt": "x"}, 400, None, None, "This model writes text; it cannot embed."),
]  # fmt: skip


def send(server: httpx.Client, method: str, path: str, body: Any, **headers: str) -> httpx.Response:
    raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    return server.request(method, path, content=raw, headers=headers)


@pytest.mark.parametrize(("method", "path", "body", "status", "param", "code", "piece"), ROWS, ids=[f"{n}{row[1]}" for n, row in enumerate(ROWS)])
def test_row(server: httpx.Client, method: str, path: str, body: Any, status: int, param: str | None, code: str | None, piece: str) -> None:
    answer = send(server, method, path, body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]
    assert not INTERNAL.search(answer.text.replace(path, "")), answer.text
    found, kind = answer.json(), TYPES.get(status, "invalid_request_error")
    if path.startswith("/api/"):
        assert found.keys() == {"error"} and piece in found["error"]
    elif path.startswith(M):
        assert found.keys() - {"request_id"} == {"type", "error"} and found["type"] == "error"
        assert found["error"].keys() == {"type", "message"} and found["error"]["type"] == kind and piece in found["error"]["message"]
    else:
        assert found.keys() == {"error"}
        assert found["error"] | {"message": ""} == {"message": "", "type": kind, "param": param, "code": code}
        assert piece in found["error"]["message"]


def test_a_streamed_request_that_is_wrong_is_refused_the_same_way(server: httpx.Client) -> None:
    for method, path, body, status, *_ in ROWS:
        if path in (T, C, R) and isinstance(body, dict) and status == 400 and "stream" not in body and "stream_options" not in body:
            plain, streamed = send(server, method, path, body), send(server, method, path, body | {"stream": True})
            if "best_of" not in body:
                assert (streamed.status_code, streamed.json()) == (plain.status_code, plain.json()), body


def test_every_route_has_a_row() -> None:
    """Over the table of routes itself: one that is added later cannot be forgotten."""
    asked = [(method, path.split("?")[0]) for method, path, *_ in ROWS]
    for route in all_routes(ServerState(ServerConfig(), "m")):
        scopes = [{"type": "http", "method": method, "path": path, "headers": []} for method, path in asked]
        assert any(route.matches(scope)[0] is not Match.NONE for scope in scopes), f"{route.path} has no row"


ODD_PATHS = ("/", "/v1/models", "/v1/completions", "/health", "/nowhere", "/../../etc/passwd", "/%00", "/%0d%0aX-Evil: 1", "/" + "a" * 3000)


@pytest.mark.parametrize("path", ODD_PATHS, ids=lambda path: path[:20])
@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "TRACE", "PATCH"])
def test_odd_methods_and_paths(server: httpx.Client, method: str, path: str) -> None:
    answer = server.request(method, path)
    assert answer.status_code in (200, 404, 405) and answer.headers["x-request-id"] and "x-evil" not in answer.headers
    if method == "HEAD":
        assert answer.content == b"" and int(answer.headers["content-length"]) > 0
    elif answer.status_code != 200:
        assert answer.json()["error"]["code"] in ("unknown_url", "method_not_allowed")


def test_headers_that_change_nothing(server: httpx.Client) -> None:
    """Curl says that what it posts is a form; some clients say nothing; others ask for what we do not speak."""
    for headers in ({"content-type": "application/x-www-form-urlencoded"}, {"content-type": "text/plain"}, {"accept": "text/html"}, {"accept-encoding": "br"},
                    {"connection": "Upgrade", "upgrade": "h2c"}, {"expect": "100-continue"}, {"te": "trailers"}, {"x-request-id": "a b"}):  # fmt: skip
        answer = send(server, "POST", T, text(), **headers)
        assert answer.status_code == 200 and answer.json()["choices"], headers


def test_texts_that_are_odd_but_right(server: httpx.Client) -> None:
    for prompt in ("\x00", "a\x00b", "\u202e", "\ufeff", "\U0010ffff" * 10, "\r\n" * 10, "<|endoftext|>"):
        answer = send(server, "POST", T, text(prompt=prompt))
        assert answer.status_code == 200, (prompt, answer.text)
