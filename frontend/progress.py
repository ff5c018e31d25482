"""A progress bar over finished requests.

Must not know: requests, the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class ProgressBar:
    """A tqdm progress bar over finished requests with tokens per second. It does nothing if
    use_tqdm is false.
    """

    def __init__(self, num_requests: int | None, use_tqdm: bool | Callable[..., Any]):
        self._bar = None
        self._num_input_tokens = self._num_output_tokens = 0
        self._start = time.perf_counter()
        if use_tqdm and num_requests != 0:  # None: unknown
            make_bar = use_tqdm if callable(use_tqdm) else _tqdm()
            self._bar = make_bar(total=num_requests, desc="Processed prompts", dynamic_ncols=True)

    def update(self, num_input_tokens: int, num_output_tokens: int) -> None:
        """Counts one finished request."""
        if self._bar is None:
            return
        self._num_input_tokens += num_input_tokens
        self._num_output_tokens += num_output_tokens
        elapsed_s = max(time.perf_counter() - self._start, 1e-9)
        speeds = (self._num_input_tokens / elapsed_s, self._num_output_tokens / elapsed_s)
        self._bar.set_postfix_str(
            "est. speed input: {:.2f} toks/s, output: {:.2f} toks/s".format(*speeds), refresh=False
        )
        self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _tqdm() -> Callable[..., Any]:
    from tqdm import tqdm

    return tqdm
