"""Harmony, the answer format of gpt-oss: messages, each with a channel and perhaps a recipient.

Must not know: templates, requests.

    <|channel|>analysis<|message|>TEXT<|end|><|start|>assistant
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

    <|channel|>analysis<|message|>TEXT<|end|><|start|>assistant
    <|channel|>final<|message|>TEXT<|return|>

The prompt ends with the first message's <|start|>assistant. What a message is follows from its
header, as in the format's description (https://cookbook.openai.com/articles/openai-harmony): one
to a function is a call, `analysis` is reasoning, and the rest is content. Content includes
`commentary` without a recipient, in which a model announces its calls to the user.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass

from .answer import Content, Part, Reasoning
from .forced import Functions, write_json_calls
from .grammar_text import ANY_TEXT, GrammarText
from .json_calls import read_arguments
from .reasoning import ReasoningMarks
from .text_stream import Malformed, TextReader, TextStream
from .tool_calls import Calls, ToolFormat

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = ENDS = ("<|end|>", "<|return|>", "<|call|>")
ANSWER_ENDS = (RETURN, CALL)
BOUNDARIES = (*ENDS, START, CHANNEL)  # a message may end without its mark
NEXT_MESSAGE = f"{START}assistant"
FINAL = f"{CHANNEL}final"
PREAMBLE = f"{CHANNEL}commentary{MESSAGE}"

MAX_HEADER_LENGTH = 512
CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w*)")
# A recipient stands in the role's part of the header or in the channel's.
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
FUNCTIONS = "functions."
_ROLE_SO_FAR = "|".join("assistant"[:length] for length in range(10))
_RECIPIENT_SO_FAR = r"(?:\s+(?:t|to|to=[^\s<]*)?)?"
# The answer breaks off at such a header. Other text at the end may only mention a mark.
UNFINISHED_HEADER = re.compile(
    rf"(?:{_ROLE_SO_FAR}){_RECIPIENT_SO_FAR}"
    rf"(?:<\|channel\|>\w*{_RECIPIENT_SO_FAR}\s*(?:<\|constrain\|>)?\w*)?\s*"
)


@dataclass(frozen=True)
class HarmonyReasoning(ReasoningMarks):
    start: str = f"{CHANNEL}analysis{MESSAGE}"
    end: str = END
    next_message: str = NEXT_MESSAGE
    efforts: tuple[str, ...] = ("low", "medium", "high")

    def is_shown_in(self, template: str) -> bool:
        return self.start in template

    def is_open_at_end_of(self, prompt_text: str) -> bool:
        return opened_by(prompt_text).startswith(f"{NEXT_MESSAGE}{self.start}")

    def is_closed_at_end_of(self, prompt_text: str) -> bool:
        """Tells whether the prompt ends in another channel's text, which the model continues."""
        return MESSAGE in opened_by(prompt_text) and not self.is_open_at_end_of(prompt_text)

    def write_content(self, grammar: GrammarText, content: str) -> str:
        kind = f"({grammar.literal(f' {CONSTRAIN}json')})?"
        return f"{grammar.literal(FINAL)} {kind} {grammar.literal(MESSAGE)} {content}"


@dataclass(frozen=True)
class HarmonyCalls(ToolFormat):
    starts: tuple[str, ...] = (f"{CHANNEL}commentary to={FUNCTIONS}",)
    answer_ends: tuple[str, ...] = ANSWER_ENDS
    before_arguments: str = f" {CONSTRAIN}json{MESSAGE}"
    between: str = f"{CALL}{NEXT_MESSAGE}"

    def write(self, grammar: GrammarText, functions: Functions, parallel: bool) -> str:
        """Omits the last <|call|>, which is an end-of-sequence token."""
        return write_json_calls(
            grammar,
            functions,
            parallel,
            lambda name: f"{name}{self.before_arguments}",
            "",
            ("", self.between + self.start, ""),
        )

    def write_voluntary(self, grammar: GrammarText, functions: Functions, parallel: bool) -> str:
        preamble = (
            f"{grammar.literal(PREAMBLE)} {grammar.text_until(END)} {grammar.literal(NEXT_MESSAGE)}"
        )
        calls = f"{grammar.literal(self.start)} {self.write(grammar, functions, parallel)}"
        text = f"{grammar.literal(FINAL + MESSAGE)} {grammar.rule(ANY_TEXT)}"
        return f"({preamble})* {grammar.any_of([text, calls])}"

    def read(self, stream: TextStream, calls: Calls, mark: str) -> TextReader:
        """`mark` is the header of a message to a function."""
        name = function_of(mark, calls)
        yield from stream.skip_space()
        character = yield from stream.peek()
        if not character and (calls.schemas.get(name) or {}).get("required"):
            raise Malformed  # the answer breaks off
        if character in ("", "<"):  # no text
            calls.start(name)
            calls.emit_arguments("{}")
            return
        yield from read_arguments(stream, calls, name)
        yield from stream.skip_space()
        stream.drop()


