"""Ranks as actors of a Ray cluster (`distributed_executor_backend="ray"`): two nodes on this
machine. Tokens of one engine and of two replicas, and what happens when ranks, nodes or the engine
die, and when a node is not replaced.
"""

import contextlib
import logging
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
def cluster_of_two(num_cpus: int = 1) -> Iterator[tuple[Cluster, Any]]:
    """Yield the cluster, and its second node. num_cpus: ranks for which a node has room."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": num_cpus, "include_dashboard": False}
    )
    second = cluster.add_node(num_cpus=num_cpus)
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        os.environ["RAY_ADDRESS"] = cluster.address  # of the engines
        yield cluster, second
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        ray.shutdown()
        cluster.shutdown()


def rank_processes() -> list[psutil.Process]:
    return children(lambda command: command[0].startswith("ray::RankActor"))


def engine_processes() -> list[psutil.Process]:
    return children(lambda command: "quire.core.engine_proc" in command)


def children(is_wanted: Callable[[list[str]], bool]) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ends meanwhile
            if (command := process.cmdline()) and is_wanted(command):
                found.append(process)
    return found


def tokens(outputs: list[Any]) -> list[Any]:
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


def placement_groups() -> list[str]:
    return [
        f"placement group {group['placement_group_id']}"
        for group in ray.util.placement_group_table().values()
        if group["state"] != "REMOVED"
    ]


def left_over() -> list[str]:
    """What a shut down or killed engine has not taken with it."""
    groups = placement_groups()
    actors = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    return [*groups, *actors, *(f"process {process.pid}" for process in rank_processes())]


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = 300.0) -> None:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < timeout_s, what
        time.sleep(0.2)
    note(f"{what} after {time.monotonic() - began:.1f} s")


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


def check_lost_nodes(address: str, model_directory: str) -> None:
    """Two replicas of two ranks, one on each node, and then a node that is not replaced."""
    few: dict[str, Any] = {"startup_timeout_s": 60.0, "engine_restarts": 2}
    messages: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("quire.replicas").addHandler(handler)
    with LLM(model_directory, **ARGUMENTS) as one:
        long = tokens(one.generate(PROMPTS, LONG, use_tqdm=False))
    with cluster_of_two(2) as (cluster, second):
        with LLM(model_directory, **RAY, **SIZES[0], **few, data_parallel_size=2) as two:
            assert len(rank_processes()) == 4 and len(engine_processes()) == 2
            assert len(placement_groups()) == 2
            victim = rank_processes()[-1]
            continues(two, long, "a rank of a replica killed", victim.kill)
            wait_until(lambda: len({*rank_processes()} - {victim}) == 4, "the replica is back")
            continues(
                two,
                long,
                "the node of a replica killed",
                lambda: cluster.remove_node(second, allow_graceful=False),
            )

            def is_given_up() -> bool:
                """Blocking code replaces engines in calls, which the other replica answers."""
                two.generate(PROMPTS[:1], SHORT, use_tqdm=False)
                return bool(messages)

            wait_until(is_given_up, "the replica is given up")
            assert "has had no room for 2 ranks with 1 CPUs each" in messages[0], messages
            assert len(engine_processes()) == 1
            assert tokens(two.generate(PROMPTS, LONG, use_tqdm=False)) == long
        wait_until_nothing_is_left()
        third = cluster.add_node(num_cpus=2)
        ends_without_room(
            {**RAY, **few, "pipeline_parallel_size": 4},
            model_directory,
            lambda: cluster.remove_node(third, allow_graceful=False),
        )
        wait_until_nothing_is_left()


def ends_without_room(
    arguments: dict[str, Any], model_directory: str, kill_node: Callable[[], Any]
) -> None:
    """The engine waits for room for a bounded time; then requests and later calls get the cause."""
    with LLM(model_directory, **arguments) as several, ThreadPoolExecutor(1) as pool:
        outputs = pool.submit(several.generate, PROMPTS, LONG, use_tqdm=False)
        time.sleep(1.0)
        assert not outputs.done()
        began = time.monotonic()
        kill_node()
        error = raises(EngineDeadError, outputs.result)
        took_s = time.monotonic() - began
        note(f"a node that is not replaced ended the engine after {took_s:.1f} s: {error}")
        assert "has had no room for 4 ranks with 1 CPUs each" in str(error), error
        # two starts, each of half the time to start, and what Ray takes to begin them
        assert 60.0 < took_s < 150.0, took_s
        again = raises(EngineDeadError, lambda: several.generate(PROMPTS, SHORT, use_tqdm=False))
        assert "no room" in str(again), again


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
        [engine] = engine_processes()
        engine.kill()
        wait_until_nothing_is_left()


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
