"""Which request is preempted when the KV cache is full, and how, by the cost of undoing it.

Must not know: blocks, queues, the executor that measured the costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ipc.models.kv_layout import KVLayout
from ...ipc.step_messages import PreemptionCosts
from ..request import Request, RequestOwner


class PreemptionPolicy:
    """`mode`: "recompute", "swap" (while there is room in host memory) or "auto" (the cheaper
    one).
    """

    def __init__(self, mode: str, costs: PreemptionCosts, layout: KVLayout):
        self.mode = mode
        self.costs = costs
        self._layout = layout

    def prefers_swap(self, request: Request) -> bool:
        if request.is_pooling:  # the runner forgets what it has pooled of a prompt
            return False
        if self.mode == "auto":
            return self._swap_s(request) < self._recompute_s(request)
        return self.mode == "swap"

    def cost_s(self, request: Request) -> float:
        """Seconds of work until this request is where it is now."""
        return self._swap_s(request) if self.prefers_swap(request) else self._recompute_s(request)

    def _recompute_s(self, request: Request) -> float:
        return request.num_computed_tokens * self.costs.recompute_s_per_token

    def _swap_s(self, request: Request) -> float:
        num_tokens = request.num_computed_tokens * self._layout.held_share(
            request.num_computed_tokens
        )
        return self.costs.swap_s + num_tokens * self.costs.swap_s_per_token

    def choose_victim(self, running: Sequence[Request], index: int) -> int:
        """Which entry of `running` is preempted so that running[index] gets blocks; possibly
        itself.

        It has no row in this step yet, and is never the head, which therefore always finishes. Of
        the owner whose requests have the most computed tokens for its weight, it is the first by
        `order`.
        """
        candidates = range(max(index, 1), len(running)) if len(running) > 1 else range(1)
        held: dict[RequestOwner, float] = {}
        for request in running:
            owner = request.owner
            held[owner] = held.get(owner, 0.0) + request.num_computed_tokens / owner.weight
        return max(candidates, key=lambda i: (held[running[i].owner], self.order(running[i])))

    def order(self, request: Request) -> tuple[int, float, tuple[int, int]]:
        """A sort key: the greatest of one owner's requests is preempted first. That is the request
        in the worst priority class that is cheapest to bring back, and among equals the last to
        arrive.
        """
        return (request.key[0], -self.cost_s(request), request.key)
