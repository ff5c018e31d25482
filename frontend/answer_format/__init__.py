"""Parses model output into content, reasoning and tool calls while it streams.

Must not know: tokens, requests, HTTP, the shape of any API's body.
"""

from .answer import (
    Answer,
    Content,
    Part,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
    collect,
)
from .formats import AnswerFormat, detect
from .parser import AnswerParser

__all__ = [
    "Answer",
    "AnswerFormat",
    "AnswerParser",
    "Content",
    "Part",
    "Reasoning",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallStart",
    "collect",
    "detect",
]
