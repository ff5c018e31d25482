"""The way of messages between a frontend and an engine in another process, while steps are traced:
when each end encoded and decoded them.

Must not know: sockets, what a message asks for, what is shown of a trace.

    one end     encode ──▶ socket ──▶ decode     the other end
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from .messages import EngineCoreOutputs, EngineCoreRequest
from .trace import Coded, Hop

MAX_CODED = 4096  # of each end and direction; the oldest give way


class MessageTimer:
    """Times the `encoder` and the `decoder` of `sender` and `receiver`, from `start` to `stop`. It
    replaces these attributes meanwhile.
    """

    def __init__(self, sender: Any, receiver: Any):
        self._sender, self._receiver = sender, receiver
        self._timed: tuple[_Timed, _Timed] | None = None

    def start(self) -> None:
        if self._timed is None:
            self._timed = _Timed(self._sender.encoder), _Timed(self._receiver.decoder)
            self._sender.encoder, self._receiver.decoder = self._timed

    def stop(self) -> list[Coded]:
        """What was encoded and decoded since `start`."""
        if self._timed is None:
            return []
        (encoder, decoder), self._timed = self._timed, None
        self._sender.encoder, self._receiver.decoder = encoder.codec, decoder.codec
        return [*encoder.coded, *decoder.coded]

    def add_hops(self, trace: dict[str, Any]) -> dict[str, Any]:
        """Ends the timing of a client. trace: the engine's, as built-in types -> with the hops of
        the messages between both.
        """
        of_engine = msgspec.convert(trace["coded"], list[Coded])
        return trace | {"coded": [], "hops": hops(self.stop(), of_engine)}


class _Timed:
    """An Encoder or a Decoder that notes its work on requests and outputs."""

    def __init__(self, codec: Any):
        self.codec = codec
        self.coded: deque[Coded] = deque(maxlen=MAX_CODED)

    def encode(self, message: Any) -> list:
        begin_s = time.monotonic()
        frames = self.codec.encode(message)
        self._note(message, begin_s, frames)
        return frames

    def decode(self, frames: Sequence[Any]) -> Any:
        begin_s = time.monotonic()
        message = self.codec.decode(frames)
        self._note(message, begin_s, frames)
        return message

    def _note(self, message: Any, begin_s: float, frames: Sequence[Any]) -> None:
        seconds = time.monotonic() - begin_s
        num_bytes = sum(memoryview(frame).nbytes for frame in frames)
        if isinstance(message, EngineCoreRequest):
            self.coded.append(Coded(message.request_id, "", begin_s, seconds, num_bytes))
        elif isinstance(message, EngineCoreOutputs):
            queued = {
                message.request_ids[timing.row]: timing.queued_time for timing in message.timings
            }
            # a request, because two clients of a daemon may get equal numbers in one step
            about = message.epoch, message.engine_index, message.number, message.request_ids[:1]
            self.coded.append(
                Coded("", repr(about), begin_s, seconds, num_bytes, message.timestamp, queued)
            )


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
