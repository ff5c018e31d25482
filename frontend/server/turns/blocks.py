"""AnswerBlocks: the parts of a response as a sequence of blocks (text, reasoning or a call), as in
Anthropic's API and OpenAI's Responses.

Must not know: an API's names for blocks, or how it encodes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...answer_format import Content, Part, Reasoning, ToolCallStart

TEXT, REASONING, CALL = "text", "reasoning", "call"
KINDS = {Content: TEXT, Reasoning: REASONING}  # of other parts: CALL
START, DELTA, STOP = "start", "delta", "stop"
BlockEvent = tuple[str, "AnswerBlock", str]  # event, block, new text of the block


@dataclass(slots=True)
class AnswerBlock:
    """`text` is the text, the reasoning, or the JSON of a call's arguments."""

    kind: str
    index: int  # among all blocks
    name: str = ""  # name of the called function
    call_id: str = ""  # the model's own, if it writes any
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of a call, for APIs that pass a call on when it is whole."""
        return msgspec.json.decode(self.text, type=dict[str, Any])


class AnswerBlocks:
    """Converts parts to events: blocks begin, grow and end.

    At most one block is open, which is the last.
    """

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self._open: AnswerBlock | None = None

    def feed(self, parts: Iterable[Part]) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        for part in parts:
            if isinstance(part, ToolCallStart):
                events += self.begin(CALL, part.name, part.id)
                continue
            if not part.text:
                continue
            kind = KINDS.get(type(part), CALL)
            block = self._open
            if block is None or block.kind != kind:
                events += self.begin(kind)
                block = self.blocks[-1]
            block.pieces.append(part.text)
            events.append((DELTA, block, part.text))
        return events

    def begin(self, kind: str, name: str = "", call_id: str = "") -> list[BlockEvent]:
        """Opens a block, after closing the open one."""
        events = self.close()
        self._open = AnswerBlock(kind, len(self.blocks), name, call_id)
        self.blocks.append(self._open)
        return [*events, (START, self._open, "")]

    def close(self) -> list[BlockEvent]:
        """Closes the open block, if there is one."""
        block, self._open = self._open, None
        return [] if block is None else [(STOP, block, "")]
