"""Layers that keep nothing of a request compute only the rows that are read, with the same bits as
in a whole pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from quire.executor.program.narrowed import NarrowedForward, rows_of
from quire.kernels import registry
from quire.kernels.ops import make_metadata
from quire.tests.executor.driver import Driver, Row, greedy, start_executor
from quire.tests.executor.test_models import random_prompt

needs_native = pytest.mark.skipif(
    registry.select("cpu", torch.bfloat16).chosen["pack_linear"] != "native",
    reason="the native library is not built",
)


def bits(row: Row) -> tuple[list[int], bytes]:
    entries = [*row.prompt_logprobs.values(), *row.logprobs]
    return row.output, b"".join(np.asarray(entry[1]).tobytes() for entry in entries)


def narrowed_of(executor: Any) -> NarrowedForward:
    found = executor.runner.run_pass
    assert isinstance(found, NarrowedForward)
    return found


@needs_native
@pytest.mark.parametrize("options", [{}, {"quantization": "int8", "kv_cache_dtype": "int8"}])
def test_bits_are_those_of_whole_passes(options, tiny, monkeypatch):
    directory = tiny("gemma4_text")
    executor = start_executor(directory, dtype="bfloat16", block_size=16, **options)
    forward = narrowed_of(executor)
    rows = []
    last = forward.sections.last
    begin = type(last).__call__

    def noted(program: Any, token_ids: torch.Tensor, *step: Any) -> Any:
        if program is last:
            rows.append(len(token_ids))
        return begin(program, token_ids, *step)

    monkeypatch.setattr(type(last), "__call__", noted)

    def answers() -> list[tuple[list[int], bytes]]:
        driver = Driver(executor)
        found = [driver.add(f"{n}", random_prompt(n, n), greedy(logprobs=4)) for n in (3, 40, 75)]
        driver.run(3)
        found.append(driver.add("late", random_prompt(90, 5), greedy(logprobs=4)))
        driver.run(14, chunk=lambda row: 16 + row.slot)
        return [bits(row) for row in found]

    narrow = answers()
    # three prompts, then the end of one beside the rows that decode; all chunks before have none
    assert rows[0] == 3 and set(rows) == {3, 4}
    with monkeypatch.context() as patch:
        patch.setattr(forward, "_reads_all", lambda: True)
        assert answers() == narrow


@needs_native
def test_all_rows_are_computed_for_the_log_probabilities_of_a_prompt(tiny):
    executor = start_executor(tiny("gemma4_text"), dtype="bfloat16", block_size=16)
    driver = Driver(executor)
    asked, beside = (
        driver.add(name, random_prompt(60, 7), greedy(logprobs=4, prompt_logprobs=count))
        for name, count in (("asked", 2), ("beside", None))
    )
    driver.run(4, chunk=lambda row: 25)
    assert len(asked.prompt_logprobs) == 59 and not beside.prompt_logprobs
    assert asked.output == beside.output
    alone = Driver(executor)
    row = alone.add("alone", random_prompt(60, 7), greedy(logprobs=4))
    alone.run(4)
    assert bits(row) == bits(beside)


def test_a_model_whose_layers_all_keep_something_is_not_divided(tiny):
    executor = start_executor(tiny("gemma4_text", num_kv_shared_layers=0), dtype="bfloat16")
    assert not isinstance(executor.runner.run_pass, NarrowedForward)
    assert executor.model.sections(4) is None


def test_rows_are_requests_of_one_token():
    tables = [torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32) + 10 * i for i in range(2)]
    slots = [torch.zeros(9, dtype=torch.int64)] * 2
    metadata = make_metadata(
        torch.tensor([0, 1, 5, 9], dtype=torch.int32),
        torch.tensor([8, 4, 20], dtype=torch.int32),
        tables,
        slots,
        1,
        [1, 4, 4],
        [8, 4, 20],
        torch.arange(9, dtype=torch.int32),
    )
    own = rows_of(metadata, torch.tensor([7, 17, 19]), torch.tensor([0, 6, 8]))
    assert own.seq_lens.tolist() == own.seq_lens_list == [8, 18, 20]
    assert own.query_start_loc.tolist() == [0, 1, 2, 3] and own.num_decodes == 3
    assert own.groups[1].block_tables.tolist() == [[11, 12], [15, 16], [15, 16]]
    assert own.adapters is not None and own.adapters.tolist() == [0, 6, 8]
