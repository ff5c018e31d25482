"""What a server process counts itself, and the sums over the processes that share a port.

Must not know: how metrics are shown, what the engine counts.

Each process of a group writes what it has counted to a file of its own about once a second; the one
that answers a scrape adds what the others have written. The file of a process that has died keeps
what it had counted, so that a sum never falls.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from .meters import Meters

logger = logging.getLogger(__name__)
RUNNING, OVER = ".json", ".over"  # suffixes of the file of a process that runs, or has died


@dataclass(slots=True)
class Totals:
    """Counters and gauges of one server process, or the sums of several."""

    started: float  # seconds since 1970, the first one's
    meters: Meters
    # num_running, num_queued, num_queued_tokens
    gauges: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)  # by bound
    # Each process counts each engine that is replaced: of several, the greatest number counts.
    restarts: Counter[str] = field(default_factory=Counter)  # by cause
    of_client: Counter[str] = field(default_factory=Counter)  # ClientCounters
    last_gap: tuple[float, float] | None = None  # see Restarts; all processes have the same clock

    def packed(self) -> bytes:
        counts = [self.gauges, self.rejected, self.restarts, self.of_client]
        return msgspec.json.encode([self.started, self.meters.packed(), *counts, self.last_gap])

    def add(self, packed: bytes, *, is_over: bool) -> None:
        """Adds what another process has packed, without its gauges if it is over."""
        started, meters, *counts, last_gap = msgspec.json.decode(packed)
        gauges, rejected, restarts, of_client = counts
        self.meters.add(meters, is_over=is_over)
        self.rejected.update(rejected)
        self.of_client.update(of_client)
        self.restarts |= Counter(restarts)  # the greater of both
        if last_gap is not None:
            self.last_gap = max(self.last_gap or (0.0, 0.0), tuple(last_gap))
        if not is_over:
            self.started = min(self.started, started)
            self.gauges.update(gauges)


class SharedTotals:
    """The files of a group of server processes in `folder`; `name` is this process's."""

    def __init__(self, folder: Path, name: str):
        self._folder = folder
        self._path = folder / (name + RUNNING)

    def publish(self, totals: Totals) -> None:
        """Where that is impossible, as on a full disk, the others see what was published before."""
        draft = self._path.with_suffix(".draft")
        try:
            draft.write_bytes(totals.packed())
            draft.replace(self._path)
        except OSError as error:
            logger.warning("the sums of /metrics are not those of all processes: %s", error)

    def of_all(self, own: Totals) -> Totals:
        """Returns the sums over all processes of the group, this one as it is now."""
        totals = Totals(own.started, Meters())
        totals.add(own.packed(), is_over=False)
        for packed, is_over in self._of_others():
            totals.add(packed, is_over=is_over)
        return totals

    def _of_others(self) -> Iterator[tuple[bytes, bool]]:
        for path in sorted(self._folder.iterdir()):
            if path != self._path and path.suffix in (RUNNING, OVER):
                try:
                    yield path.read_bytes(), path.suffix == OVER
                except FileNotFoundError:  # it has died just now
                    yield path.with_suffix(OVER).read_bytes(), True


def end_totals(folder: Path, name: str) -> None:
    """Notes that the process `name` has died."""
    path = folder / (name + RUNNING)
    if path.exists():
        path.rename(path.with_suffix(OVER))
