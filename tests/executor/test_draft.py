"""What a rank with a draft model holds, and what it refuses."""

from __future__ import annotations

import gc
import weakref

import msgspec
import pytest
from quire import EngineArgs
from quire.executor.draft import draft_config
from quire.executor.worker import Worker
from quire.ipc.config import EngineConfig
from quire.ipc.errors import InvalidParameterError

DRAFTING = {"method": "draft_model", "model": "bundled", "adaptive": False}


def make_config(**arguments) -> EngineConfig:
    settings = {"dtype": "bfloat16", "max_num_seqs": 8, "max_model_len": 256} | arguments
    return EngineArgs("bundled", **settings).create_engine_config()


def make_worker(**arguments) -> Worker:
    worker = Worker(make_config(**arguments))
    worker.load_model(lambda stage, fraction: None)
    return worker


def test_blocks_weights_and_swap_space_hold_both_models():
    plain, drafting = make_worker(), make_worker(speculative_config=DRAFTING)
    assert draft_config(plain.config) is None
    assert drafting.block_bytes == 2 * plain.block_bytes
    usage = [worker.memory_usage()["weights_bytes"] for worker in (plain, drafting)]
    assert usage[1] == 2 * usage[0]
    small = make_worker(speculative_config=DRAFTING | {"quantization": "int4"})
    assert usage[0] < small.memory_usage()["weights_bytes"] < usage[1]
    layers = drafting.attention_layers()
    drafting.initialize_kv_cache(9)
    drafting.initialize_swap_space()
    assert len(layers) == 10 and len({layer.key_cache.data_ptr() for layer in layers}) == 10
    assert len(drafting._mover._host_caches) == 20


@pytest.mark.slow
def test_a_draft_model_leaves_memory_with_the_weights():
    worker = make_worker(speculative_config=DRAFTING | {"adaptive": True})
    worker.initialize_kv_cache(9)
    draft_model = weakref.ref(worker._draft.drafter.passes.model)
    worker.sleep(["kv_cache", "weights"])
    gc.collect()
    assert draft_model() is None
    worker.wake_up(["weights", "kv_cache"])
    assert worker.runner.speculation.drafter is worker._draft.drafter


def test_a_model_without_whole_context_is_refused():
    windows = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}
    config = make_config(hf_overrides=windows, speculative_config=DRAFTING)
    with pytest.raises(InvalidParameterError, match="sees the whole context"):
        Worker(config).load_model(lambda stage, fraction: None)


def test_the_draft_model_is_a_model_of_its_own_configuration():
    config = make_config(speculative_config=DRAFTING)
    wanted = config.scheduler_config.speculative_config
    assert wanted is not None and wanted.draft_model_config is not None
    assert draft_config(config) == wanted.draft_model_config
    assert wanted.draft_model_config.max_model_len == config.model_config.max_model_len
    other = msgspec.structs.replace(wanted, draft_model_config=None)
    scheduling = msgspec.structs.replace(config.scheduler_config, speculative_config=other)
    assert draft_config(msgspec.structs.replace(config, scheduler_config=scheduling)) is None
