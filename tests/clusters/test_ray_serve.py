"""examples/ray_serve without Ray: the choice of a replica, and what is taken off a repeated stream.
`pytest -m clients` runs the application on a Ray cluster.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "ray_serve"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ray_serve_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


routing, streams = load("routing"), load("streams")


def chat(*contents: str, model: str = "m") -> dict[str, Any]:
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents)]
    return {"model": model, "messages": messages}


def test_the_turns_of_a_conversation_have_one_key() -> None:
    first = routing.conversation_key(chat("Be brief.", "Hello"))
    assert first and first == routing.conversation_key(chat("Be brief.", "Hello", "Hi", "More"))
    others = [
        chat("Be brief.", "Hullo"),
        chat("Be long.", "Hello"),
        chat("Be brief.", "Hello", model="lora"),
        {"model": "m", "prompt": "Hello"},
    ]
    assert first not in [routing.conversation_key(other) for other in others]
    story = "Once upon a time " * 30
    one, other = ({"prompt": story + end} for end in ("a", "b"))
    assert routing.conversation_key(one) == routing.conversation_key(other)
    assert routing.conversation_key({"prompt": [1, 2]}) != routing.conversation_key({"prompt": [1]})
    for body in (None, [], {}, {"model": "m"}):
        assert routing.conversation_key(body) == ""
    for odd in ([1], ["text"], [None], [{}]):  # the replica refuses them
        assert routing.conversation_key({"messages": odd})


def test_replicas_share_keys_and_keep_them() -> None:
    keys = [f"key {number}" for number in range(900)]
    three = dict.fromkeys("abc", 0)
    chosen = {key: routing.in_order(key, three, 8)[0] for key in keys}
    assert min(Counter(chosen.values()).values()) > 200
    two = dict.fromkeys("ab", 0)
    for key in keys:  # only the keys of the replica that has gone move
        assert routing.in_order(key, two, 8)[0] == (
            chosen[key] if chosen[key] != "c" else routing.in_order(key, two, 8)[0]
        )
        assert sorted(routing.in_order(key, three, 8)) == ["a", "b", "c"]


def test_imbalance_is_bounded() -> None:
    """Requests with one key: no replica has more than `slack` above another."""
    num_running = dict.fromkeys("abc", 0)
    for _ in range(100):
        num_running[routing.in_order("key", num_running, 4)[0]] += 1
        assert max(num_running.values()) - min(num_running.values()) <= 5
    assert routing.in_order("", {"a": 3, "b": 1, "c": 2}, 4) == ["b", "c", "a"]


# ---------------------------------------------------------------- streams

ANSWERS = [("The fox — läuft.", "stop"), ("", "length"), ("12 + 30", "length")]


def events(cuts: list[list[int]], identity: str, kind: str) -> list[bytes]:
    """A stream of three choices, whose texts are cut at these places."""
    chunks: list[dict[str, Any]] = []
    if kind == "chat":
        roles = [{"index": i, "delta": {"role": "assistant", "content": ""}} for i in range(3)]
        chunks += [{"choices": [role]} for role in roles]
    for index, ((text, reason), places) in enumerate(zip(ANSWERS, cuts, strict=True)):
        ends = sorted({place for place in places if 0 < place < len(text)}) + [len(text)]
        for begin, end in zip([0, *ends], ends):
            part = {"content": text[begin:end]} if kind == "chat" else {}
            choice: dict[str, Any] = {"index": index, "finish_reason": None}
            choice |= {"delta": part} if kind == "chat" else {"text": text[begin:end]}
            chunks.append({"choices": [choice]})
        last: dict[str, Any] = {"index": index, "finish_reason": reason}
        chunks.append({"choices": [last | ({"delta": {}} if kind == "chat" else {"text": ""})]})
    chunks.append({"choices": [], "usage": {"completion_tokens": 9}})
    written = [json.dumps({"id": identity, "created": 5} | chunk).encode() for chunk in chunks]
    return [
        b": keep-alive\n\n",
        *(b"data: " + one + b"\n\n" for one in written),
        b"data: [DONE]\n\n",
    ]


def read(parts: list[bytes]) -> tuple[list[str], list[list[str]], int, set[str]]:
    """(texts, finish reasons, number of usages, ids) of a stream."""
    texts, reasons, num_usages, ids = [""] * 3, [[], [], []], 0, set()
    for part in parts:
        if part.startswith(b"data: {"):
            chunk = json.loads(part[6:])
            ids.add(chunk["id"])
            num_usages += bool(chunk.get("usage"))
            for choice in chunk["choices"]:
                index = choice["index"]
                texts[index] += choice.get("text") or choice.get("delta", {}).get("content") or ""
                reasons[index] += [choice["finish_reason"]] if choice.get("finish_reason") else []
    return texts, reasons, num_usages, ids


CUTS = st.lists(st.lists(st.integers(0, 20), max_size=6), min_size=3, max_size=3)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from(["chat", "completion"]))
def test_a_stream_that_dies_anywhere_loses_and_repeats_nothing(data: Any, kind: str) -> None:
    delivered, parts = streams.Delivered(), []
    num_deaths = data.draw(st.integers(0, 3))
    for death in range(num_deaths + 1):
        of_replica = events(data.draw(CUTS), f"id-{death}", kind)
        end = data.draw(st.integers(0, len(of_replica) - 1)) if death < num_deaths else None
        parts += [part for event in of_replica[:end] if (part := delivered.new_part(event))]
        delivered.resume()
    texts, reasons, num_usages, ids = read(parts)
    assert texts == [text for text, _ in ANSWERS] and delivered.can_resume
    assert reasons == [[reason] for _, reason in ANSWERS] and num_usages == 1 and len(ids) == 1
    assert parts[-1] == b"data: [DONE]\n\n" and parts.count(parts[-1]) == 1


@pytest.mark.parametrize(
    "choice",
    [
        {"index": 0, "delta": {"tool_calls": [{"index": 0}]}},
        {"index": 0, "text": "a", "logprobs": {"tokens": ["a"]}},
        {"index": 0, "text": "a", "token_ids": [5]},
    ],
)
def test_what_cannot_be_cut_is_not_resumed(choice: dict[str, Any]) -> None:
    delivered = streams.Delivered()
    event = b"data: " + json.dumps({"id": "a", "choices": [choice]}).encode() + b"\n\n"
    assert json.loads(delivered.new_part(event)[6:])["choices"] == [choice]
    assert not delivered.can_resume


def test_errors_pass() -> None:
    delivered = streams.Delivered()
    event = b'data: {"error": {"message": "no"}}\n\n'
    assert json.loads(delivered.new_part(event)[6:])["error"] == {"message": "no"}


def test_seeds() -> None:
    assert streams.with_seed({"seed": 3}) == {"seed": 3}
    seeds = {streams.with_seed({"seed": None})["seed"] for _ in range(20)}
    assert len(seeds) > 15 and all(0 <= seed < 2**31 for seed in seeds)
