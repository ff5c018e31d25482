"""`log_steps` writes a line per step."""

import logging
import re

from quire.tests.core.engine_loop import greedy, make_core, make_request, run


def lines_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "quire.core.observation"]


def test_each_step_has_a_line(caplog):
    caplog.set_level(logging.INFO)
    core = make_core(log_steps=True)
    core.add_request(make_request("a", prompt=[1, 2, 3], params=greedy(max_tokens=3)))
    run(core)
    lines = lines_of(caplog)
    assert len(lines) == core.scheduler.num_steps == 3
    first, *_, last = lines
    assert first.startswith(
        "step 0: 1 running, 0 waiting; 1 requests, 3 prompt tokens computed, 1 tokens sampled, "
        "0 finished; schedule "
    )
    assert re.search(r"schedule \d+\.\d{3}, execute \d+\.\d{3}, process \d+\.\d{3} ms$", first)
    assert "step 2: 0 running" in last and "1 finished" in last


def test_without_it_there_is_none(caplog):
    caplog.set_level(logging.INFO)
    core = make_core()
    core.add_request(make_request("a", prompt=[1, 2, 3], params=greedy(max_tokens=3)))
    run(core)
    assert not lines_of(caplog)
