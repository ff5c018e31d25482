"""Engines of a ReplicasClient: their parts of the machine, and their start."""

from __future__ import annotations

import os

import msgspec
import psutil
import pytest
from quire import EngineArgs
from quire.frontend.clients.connect import start_client
from quire.frontend.clients.own_loop import run_once
from quire.frontend.clients.replicas import start
from quire.frontend.clients.replicas.start import replica_configs, start_replicas
from quire.ipc.config import EngineConfig
from quire.ipc.errors import EngineStartError, InvalidParameterError
from quire.tests.fake_engine import COMMAND, is_gone, wait_until
from quire.tests.fakes import make_config


def config(number: int = 2, **settings) -> EngineConfig:
    made = make_config(data_parallel_size=number, startup_timeout_s=120.0, **settings)
    device = msgspec.structs.replace(made.device_config, num_threads=settings.get("num_threads"))
    return msgspec.structs.replace(made, device_config=device)


@pytest.fixture
def nodes(monkeypatch):
    """Two NUMA nodes of four cores each."""
    nodes = [[0, 1, 2, 3], [4, 5, 6, 7]]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(start, "numa_cores", lambda: nodes)
    monkeypatch.setattr(start, "available_cores", lambda: sum(map(len, nodes)))
    return nodes


@pytest.mark.parametrize(
    ("number", "cores", "num_threads"),
    [
        (2, [[0, 1, 2, 3], [4, 5, 6, 7]], 4),
        (4, [[0, 1], [2, 3], [4, 5], [6, 7]], 2),
        (3, [[0, 1], [2, 3], [4, 5]], 2),
        (16, [[]] * 16, 1),  # they share the cores
    ],
)
def test_cores_are_divided(nodes, number, cores, num_threads) -> None:
    devices = [one.device_config for one in replica_configs(config(number))]
    assert [device.cores for device in devices] == cores
    assert [device.num_threads for device in devices] == [num_threads] * number
    assert [device.data_parallel_rank for device in devices] == list(range(number))


def test_ranks_of_a_cluster_keep_to_no_cores_of_this_machine(nodes) -> None:
    made = config(2)
    device = msgspec.structs.replace(made.device_config, distributed_executor_backend="ray")
    for one in replica_configs(msgspec.structs.replace(made, device_config=device)):
        assert one.device_config.cores == [] and one.device_config.num_threads is None


def test_cores_and_threads_as_configured(nodes, monkeypatch) -> None:
    own = replica_configs(config(data_parallel_cores=["0-1,7", "3"]))
    assert [one.device_config.cores for one in own] == [[0, 1, 7], [3]]
    assert [one.device_config.num_threads for one in own] == [1, 1]
    own = replica_configs(config(num_threads=3))
    assert [one.device_config.num_threads for one in own] == [3, 3]
    own = replica_configs(config(num_threads=5))  # more than there are cores
    assert [one.device_config.cores for one in own] == [[], []]
    own = replica_configs(config(tensor_parallel_size=2))  # num_threads are those of a rank
    assert [(len(one.device_config.cores), one.device_config.num_threads) for one in own] == (
        [(4, 2)] * 2
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert replica_configs(config())[0].device_config.num_threads is None


@pytest.mark.parametrize(
    ("cores", "words"),
    [
        (["0-3"], "an entry for each of data_parallel_size=2"),
        (["0", "one"], "a list of cores such as 0-3,8"),
        (["0", "8"], "cores that this process may use .0 to 7., got '8'"),
        (["0", ""], "cores that this process may use"),
    ],
)
def test_wrong_cores_are_refused(nodes, cores, words) -> None:
    with pytest.raises(InvalidParameterError, match=f"data_parallel_cores: must .*{words}"):
        replica_configs(config(data_parallel_cores=cores))


def test_engines_of_this_process_are_no_replicas() -> None:
    with pytest.raises(InvalidParameterError, match="data_parallel_size: is for engines in other"):
        run_once(start_client(config(), "inproc"))


def test_replicas_of_a_daemon_that_does_not_listen() -> None:
    with pytest.raises(EngineStartError, match="no engine listens at ipc:///tmp/quire-nowhere"):
        run_once(start_client(config(), "ipc:///tmp/quire-nowhere.sock"))


def test_replicas_have_no_standby() -> None:
    with pytest.raises(InvalidParameterError, match="standby: is for one engine"):
        run_once(start_client(config(standby=True)))


def test_engines_have_numbers_and_cores() -> None:
    core = min(os.sched_getaffinity(0))
    client = run_once(start_replicas(config(data_parallel_cores=[str(core)] * 2), command=COMMAND))
    try:
        pids = [replica.client.engine_pid for replica in client._replicas]
        assert [os.sched_getaffinity(pid) for pid in pids] == [{core}] * 2
        assert [replica.client.ready.engine_index for replica in client._replicas] == [0, 1]
        assert client.ready.config.device_config.data_parallel_size == 2
    finally:
        client.shutdown()
    assert all(map(is_gone, pids))


def test_a_start_that_fails_ends_the_other_engines() -> None:
    def children() -> set[psutil.Process]:
        return set(psutil.Process().children())

    before = children()
    with pytest.raises(EngineStartError, match="famous last words"):
        run_once(start_replicas(config(hf_overrides={"at_load": "exit"}), command=COMMAND))
    wait_until(lambda: children() <= before)


def test_arguments() -> None:
    args = EngineArgs(data_parallel_size=3, data_parallel_cores=["0", "1", "0-1"])
    assert args.tree().device_config.data_parallel_size == 3
    with pytest.raises(InvalidParameterError, match="data_parallel_size"):
        EngineArgs(data_parallel_size=0)