class MessageSink:
    """Passes on the text of messages of one kind, with a line break between two messages."""

    def __init__(self, kind: type[Content | Reasoning]):
        self._kind = kind
        self._before = ""
        self._has_text = False

    def begin_message(self) -> None:
        self._before = "\n" if self._has_text else ""

    def __call__(self, text: str) -> Part:
        text, self._before, self._has_text = self._before + text, "", True
        return self._kind(text)


def read_messages(
    stream: TextStream, calls: Calls, call_format: HarmonyCalls | None, reads_reasoning: bool
) -> TextReader:
    """Reads an answer. If `call_format` is None, no text is a call. Without `reads_reasoning`,
    reasoning is content, with its marks.

    What looks like a mark and neither begins nor ends a message is text.
    """
    content, reasoning = MessageSink(Content), MessageSink(Reasoning)
    speech, mark = content, ""
    while mark is not None:
        try:
            header = yield from _read_header(stream, mark)
            if header is None:
                return
            is_call = call_format is not None and bool(function_of(header, calls))
            is_reasoning = not is_call and channel_of(header) == "analysis"
            if is_reasoning and not reads_reasoning:
                raise Malformed
            stream.drop()
            speech = reasoning if is_reasoning else content
            speech.begin_message()
            if call_format is not None and is_call:
                calls.begin()
                yield from call_format.read(stream, calls, header)
                calls.end()
        except Malformed:
            if mark in ENDS and speech is reasoning:
                stream.go_to(stream.retry_position)
                stream.drop()
            else:
                calls.give_up()
            if mark in ENDS:
                speech = content
        stream.open_sink(speech)
        mark = yield from stream.read_until(BOUNDARIES, keeps_space=True)


def _read_header(stream: TextStream, mark: str) -> Generator[None, None, str | None]:
    """Consumes the header after `mark`, up to its <|message|>, and returns it. Returns None if the
    answer ends before or within it.

    `mark` is one of BOUNDARIES, which is consumed, or "" at the beginning of the answer. Raises
    Malformed for other text.
    """
    if mark in ("", *ENDS):
        has_message, mark = bool(mark), ""
        yield from stream.skip_space()
        for first in (START, CHANNEL) if has_message else (START, CHANNEL, "to=", MESSAGE):
            mark = mark or (first if (yield from stream.accept(first)) else "")
        if not mark:
            if has_message and _is_cut(stream, (START, CHANNEL)):
                return None
            raise Malformed
    if mark != START:
        stream.put_back(len(mark))  # it is part of the header
    begin = stream.position
    while not (yield from stream.accept(MESSAGE)):
        if (yield from stream.accept(CHANNEL)) or (yield from stream.accept(CONSTRAIN)):
            continue
        character = yield from stream.peek()
        if _is_cut(stream, (MESSAGE, CHANNEL, CONSTRAIN)) and UNFINISHED_HEADER.fullmatch(
            stream.buffer, begin, stream.position
        ):
            return None
        if character in ("", "<", "\n") or stream.position - begin > MAX_HEADER_LENGTH:
            raise Malformed
        stream.skip(1)
    return stream.buffer[begin : stream.position]


def _is_cut(stream: TextStream, marks: tuple[str, ...]) -> bool:
    """Tells whether the answer ends here, or within one of `marks`."""
    return stream.has_ended and any(
        mark.startswith(stream.buffer[stream.position :]) for mark in marks
    )


def channel_of(header: str) -> str:
    found = CHANNEL_NAME.search(header)
    return found[1] if found else ""


def function_of(header: str, calls: Calls) -> str:
    """Returns the function to which a message is addressed, or ""."""
    found = RECIPIENT.search(header)
    recipient = found[1] if found else ""
    is_function = recipient.startswith(FUNCTIONS) or recipient in calls.schemas
    return recipient.removeprefix(FUNCTIONS) if is_function else ""


def opened_by(prompt_text: str) -> str:
    """Returns the message with which a prompt ends and which the answer continues, with its
    <|start|>. Returns "" if there is none.
    """
    found = prompt_text.rfind(START)
    message = prompt_text[found:] if found >= 0 else ""
    return "" if any(end in message for end in ENDS) else message


def header_at_end_of(prompt_text: str) -> str:
    """Returns the beginning of the message that the answer continues. It is read before the answer,
    so that its channel is known.
    """
    message = opened_by(prompt_text)
    header, mark, _ = message.partition(MESSAGE)
    return header + mark if mark or CHANNEL in message else ""
