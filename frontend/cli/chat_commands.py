"""The commands of a conversation in the terminal: /help, /clear, /system and the others.

Must not know: how a line is read or an answer shown, engines.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...ipc.checks import closest
from ...ipc.errors import InvalidParameterError
from ...ipc.params import SamplingParams
from .attachments import leading_images, notice, read_image
from .conversation import Conversation, Display
from .flags import Flag
from .session import request_flags
from .values import from_text

MAX_FILE_BYTES = 64 * 2**20
ROLES = ["user", "assistant"]


class SavedTurn(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[dict[str, Any]]  # parts, if the message has images


class Saved(msgspec.Struct):
    """The file of /save."""

    messages: list[SavedTurn]
    system: str | None = None


class Commands:
    """Runs lines that begin with a slash. `is_over`: /exit was entered."""

    def __init__(self, conversation: Conversation, display: Display):
        self.conversation = conversation
        self.display = display
        self.is_over = False

    def run(self, line: str) -> None:
        """Runs a line. Raises InvalidParameterError naming the command for an unknown command or
        invalid input.
        """
        name, _, argument = line.strip().partition(" ")
        if name not in COMMANDS:
            near = closest(name[1:], [command[1:] for command in COMMANDS])
            meant = f"did you mean /{near}?" if near else "/help lists the commands"
            raise InvalidParameterError(name[:40], f"there is no such command; {meant}")
        action, usage, _ = COMMANDS[name]
        argument = argument.strip()
        if argument and " " not in usage:
            raise InvalidParameterError(name, f"takes no argument, got {argument[:40]!r}")
        action(self, argument)

    def help(self, argument: str) -> None:
        width = max(len(usage) for _, usage, _ in COMMANDS.values())
        for _, usage, what in COMMANDS.values():
            self.display.notice(f"{usage:<{width}}  {what}")
        if self.conversation.reads_images:
            self.display.notice("An image file that is dragged into the terminal is sent, too.")
        self.display.notice("Alt-Enter, or \\ at the end of a line, begins a new line.")
        self.display.notice("Ctrl-C stops an answer, Ctrl-D exits, // begins a turn with a slash.")

    def image(self, argument: str) -> None:
        if not argument:
            raise InvalidParameterError("/image", "give a file: /image FILE")
        # as a terminal pastes it when a file is dragged into it
        paths, rest = leading_images(argument)
        if rest:
            paths = [Path(argument).expanduser()]
        self.attach(paths, "/image")

    def attach(self, paths: Sequence[Path], parameter: str) -> None:
        """Adds images to the next turn. Raises InvalidParameterError that names `parameter`."""
        if paths and not self.conversation.reads_images:
            raise InvalidParameterError(parameter, "this model reads text only")
        for attachment in [read_image(path, parameter) for path in paths]:
            self.conversation.attach(attachment.part)
            notice(attachment, self.display.notice)

    def clear(self, argument: str) -> None:
        self.conversation.clear()
        self.display.notice("(a new conversation)")

    def system(self, argument: str) -> None:
        if argument:
            self.conversation.set_system(None if argument == "none" else argument)
        self.display.notice(f"system: {self.conversation.system or 'none'}")

    def set_parameter(self, argument: str) -> None:
        flags = {flag.name: flag for flag in request_flags()}
        sampling = self.conversation.sampling
        if not argument:
            for name, value in sorted(sampling.items()):
                self.display.notice(f"{name} = {value!r}")
            return
        name, _, text = argument.partition(" ")
        name = name.replace("-", "_")
        if name not in flags:
            near = closest(name, flags)
            meant = f"did you mean {near}?" if near else f"it is one of {', '.join(flags)}"
            raise InvalidParameterError(name[:40], f"there is no such sampling parameter; {meant}")
        self.conversation.set_parameter(name, self._value(flags[name], text.strip()))
        self.display.notice(f"{name} = {self.conversation.sampling[name]!r}")

    def _value(self, flag: Flag, text: str) -> Any:
        if not text:
            raise InvalidParameterError(flag.name, f"give a value: /set {flag.name} VALUE")
        try:
            value = from_text(flag, text)
        except ValueError as error:
            raise InvalidParameterError(flag.name, str(error)) from None
        SamplingParams(**{**self.conversation.sampling, flag.name: value})  # validates it
        if flag.name == "n" and value != 1:
            raise InvalidParameterError("n", "a conversation has one answer per turn")
        return value

    def save(self, argument: str) -> None:
        path = _path("/save", argument)
        if path.exists():
            _read("/save", path)  # raises if the file exists and is not a conversation
        content = {"system": self.conversation.system, "messages": self.conversation.messages}
        try:
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
            ) as file:
                json.dump(content, file, ensure_ascii=False, indent=1)
            os.replace(file.name, path)
        except OSError as error:
            raise InvalidParameterError("/save", f"cannot write {path}: {error.strerror}") from None
        self.display.notice(f"({self._turns()} saved in {path})")

    def load(self, argument: str) -> None:
        saved = _read("/load", _path("/load", argument))
        messages = [msgspec.structs.asdict(turn) for turn in saved.messages]
        self.conversation.restore(saved.system, messages)
        self.display.notice(f"({self._turns()} loaded)")

    def _turns(self) -> str:
        num_turns = len(self.conversation.messages) // 2
        return f"{num_turns} turn{'s' * (num_turns != 1)}"

    def regenerate(self, argument: str) -> None:
        self.conversation.regenerate(self.display)

    def stats(self, argument: str) -> None:
        for line in self.conversation.stats.lines(self.conversation.context):
            self.display.notice(line)

    def exit(self, argument: str) -> None:
        self.is_over = True


COMMANDS: dict[str, tuple[Callable[[Commands, str], None], str, str]] = {
    "/help": (Commands.help, "/help", "list the commands"),
    "/image": (Commands.image, "/image FILE", "send an image with the next message"),
    "/clear": (Commands.clear, "/clear", "start a new conversation; the system message stays"),
    "/system": (Commands.system, "/system [TEXT]", "show or set the system message; none: remove"),
    "/set": (Commands.set_parameter, "/set [NAME VALUE]", "show or set a sampling parameter"),
    "/save": (Commands.save, "/save FILE", "write the conversation to a JSON file"),
    "/load": (Commands.load, "/load FILE", "continue a conversation from a file"),
    "/regenerate": (Commands.regenerate, "/regenerate", "answer the last turn again"),
    "/stats": (Commands.stats, "/stats", "tokens, speed and context"),
    "/exit": (Commands.exit, "/exit", "leave"),
}


def _path(command: str, argument: str) -> Path:
    if not argument:
        raise InvalidParameterError(command, f"give a file: {command} FILE")
    return Path(argument).expanduser()


def _read(command: str, path: Path) -> Saved:
    """Returns A saved conversation. Raises InvalidParameterError for any other file."""
    if not path.is_file():
        raise InvalidParameterError(command, f"{path} is not a file")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise OSError(0, "too large for a conversation")
        saved = msgspec.json.decode(path.read_bytes(), type=Saved)
        if [turn.role for turn in saved.messages] != ROLES * (len(saved.messages) // 2):
            raise ValueError("not alternating")
    except OSError as error:
        raise InvalidParameterError(command, f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError, RecursionError):
        problem = f"{path} is not a conversation written by /save"
        raise InvalidParameterError(command, problem) from None
    return saved
