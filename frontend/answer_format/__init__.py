"""Parses model output into content, reasoning and tool calls while it streams.

Must not know: tokens, requests, HTTP, the shape of any API's body.
"""

from .answer import (
    Content,
    ParsedAnswer,
    ParsedToolCall,
    Part,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    collect,
)
from .formats import AnswerFormat, detect
from .parser import AnswerParser

__all__ = [
    "AnswerFormat",
    "AnswerParser",
    "Content",
    "ParsedAnswer",
    "ParsedToolCall",
    "Part",
    "Reasoning",
    "ToolCallArguments",
    "ToolCallStart",
    "collect",
    "detect",
]
