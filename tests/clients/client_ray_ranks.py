"""Ranks as actors of a Ray cluster (`distributed_executor_backend="ray"`): two nodes on this
machine with room for one rank each. Tokens, and what happens when ranks, a node or the engine die.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
from checks import raises, run

os.environ |= {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import ray
from quire import LLM, SamplingParams
from quire.ipc.errors import EngineDeadError, InvalidParameterError
from ray.cluster_utils import Cluster

REQUIREMENTS = {"ray_ranks": "ray"}
DISTRIBUTION = "ray"
USES_QUIRE = True
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 2**26,
}
RAY: dict[str, Any] = {**ARGUMENTS, "distributed_executor_backend": "ray"}
SIZES: list[dict[str, Any]] = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]
PROMPTS = [{"prompt_token_ids": [1 + number, 2, 3]} for number in range(16)]
SHORT = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, temperature=0.8, seed=3, ignore_eos=True)


@contextlib.contextmanager
def cluster_of_two() -> Iterator[tuple[Cluster, Any]]:
    """Yield the cluster, and its second node."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    second = cluster.add_node(num_cpus=1)
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        os.environ["RAY_ADDRESS"] = cluster.address  # of the engines
        yield cluster, second
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        ray.shutdown()
        cluster.shutdown()


def rank_processes() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::RankActor"):
                found.append(process)
    return found


def engine_process() -> psutil.Process:
    [engine] = [
        process
        for process in psutil.Process().children(recursive=True)
        if "quire.core.engine_proc" in process.cmdline()
    ]
    return engine


def tokens(outputs: list[Any]) -> list[Any]:
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


def left_over() -> list[str]:
    """What a shut down or killed engine has not taken with it."""
    groups = [
        f"placement group {group['placement_group_id']}"
        for group in ray.util.placement_group_table().values()
        if group["state"] != "REMOVED"
    ]
    actors = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    return [*groups, *actors, *(f"process {process.pid}" for process in rank_processes())]


def wait_until_nothing_is_left(timeout_s: float = 10.0) -> None:
    began = time.monotonic()
    while left := left_over():
        assert time.monotonic() - began < timeout_s, left
        time.sleep(0.1)
    note(f"nothing left after {time.monotonic() - began:.1f} s")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def check_ranks_in_a_cluster(address: str, model_directory: str) -> None:
    """One check, since starting a cluster takes most of the time."""
    needs_a_cluster(model_directory)
    with LLM(model_directory, **ARGUMENTS) as one:
        short, long = (
            tokens(one.generate(PROMPTS, params, use_tqdm=False)) for params in (SHORT, LONG)
        )
    with cluster_of_two() as (cluster, second):
        for size in SIZES:
            began = time.monotonic()
            with LLM(model_directory, **RAY, **size) as several:
                note(f"{size}: started in {time.monotonic() - began:.1f} s")
                assert len(rank_processes()) == 2
                assert tokens(several.generate(PROMPTS, SHORT, use_tqdm=False)) == short
            wait_until_nothing_is_left()
        dies_with_its_engine(model_directory)
        names_the_rank_that_died(model_directory)
        with LLM(model_directory, **RAY, **SIZES[0]) as several:
            victim = rank_processes()[1]
            continues(several, long, "a rank killed", victim.kill)
            assert victim.pid not in [process.pid for process in rank_processes()]

            def kill_node() -> None:
                cluster.remove_node(second, allow_graceful=False)
                cluster.add_node(num_cpus=1)

            continues(several, long, "a node killed", kill_node)
        wait_until_nothing_is_left()


def needs_a_cluster(model_directory: str) -> None:
    """Both are refused by name before or while an engine starts."""
    one = raises(InvalidParameterError, lambda: LLM(model_directory, **RAY))
    assert "above 1" in str(one), one
    os.environ["RAY_ADDRESS"] = "127.0.0.1:9"
    try:
        error = raises(Exception, lambda: LLM(model_directory, **RAY, **SIZES[0]))
    finally:
        del os.environ["RAY_ADDRESS"]
    assert "needs a Ray cluster" in str(error), error


def continues(engine: LLM, wanted: list[Any], what: str, kill: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        outputs = pool.submit(engine.generate, PROMPTS, LONG, use_tqdm=False)
        time.sleep(1.0)
        assert not outputs.done()
        began = time.monotonic()
        kill()  # in the main thread, as Ray wants to start nodes
        assert tokens(outputs.result()) == wanted
    took_s = time.monotonic() - began
    note(f"{what}: all {len(wanted)} requests continued, and ended {took_s:.1f} s later")


def names_the_rank_that_died(model_directory: str) -> None:
    with LLM(model_directory, **RAY, **SIZES[1], on_engine_death="fail") as several:
        times: list[float] = []
        [*_, victim] = rank_processes()
        timer = threading.Timer(
            1.0, lambda: (times.append(time.monotonic()), victim.send_signal(signal.SIGKILL))
        )
        timer.start()
        error = raises(EngineDeadError, lambda: several.generate(PROMPTS, LONG, use_tqdm=False))
        note(f"a dead rank ended its engine after {time.monotonic() - times[0]:.2f} s: {error}")
        assert f"is gone: pid: {victim.pid}" in str(error)
    wait_until_nothing_is_left()


def dies_with_its_engine(model_directory: str) -> None:
    with LLM(model_directory, **RAY, **SIZES[0], on_engine_death="fail"):
        assert len(rank_processes()) == 2
        engine_process().kill()
        wait_until_nothing_is_left()


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
