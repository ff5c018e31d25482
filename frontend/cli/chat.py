"""`quire chat`: a conversation in the terminal, or over standard input with one turn per line.

Must not know: how an engine is reached, how a turn is rendered, how a line is edited.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO

from ...ipc.errors import InvalidParameterError
from .attachments import leading_images
from .chat_commands import COMMANDS, Commands
from .chat_terminal import (
    MarkdownDisplay,
    PlainDisplay,
    history_file,
    make_editor,
    open_history,
)
from .conversation import Conversation
from .flags import Flag, given
from .parser import Parser
from .session import (
    add_session_flags,
    check_sampling,
    default_sampling,
    lora_of,
    open_engine,
    request_flags,
    require_generation,
)
from .sources import naming_sources

USAGE = "[MODEL] [--system TEXT] [--image FILE] [sampling flags] [engine flags]"
DESCRIPTION = (
    "Chats with the model. /help lists the commands, /exit or Ctrl-D exits, Ctrl-C stops the "
    "answer. From a pipe: one turn per line, and the commands /image, /clear and /exit."
)
COMMON_SAMPLING = ("temperature", "top_p", "max_tokens", "stop")
SYSTEM = Flag("system", str | None, None, "System message before the first turn.")
IMAGE = Flag("image", list[str], [], "Image for the first message; may be repeated.")
DEFAULTS = {"max_tokens": None}  # None: an answer may fill the context


def make_parser(argv: list[str]) -> Parser:
    parser = Parser("chat", USAGE, DESCRIPTION, argv)
    parser.add_model()
    parser.add_flags("conversation", [SYSTEM, IMAGE], ("system", "image"))
    parser.add_flags("sampling", request_flags(**DEFAULTS), COMMON_SAMPLING)
    add_session_flags(parser, without=("model",))
    return parser


def main(argv: list[str]) -> int:
    args = make_parser(argv).parse(argv)
    sampling = given(args, request_flags())
    with naming_sources(args.settings):
        check_sampling(sampling)
        if sampling.get("n", 1) != 1:
            raise InvalidParameterError("n", "a conversation has one answer per turn")
        if getattr(args, "skip_tokenizer_init", False):
            raise InvalidParameterError("skip_tokenizer_init", "a conversation needs the tokenizer")
    with open_engine(args) as engine:
        require_generation(engine)
        conversation = Conversation(
            engine,
            {**default_sampling(engine, **DEFAULTS), **sampling},
            getattr(args, "system", None),
            lora_of(args),
        )
        is_terminal = sys.stdin.isatty()
        display = make_display(sys.stdout) if is_terminal else PlainDisplay(sys.stdout, sys.stderr)
        commands = Commands(conversation, display)
        paths = [Path(path).expanduser() for path in getattr(args, "image", ())]
        commands.attach(paths, "image")
        return talk_interactively(commands) if is_terminal else talk_line_by_line(commands)


def talk_interactively(commands: Commands) -> int:
    """Reads turns and commands from a terminal until /exit or Ctrl-D."""
    conversation, display = commands.conversation, commands.display
    display.notice("/help lists the commands, /exit or Ctrl-D exits, Ctrl-C stops an answer")
    editor = make_editor(open_history(history_file(), display.notice), sorted(COMMANDS))
    while not commands.is_over:
        try:
            line = editor.prompt()
        except EOFError:
            break
        except KeyboardInterrupt:
            display.notice("(Ctrl-D exits)")
            continue
        try:
            paths, rest = leading_images(line) if conversation.reads_images else ([], line)
            if paths:
                commands.attach(paths, "image")
                if rest:
                    conversation.say(rest, display)
            elif line.startswith("/") and not line.startswith("//"):
                commands.run(line)
            elif line.strip():
                conversation.say(line.strip().removeprefix("/" * line.startswith("//")), display)
        except InvalidParameterError as error:
            display.error(str(error))
    return 0


def make_display(out: TextIO) -> PlainDisplay:
    """Returns a display that renders Markdown if the terminal supports cursor movement, or one that
    prints plain text.
    """
    is_capable = out.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return (MarkdownDisplay if is_capable else PlainDisplay)(out, sys.stderr)


def talk_line_by_line(commands: Commands) -> int:
    """Reads turns from a pipe. A turn that fails is reported, later turns still run, and the exit
    code is 2.
    """
    code, conversation, display = 0, commands.conversation, commands.display
    for line in sys.stdin:
        line = line.strip()
        if line == "/exit":
            break
        if line == "/clear":
            conversation.clear()
        elif line:
            try:
                if line.startswith("/image "):
                    commands.run(line)
                else:
                    conversation.say(line, display)
            except InvalidParameterError as error:
                display.error(str(error))
                code = 2
    return code
