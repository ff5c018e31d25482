"""Messages of every kind, and damaged frames made from them, for the fuzz tests."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from quire.ipc.codec import INLINE_BYTES, MessageEncoder
from quire.ipc.counters import SchedulerStats
from quire.ipc.messages import (
    PROTOCOL,
    AbortRequests,
    Array,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineMessage,
    Failed,
    Finished,
    FinishReason,
    Hello,
    PaceOutputs,
    Progress,
    StartWave,
    TokenLogprobs,
    UtilityCall,
    UtilityResult,
    WaveReport,
)
from quire.ipc.params import RequestOutputKind, SamplingParams

_ARRAY, _LARGE = (
    Array("i4", (2, 2), bytes(16)),
    Array("f4", (INLINE_BYTES // 4,), bytes(INLINE_BYTES)),
)

# Without Shutdown and Config: the engine would obey a damaged frame that still decodes to
# one of these.
CLIENT_MESSAGES = [
    EngineCoreRequest("fuzz-1", [1, 2, 3], SamplingParams(seed=1, max_tokens=2)),
    EngineCoreRequest(
        "fuzz-2",
        list(range(90)),
        SamplingParams(seed=2, max_tokens=2, stop=["x"], logit_bias={1: 2.0}, logprobs=3),
        eos_token_ids=[1, 2],
    ),
    EngineCoreRequest(
        "fuzz-3",
        [4],
        SamplingParams(seed=3, max_tokens=1, output_kind=RequestOutputKind.DELTA),
        [],
        1.5,
        -3,
        "salt",
        [5],
    ),
    AbortRequests(["fuzz-1", "fuzz-9"]),
    PaceOutputs(2000),
    StartWave(3),
    UtilityCall(2**33, "ping", ["text", 1, None, {"a": [1.5]}]),
]
ENGINE_MESSAGES: list[EngineMessage] = [
    WaveReport(2, 3),
    EngineCoreOutputs(
        0,
        ["fuzz-1", "fuzz-2"],
        [0, 4],
        [2, 1],
        [5, 6, 7],
        [Finished(1, FinishReason.ERROR, error="bad")],
        [TokenLogprobs(0, _ARRAY, _LARGE, _ARRAY)],
        [(0, 16)],
        SchedulerStats(1, 2, 3),
        4.5,
    ),
    EngineCoreOutputs(
        0,
        ["fuzz-1"],
        [3],
        [3],
        [5, 6, 7],
        timestamp=4.5,
        step_times=[4.25, 4.5],
        token_steps=[0, 0, 1],
    ),
    UtilityResult(2**33, {"a": [1, None, "b"]}),
    UtilityResult(2**33, None, Failed("ValueError", "no", "traceback", "parameter")),
    Hello(PROTOCOL, 1),
    Progress("load weights", 0.5),
]


# Decorates a fuzz test: a few frames by default, a million per direction with `pytest -m slow`.
NUM_FRAMES = pytest.mark.parametrize(
    "num_frames",
    [20_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)


def mutations(messages: list, rng: random.Random, num_frames: int) -> Iterator[list[bytes]]:
    """Generate frames that are random, cut, spliced, bit-flipped, repeated or reordered."""
    originals = [
        [bytes(frame) for frame in MessageEncoder(2**24).encode(message)] for message in messages
    ]
    for _ in range(num_frames):
        frames = list(rng.choice(originals))
        kind = rng.randrange(7)
        if kind == 0:
            frames = [rng.randbytes(rng.randrange(200)) for _ in range(rng.randint(1, 3))]
        elif kind == 1:
            frames[0] = frames[0][: rng.randrange(len(frames[0]))]
        elif kind == 2:
            other = rng.choice(originals)[0]
            frames[0] = (
                frames[0][: rng.randrange(len(frames[0]))] + other[rng.randrange(len(other)) :]
            )
        elif kind == 3:
            frames = frames[:-1] + [b"more"] * rng.randrange(3)
        elif kind == 4:
            frames[0] = (
                rng.choice([b"\x91", b"\x81\xa1a", b"\xc4", b"\xa9add"]) * rng.randrange(2000)
                + frames[0]
            )
        else:
            damaged = bytearray(frames[0])
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            frames[0] = bytes(damaged)
        yield frames or [b""]
