"""Hostile grammars next to another request whose tokens must not change: each is refused or
bounded, and the engine continues to work.
"""

from __future__ import annotations

import time

import psutil
import pytest
from quire import (
    EngineArgs,
    InvalidParameterError,
    LLMEngine,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.tests.structured.bombs import bombs

SETTINGS = dict(
    max_num_seqs=8,
    max_model_len=512,
    num_gpu_blocks_override=1 + 8 * 32,
    num_threads=1,
    dtype="float32",
)
NEIGHBOUR = "Once upon a time"
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
# for all grammars, engine and checks together; torch's own memory is not counted
MOST_MEMORY = 1.5 * 2**30
DEADLINE_S = 60.0  # detects hangs, not slowness


class Site:
    """An engine in its own process, in which another request repeatedly generates the same text."""

    def __init__(self):
        others = psutil.Process().children()
        self.engine = LLMEngine.from_engine_args(EngineArgs(**SETTINGS), engine="process")
        self.processes = [
            process for process in psutil.Process().children() if process not in others
        ]
        self.num_neighbours = 0
        self.finished: dict[str, object] = {}
        self.run_other_request()
        self.expected = self.finished.pop("neighbour 0").outputs[0].token_ids  # run alone
        self.memory_before = self.peak = self.memory()

    def memory(self) -> int:
        """Bytes of the engine's process and of the processes it has started."""
        family = [
            process
            for parent in self.processes
            for process in (parent, *parent.children(recursive=True))
        ]
        total = 0
        for process in family:
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:  # has ended in the meantime
                pass
        return total

    def step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self.finished[output.request_id] = output

    def run_other_request(self) -> None:
        name = f"neighbour {self.num_neighbours}"
        self.engine.add_request(name, NEIGHBOUR, GREEDY)
        while name not in self.finished:
            self.step()
        self.num_neighbours += 1

    def run_hostile(self, name: str, **grammar) -> tuple[str, float]:
        """Runs a hostile grammar -> how it ended, an error or a finish reason, and after how many
        seconds.

        The other request generates all the time.
        """
        start = time.monotonic()
        try:
            params = SamplingParams(
                temperature=1.0,
                seed=1,
                max_tokens=12,
                structured_outputs=StructuredOutputsParams(**grammar),
            )
            self.engine.add_request(name, "x", params)
        except InvalidParameterError as error:
            return str(error), time.monotonic() - start
        seconds = 0.0
        while name not in self.finished:
            neighbour = f"neighbour {self.num_neighbours}"
            self.engine.add_request(neighbour, NEIGHBOUR, GREEDY)
            while neighbour not in self.finished:
                self.step()
                self.peak = max(self.peak, self.memory())
                if name in self.finished and not seconds:
                    seconds = time.monotonic() - start
            assert self.finished.pop(neighbour).outputs[0].token_ids == self.expected, (
                f"beside {name}"
            )
            self.num_neighbours += 1
            assert time.monotonic() - start < DEADLINE_S, f"{name} does not end"
        output = self.finished[name]
        return output.error or output.outputs[0].finish_reason, seconds


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hostile_grammars_are_refused_or_bounded_and_do_not_affect_others() -> None:
    site = Site()
    try:
        ends = {name: site.run_hostile(name, **grammar) for name, grammar in bombs().items()}
        for name, (end, seconds) in ends.items():
            print(f"{seconds:6.2f} s  {name}: {end[:120]}")
        print(f"memory: {(site.peak - site.memory_before) / 2**20:.0f} MiB at most")
        assert all(
            end in ("stop", "length") or end.startswith("structured_outputs")
            for end, _ in ends.values()
        ), ends
        refused = [name for name, (end, _) in ends.items() if end not in ("stop", "length")]
        assert len(ends) >= 60 and len(refused) >= 25
        assert any("takes longer" in end for end, _ in ends.values()), (
            "no grammar exceeded the time limit: the test is too weak"
        )
        assert any("ended the process" in end for end, _ in ends.values()), (
            "no grammar ended its process: the test is too weak"
        )
        assert site.peak - site.memory_before < MOST_MEMORY
        # The engine works as before, with other requests' grammars too.
        assert site.run_hostile("a fine grammar", choice=["yes", "no"])[0] == "stop"
        assert site.engine.client.call_utility("check_integrity")
        state = site.engine.client.call_utility("scheduler_state")
        assert not state["running"] and not state["waiting"] and not state["waiting_for_grammar"]
    finally:
        site.engine.shutdown()
    assert not [process for process in site.processes if process.is_running()]


def test_a_grammar_is_checked_while_another_uses_up_its_time() -> None:
    site = Site()
    try:
        site.run_hostile("warm up", choice=["x"])
        endless = SamplingParams(
            max_tokens=4,
            structured_outputs=StructuredOutputsParams(
                grammar=bombs()["a hundred intersections"]["grammar"]
            ),
        )
        site.engine.add_request("endless", "x", endless)
        assert site.run_hostile("a fine grammar", choice=["yes", "no"])[0] == "stop"
        assert "endless" not in site.finished
        while "endless" not in site.finished:
            site.step()
    finally:
        site.engine.shutdown()
