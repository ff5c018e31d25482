"""Who gives way when the KV cache is full, and how: what each choice costs to undo.

Must not know: blocks, queues, the executor that measured the costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ipc.messages import PreemptionCosts
from ..request import Request


class PreemptionPolicy:
    """`mode`: "recompute", "swap" (while there is room in host memory) or "auto" (for each request
    what costs less).
    """

    def __init__(self, mode: str, costs: PreemptionCosts):
        self.mode = mode
        self.costs = costs

    def prefers_swap(self, request: Request) -> bool:
        if self.mode == "auto":
            return self._swap_s(request) < self._recompute_s(request)
        return self.mode == "swap"

    def cost_s(self, request: Request) -> float:
        """Seconds of work until this request would be where it is now."""
        if self.mode == "auto":
            return min(self._swap_s(request), self._recompute_s(request))
        return self._swap_s(request) if self.mode == "swap" else self._recompute_s(request)

    def _recompute_s(self, request: Request) -> float:
        return request.num_computed_tokens * self.costs.recompute_s_per_token

    def _swap_s(self, request: Request) -> float:
        return self.costs.swap_s + request.num_computed_tokens * self.costs.swap_s_per_token

    def choose_victim(self, running: Sequence[Request], index: int) -> int:
        """Which entry of `running` gives way so that running[index] gets its blocks; perhaps
        itself.

        One that has no row in this step yet, and never the head, which so always finishes. Of the
        worst priority class the cheapest to bring back; of equals the last to come.
        """
        candidates = range(max(index, 1), len(running)) if len(running) > 1 else range(1)
        return max(
            candidates, key=lambda i: (running[i].key[0], -self.cost_s(running[i]), running[i].key)
        )
