"""When each end encoded and decoded the messages between a frontend and an engine in another
process, while steps are traced.

Must not know: sockets, what a message asks for, what is shown of a trace.

    one end     encode ──▶ socket ──▶ decode     the other end
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from .codec import Codec
from .messages import EngineCoreOutputs, EngineCoreRequest
from .trace import Coded, Hop

MAX_CODED = 4096  # of each end and direction; the oldest are dropped


class MessageTimer:
    """Times what `codec` encodes and decodes, from `start` to `stop`."""

    def __init__(self, codec: Codec):
        self._codec = codec
        self._untimed: Codec | None = None  # while it times: what `codec` is otherwise
        self._coded: tuple[deque[Coded], ...] = ()  # of each direction, since `start`

    def start(self) -> None:
        if self._untimed is None:
            self._untimed = replace(self._codec)
            encoded, decoded = self._coded = deque(maxlen=MAX_CODED), deque(maxlen=MAX_CODED)
            self._codec.encode = partial(_timed_encode, self._codec.encode, encoded)
            self._codec.decode = partial(_timed_decode, self._codec.decode, decoded)

    def stop(self) -> list[Coded]:
        """What was encoded and decoded since `start`."""
        if self._untimed is None:
            return []
        self._codec.encode, self._codec.decode = self._untimed.encode, self._untimed.decode
        self._untimed = None
        return [one for direction in self._coded for one in direction]

    def add_hops(self, trace: dict[str, Any]) -> dict[str, Any]:
        """Ends the timing of a client. trace: the engine's, as built-in types -> with the hops of
        the messages between both.
        """
        of_engine = msgspec.convert(trace["coded"], list[Coded])
        return trace | {"coded": [], "hops": hops(self.stop(), of_engine)}


def _timed_encode(encode: Callable[[Any], list], coded: deque[Coded], message: Any) -> list:
    begin_s = time.monotonic()
    frames = encode(message)
    _note(coded, message, begin_s, frames)
    return frames


def _timed_decode(decode: Callable[[Any], Any], coded: deque[Coded], frames: Sequence[Any]) -> Any:
    begin_s = time.monotonic()
    message = decode(frames)
    _note(coded, message, begin_s, frames)
    return message


def _note(coded: deque[Coded], message: Any, begin_s: float, frames: Sequence[Any]) -> None:
    """Appends it to `coded` if it is a request or outputs."""
    seconds = time.monotonic() - begin_s
    num_bytes = sum(memoryview(frame).nbytes for frame in frames)
    if isinstance(message, EngineCoreRequest):
        coded.append(Coded(message.request_id, "", begin_s, seconds, num_bytes))
    elif isinstance(message, EngineCoreOutputs):
        queued = {message.request_ids[timing.row]: timing.queued_time for timing in message.timings}
        # a request, because two clients of a daemon may get equal numbers in one step
        about = message.epoch, message.engine_index, message.number, message.request_ids[:1]
        coded.append(Coded("", repr(about), begin_s, seconds, num_bytes, message.timestamp, queued))


def hops(own: Sequence[Coded], of_engine: Sequence[Coded]) -> list[Hop]:
    """The messages that both ends have seen: of a client's own work and its engine's."""
    engine_s = {(one.request_id, one.number, one.made_s): one for one in of_engine}
    queued = {name: s for one in own for name, s in one.queued_s.items()}
    found = []
    for mine in own:
        theirs = engine_s.get((mine.request_id, mine.number, mine.made_s))
        if theirs is None:
            continue
        is_request = bool(mine.request_id)
        first, second = (mine, theirs) if is_request else (theirs, mine)
        found.append(
            Hop(
                mine.request_id,
                mine.num_bytes,
                first.begin_s if is_request else mine.made_s,
                first.begin_s,
                first.seconds,
                second.begin_s,
                second.seconds,
                queued.get(mine.request_id, 0.0),
            )
        )
    return found
