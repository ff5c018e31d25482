"""Which replica a request goes to: one that has computed the beginning of its conversation."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

PROMPT_CHARACTERS = 256  # of a prompt that is no conversation


def conversation_key(body: Any) -> str:
    """What all turns of a conversation have in common: its messages up to the first of the user,
    the system's included; of a plain prompt, its beginning. "": any replica will do.
    """
    if not isinstance(body, dict):
        return ""
    if isinstance(messages := body.get("messages"), list):
        first = next(
            (
                i
                for i, one in enumerate(messages)
                if isinstance(one, dict) and one.get("role") == "user"
            ),
            len(messages),
        )
        return json.dumps([body.get("model"), messages[: first + 1]], sort_keys=True)
    prompt = body.get("prompt")
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    return "" if prompt is None else json.dumps([body.get("model"), text[:PROMPT_CHARACTERS]])


def in_order(key: str, num_running: Mapping[str, int], slack: int) -> list[str]:
    """The replicas, best first. `num_running`: requests in progress by replica.

    By highest random weight: a key keeps its replica when others come and go. A replica that has
    more than `slack` requests above the least loaded one comes after those that have not.
    """
    limit = min(num_running.values(), default=0) + slack

    def weight(replica: str) -> bytes:
        return blake2b(f"{key}\0{replica}".encode(), digest_size=8).digest()

    by_weight = sorted(num_running, key=weight, reverse=True)
    if not key:
        random.shuffle(by_weight)
        return sorted(by_weight, key=lambda replica: num_running[replica])
    within = [replica for replica in by_weight if num_running[replica] <= limit]
    return within + sorted({*num_running} - {*within}, key=lambda replica: num_running[replica])
