"""Encodes messages to frames and decodes them: msgpack for the message, one more frame per large
array.

Must not know: sockets, or what a message means.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from .messages import Array, ClientMessage

# Smaller arrays are copied into the message, larger ones travel as frames. Measured over ipc://
# (CPU time of a send and a receive): a second frame costs 6 us; 64 KiB cost the same either way,
# 256 KiB are 3.7 times and 1 MiB is 8 times cheaper as a frame.
INLINE_BYTES = 64 * 1024

DTYPES = ("i1", "u1", "i2", "u2", "f2", "i4", "u4", "f4", "i8", "u8", "f8")
ITEM_BYTES = {dtype: int(dtype[1]) for dtype in DTYPES}


class BadFrameError(ValueError):
    """The frames are not a message of the expected kind.

    The only exception that `MessageDecoder.decode` raises, whatever the bytes.
    """


class MessageTooLargeError(ValueError):
    """The message is larger than max_message_bytes; the peer would refuse it."""


class MessageEncoder:
    """Encodes messages. Not thread-safe: large arrays are kept here during an encoding."""

    def __init__(self, max_message_bytes: int):
        self.max_message_bytes = max_message_bytes
        self._buffers: list[memoryview] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_array)

    def encode(self, message: msgspec.Struct) -> list[bytes | memoryview]:
        """Returns the frames of a message: the message, then its large arrays in order.

        The arrays are not copied; do not change them until they are sent. Raises
        MessageTooLargeError, or TypeError, ValueError or OverflowError for a value that msgpack
        cannot encode.
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
        return [value.dtype, value.shape, len(self._buffers)]  # the index among the frames


class MessageDecoder:
    """Decodes the messages of one direction (`type_` is ClientMessage or EngineMessage). Not
    thread-safe.
    """

    def __init__(self, type_: Any, max_message_bytes: int):
        self.max_message_bytes = max_message_bytes
        self._frames: Sequence[Any] = ()
        self._num_frames_used = 0
        self._decoder = msgspec.msgpack.Decoder(type_, dec_hook=self._decode_array)

    def decode(self, frames: Sequence[Any]) -> Any:
        """Returns the message in these frames (any buffers).

        Arrays are memoryviews of the frames, which live as long as the arrays. Every frame must be
        used, once and in order. Raises BadFrameError and nothing else.
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
                    f"{len(frames)} frames arrived, the message uses {self._num_frames_used}"
                )
            return message
        except BadFrameError:
            raise
        # msgspec raises DecodeError and ValidationError, but also UnicodeDecodeError and
        # RecursionError, and passes on what a __post_init__ or a hook raises. An outside frame must
        # not select the handler.
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
                    f"an Array refers to frame {data}, expected {self._num_frames_used} of "
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


@dataclass
class Codec:
    """How one end of a wire encodes and decodes. While steps are traced, hops.py times both."""

    max_message_bytes: int
    encode: Callable[[msgspec.Struct], list[bytes | memoryview]]
    decode: Callable[[Sequence[Any]], Any]


def make_codec(received: Any, max_message_bytes: int) -> Codec:
    """received: the type of the messages that this end decodes."""
    encoder = MessageEncoder(max_message_bytes)
    decoder = MessageDecoder(received, max_message_bytes)
    return Codec(max_message_bytes, encoder.encode, decoder.decode)


_FIELDS = {cls.__struct_config__.tag: cls.__struct_fields__ for cls in get_args(ClientMessage)}


def readable_error(error: BadFrameError, frames: Sequence[Any]) -> str:
    """Makes msgspec's error for a bad client message readable: "at `$[5][0]`" becomes "at
    `eos_token_ids[0]`" (index 0 is the tag).
    """

    def name(match: re.Match) -> str:
        fields, index = _FIELDS.get(tag, ()), int(match[1])
        return f"`{fields[index - 1]}" if 1 <= index <= len(fields) else match[0]

    try:
        tag = msgspec.msgpack.decode(frames[0])[0]
        return re.sub(r"`\$\[(\d+)\]", name, str(error))
    except Exception:  # as in MessageDecoder.decode: any bytes are possible here
        return str(error)


def sender_id(frames: Sequence[Any]) -> str | int | None:
    """Returns the request id (str) or utility call id (int) of a bad frame, if it can be read: the
    sender waits for an answer.
    """
    try:
        tag, identity, *_ = msgspec.msgpack.decode(frames[0])
    except Exception:  # as in MessageDecoder.decode: any bytes are possible here
        return None
    return (
        identity
        if (tag == "add" and type(identity) is str) or (tag == "call" and type(identity) is int)
        else None
    )
