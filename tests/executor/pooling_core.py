"""Engine cores that pool, started from a model's directory as a frontend would, and requests to
them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from quire.core.engine_core import EngineCore
from quire.frontend.engine_args import EngineArgs
from quire.ipc.messages import EngineCoreRequest, FinishReason
from quire.ipc.models.ranks import num_ranks
from quire.ipc.params import PoolingParams, SamplingParams
from quire.tests.executor.driver import to_numpy
from quire.tests.executor.rank_threads import RankThreads


def start_core(directory: str | Path, **arguments) -> EngineCore:
    """Arguments of EngineArgs, with defaults for tests. Several ranks are threads."""
    defaults = {
        "dtype": "float32",
        "num_threads": 1,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 2**24,
        "max_model_len": 256,
    }
    args = EngineArgs(str(directory), **{**defaults, **arguments})
    config = args.create_engine_config()
    executor = RankThreads(config) if num_ranks(config) > 1 else None
    return EngineCore(config, executor, check_every_step=True)


def run(core: EngineCore, requests: dict[str, tuple[list[int], PoolingParams | SamplingParams]]):
    """The pooled results by id; of others their tokens; or the error."""
    for request_id, (prompt, params) in requests.items():
        core.add_request(EngineCoreRequest(request_id, prompt, params))
    found: dict = {}
    while core.has_work():
        outputs, has_run = core.step_fn()
        core.post_step(has_run)
        for rows in (outputs or {}).values():
            ends = {end.row: end for end in rows.finished}
            for pooled in rows.pooled:
                assert ends[pooled.row].reason is FinishReason.STOP
                found[rows.request_ids[pooled.row]] = to_numpy(pooled.values).copy()
            tokens = iter(rows.token_ids)
            for row, (request_id, count) in enumerate(zip(rows.request_ids, rows.num_tokens)):
                if count:
                    found.setdefault(request_id, []).extend(next(tokens) for _ in range(count))
                if row in ends and ends[row].error:
                    found[request_id] = ends[row].error
    assert core.observer.scheduler_state()["requests"] == []
    return found


def pool(core: EngineCore, texts: list[list[int]], task: str = "embed", **params) -> list:
    """The result, or the error, of each text."""
    wanted = PoolingParams(task=task, **params)
    found = run(core, {str(i): (text, wanted) for i, text in enumerate(texts)})
    return [found[str(i)] for i in range(len(texts))]


def raw_rows(core: EngineCore, texts: list[list[int]]) -> list[np.ndarray]:
    """The hidden states [T, hidden_size] of each text."""
    return pool(core, texts, "token_embed", use_activation=False)
