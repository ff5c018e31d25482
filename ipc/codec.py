"""Messages to frames and back: msgspec's msgpack for the message, a frame of its own for each large
array.

Must not know: sockets, or what a message means.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, get_args

import msgspec

from .messages import Array, ClientMessage

# Below this an array is copied into the message, above it travels as its own frame. Measured over
# ipc:// (CPU time of a send and a receive): a second frame costs 6 us; 64 KiB cost the same either
# way, 256 KiB are 3.7x and 1 MiB is 8x cheaper as a frame.
INLINE_BYTES = 64 * 1024

ITEM_BYTES = {
    "i1": 1,
    "u1": 1,
    "i2": 2,
    "u2": 2,
    "f2": 2,
    "i4": 4,
    "u4": 4,
    "f4": 4,
    "i8": 8,
    "u8": 8,
    "f8": 8,
}


class BadFrameError(ValueError):
    """These frames are no message of the expected kind.

    The only exception that `Decoder.decode` raises, whatever the bytes.
    """


class MessageTooLargeError(ValueError):
    """This message is larger than max_message_bytes; the peer would refuse it."""


class Encoder:
    """Encodes messages.

    Not for several threads at once: an encoding in progress keeps its large arrays here.
    """

    def __init__(self, max_message_bytes: int):
        self.max_message_bytes = max_message_bytes
        self._buffers: list[memoryview] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_array)

    def encode(self, message: msgspec.Struct) -> list[bytes | memoryview]:
        """The frames of a message: the message itself, then its large arrays in order, not copied:
        do not change them until they are sent.

        Raises MessageTooLargeError, or TypeError / ValueError / OverflowError for a value that
        msgpack cannot carry.
        """
        self._buffers = buffers = []
        frames = [self._encoder.encode(message), *buffers]
        self._buffers = []
        size = sum(memoryview(frame).nbytes for frame in frames)
        if size > self.max_message_bytes:
            raise MessageTooLargeError(
                f"a message of {size} bytes is larger than "
                f"max_message_bytes={self.max_message_bytes}"
            )
        return frames

    def _encode_array(self, value: Any) -> list:
        if not isinstance(value, Array):
            raise TypeError(f"a {type(value).__name__} cannot travel in a message")
        data = memoryview(value.data)
        if not data.c_contiguous:
            raise ValueError("an Array's data must be contiguous")
        if data.nbytes != math.prod(value.shape) * ITEM_BYTES[value.dtype]:
            raise ValueError(
                f"an Array of {value.dtype} {tuple(value.shape)} cannot have {data.nbytes} bytes"
            )
        if data.nbytes == 0:
            return [value.dtype, value.shape, b""]
        data = data.cast("B")
        if data.nbytes < INLINE_BYTES:
            return [value.dtype, value.shape, data]
        self._buffers.append(data)
        return [value.dtype, value.shape, len(self._buffers)]  # its index among the frames


class Decoder:
    """Decodes one direction's messages (`type_` is ClientMessage or EngineMessage).

    Not for several threads at once.
    """

    def __init__(self, type_: Any, max_message_bytes: int):
        self.max_message_bytes = max_message_bytes
        self._frames: Sequence[Any] = ()
        self._num_frames_used = 0
        self._decoder = msgspec.msgpack.Decoder(type_, dec_hook=self._decode_array)

    def decode(self, frames: Sequence[Any]) -> Any:
        """The message in these frames (any buffers).

        Arrays are memoryviews into them, so they live as long as the arrays do.

        Every frame must be used, once and in order. Raises BadFrameError and nothing else.
        """
        try:
            size = sum(memoryview(frame).nbytes for frame in frames)
            if size > self.max_message_bytes:
                raise BadFrameError(
                    f"{size} bytes are more than max_message_bytes={self.max_message_bytes}"
                )
            self._frames, self._num_frames_used = frames, 1
            message = self._decoder.decode(frames[0])
            if self._num_frames_used != len(frames):
                raise BadFrameError(
                    f"{len(frames)} frames came, {self._num_frames_used} are spoken of"
                )
            return message
        except BadFrameError:
            raise
        # msgspec raises DecodeError and ValidationError, but also UnicodeDecodeError and
        # RecursionError, and lets pass what a __post_init__ or a hook raises; a frame from outside
        # must not choose which handler it meets.
        except Exception as error:
            raise BadFrameError(f"{type(error).__name__}: {error}") from error
        finally:
            self._frames = ()

    def _decode_array(self, type_: type, value: Any) -> Array:
        if type_ is not Array:
            raise BadFrameError(f"nothing decodes a {type_}")
        dtype, shape, data = value
        if type(shape) is not list or not all(type(n) is int and n >= 0 for n in shape):
            raise BadFrameError("an Array's shape must be a list of sizes")
        if type(data) is int:
            if data != self._num_frames_used or data >= len(self._frames):
                raise BadFrameError(
                    f"an Array speaks of frame {data}, next is {self._num_frames_used} of "
                    f"{len(self._frames)}"
                )
            self._num_frames_used += 1
            data = self._frames[data]
        elif type(data) is not bytes:
            raise BadFrameError("an Array's data must be bytes or the index of a frame")
        data = memoryview(data)
        if data.nbytes != math.prod(shape) * ITEM_BYTES[dtype]:
            raise BadFrameError(f"an Array of {dtype} {shape} cannot have {data.nbytes} bytes")
        return Array(dtype, tuple(shape), data)


_FIELDS = {cls.__struct_config__.tag: cls.__struct_fields__ for cls in get_args(ClientMessage)}


def in_words(error: BadFrameError, frames: Sequence[Any]) -> str:
    """The error of a bad client message for people: msgspec says "at `$[5][0]`", which becomes "at
    `eos_token_ids[0]`" (0 is the tag).
    """

    def name(match: re.Match) -> str:
        fields, index = _FIELDS.get(tag, ()), int(match[1])
        return f"`{fields[index - 1]}" if 1 <= index <= len(fields) else match[0]

    try:
        tag = msgspec.msgpack.decode(frames[0])[0]
        return re.sub(r"`\$\[(\d+)\]", name, str(error))
    except Exception:  # as in Decoder.decode: any bytes at all may come here
        return str(error)


def whose(frames: Sequence[Any]) -> str | int | None:
    """What a bad frame was about, if it still tells: the id of a request (str) or of a utility call
    (int). Its sender waits for an answer.
    """
    try:
        tag, identity, *_ = msgspec.msgpack.decode(frames[0])
    except Exception:  # as in Decoder.decode: any bytes at all may come here
        return None
    return (
        identity
        if (tag == "add" and type(identity) is str) or (tag == "call" and type(identity) is int)
        else None
    )
