"""Requests to an engine with the fake executor, and its outputs."""

from __future__ import annotations

from quire.frontend.clients.mp_client import MPClient
from quire.ipc.messages import EngineCoreRequest
from quire.ipc.params import SamplingParams


def make_request(request_id: str, max_tokens: int = 5, prompt=(1, 2, 3)) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id, list(prompt), SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens)
    )


def collect(client: MPClient, *request_ids: str) -> dict[str, tuple[list[int], object]]:
    """Collect until these requests have finished: id -> (tokens, Finished). Rows of other requests
    are skipped.
    """
    tokens, finished = {request_id: [] for request_id in request_ids}, {}
    while len(finished) < len(request_ids):
        outputs = client.get_output()
        start = 0
        for request_id, count in zip(outputs.request_ids, outputs.num_tokens, strict=True):
            if request_id in tokens:
                tokens[request_id] += outputs.token_ids[start : start + count]
            start += count
        finished |= {
            outputs.request_ids[end.row]: end
            for end in outputs.finished
            if outputs.request_ids[end.row] in tokens
        }
    return {request_id: (tokens[request_id], end) for request_id, end in finished.items()}
