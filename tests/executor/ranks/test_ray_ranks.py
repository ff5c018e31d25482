"""What the launcher asks of Ray, with a stand-in. `pytest -m clients` uses a cluster of two nodes
(tests/clients/client_ray_ranks.py).
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from quire.executor.ranks.messages import NetworkEnds
from quire.executor.ranks.multiproc_executor import MultiprocExecutor
from quire.executor.ranks.ray_ranks import RankActor, RayLauncher, cpus_per_rank, ray_ranks
from quire.ipc.errors import EngineStartError, InvalidParameterError
from quire.tests.executor.driver import make_config, start_with
from quire.tests.executor.ranks.test_steps_in_flight import (
    check_equal,
    drafting,
    jobs_of,
    run_jobs,
    without_drafts_and_ranks,
)
from quire.tests.fake_engine import wait_until

ENDS = [NetworkEnds(rank, 2, 1, "tcp://a:1", "tcp://a:2", b"key", 1.0) for rank in range(2)]


class ActorError(Exception):
    pass


class FakeRay:
    """The parts of Ray that are used. `outcomes` of the ranks that have ended, by number."""

    def __init__(self, has_room: bool = True) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.outcomes: dict[int, Exception | None] = {}
        self.exceptions = SimpleNamespace(RayActorError=ActorError)
        self.util = SimpleNamespace(
            get_node_ip_address=lambda: "10.0.0.1",
            placement_group=self._placement_group,
            remove_placement_group=lambda group: self.calls.append(("remove", group)),
            scheduling_strategies=SimpleNamespace(
                PlacementGroupSchedulingStrategy=lambda group, index: (group, index)
            ),
        )
        self._group = SimpleNamespace(
            id=SimpleNamespace(hex=lambda: "0123456789"), wait=lambda s: has_room
        )

    def _placement_group(self, bundles: list, strategy: str) -> Any:
        self.calls.append(("group", bundles, strategy))
        return self._group

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        self.calls.append(("init", options["address"]))

    def nodes(self) -> list[dict]:
        alive, dead = {"Alive": True}, {"Alive": False}
        cpus = [{"CPU": 8.0}, {"CPU": 4.0}, {"memory": 1.0}]
        return [*(alive | {"Resources": one} for one in cpus), dead | {"Resources": {"CPU": 99.0}}]

    def remote(self, cls: type) -> Any:
        assert cls is RankActor
        return SimpleNamespace(options=self._options)

    def _options(self, **options: Any) -> Any:
        def start(*arguments: Any) -> int:
            self.calls.append(("run", options, arguments))
            self.run(*arguments)
            return options["scheduling_strategy"][1]  # stands for a reference to the result

        run = SimpleNamespace(remote=start)
        return SimpleNamespace(remote=lambda: SimpleNamespace(run=run))

    def run(self, *arguments: Any) -> None:
        """Begin RankActor.run."""

    def wait(self, runs: list[int], num_returns: int = 1, timeout: float = 0.0) -> tuple:
        ended = [run for run in runs if run in self.outcomes]
        return ended, [run for run in runs if run not in self.outcomes]

    def get(self, run: int) -> None:
        if (error := self.outcomes[run]) is not None:
            raise error

    def kill(self, actor: Any) -> None:
        self.calls.append(("kill",))

    def shutdown(self) -> None:
        self.calls.append(("shutdown",))


ACTOR = """
import sys
from types import SimpleNamespace
import msgspec
from quire.executor.ranks.ray_ranks import RankActor
sys.modules["ray"] = SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"))
RankActor().run(*msgspec.msgpack.decode(sys.stdin.buffer.read()))
"""


class RayOfProcesses(FakeRay):
    """Actors are processes of this machine."""

    def __init__(self) -> None:
        super().__init__()
        self.util.get_node_ip_address = lambda: "127.0.0.1"
        self.processes: list[subprocess.Popen] = []

    def run(self, *arguments: Any) -> None:
        process = subprocess.Popen([sys.executable, "-P", "-c", ACTOR], stdin=subprocess.PIPE)
        self.processes.append(process)
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(msgspec.msgpack.encode(arguments))

    def wait(self, runs: list[int], num_returns: int = 1, timeout: float = 0.0) -> tuple:
        for run in runs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.processes[run].wait(timeout)
                self.outcomes[run] = ActorError(f"its exit code is {code}") if code else None
        return super().wait(runs)

    def kill(self, actor: Any) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def launch(tiny, monkeypatch):
    for name in ("OMP_NUM_THREADS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)

    def make(ray: FakeRay, **arguments: Any) -> RayLauncher:
        monkeypatch.setitem(sys.modules, "ray", ray)
        arguments = {"tensor_parallel_size": 2, "num_threads": None} | arguments
        return RayLauncher(make_config(tiny("qwen2"), None, **arguments))

    return make


def test_ranks_are_actors_of_one_placement_group(launch) -> None:
    ray = FakeRay()
    launcher = launch(ray)
    assert launcher.host == "10.0.0.1"
    launcher.start(ENDS)
    launcher.end(1.0)
    connect, group, first, second, *ended = ray.calls
    assert connect == ("init", "auto") and group == ("group", [{"CPU": 4}] * 2, "PACK")
    for rank, (_, options, arguments) in enumerate((first, second)):
        assert options["num_cpus"] == 4 and options["max_restarts"] == 0
        assert options["scheduling_strategy"][1] == rank
        assert msgspec.json.decode(arguments[0], type=NetworkEnds) == ENDS[rank]
        assert arguments[1] == 4
    assert [call[0] for call in ended] == ["kill", "kill", "remove", "shutdown"]


@pytest.mark.parametrize("by", ["num_threads", "OMP_NUM_THREADS"])
def test_cpus_that_were_asked_for(launch, monkeypatch, by: str) -> None:
    ray = FakeRay()
    if by == "OMP_NUM_THREADS":
        monkeypatch.setenv(by, "3")
    launch(ray, num_threads=3 if by == "num_threads" else None).start(ENDS)
    assert ("group", [{"CPU": 3}] * 2, "PACK") in ray.calls


def test_engines_divide_the_cluster(launch) -> None:
    ray = FakeRay()
    launch(ray, data_parallel_size=3).start(ENDS)
    assert ("group", [{"CPU": 2}] * 2, "PACK") in ray.calls


def test_causes(launch) -> None:
    ray = FakeRay()
    launcher = launch(ray)
    assert launcher.cause_of(0, 0.0) is None
    launcher.start(ENDS)
    assert launcher.cause_of(0, 0.0) is None
    text = "The actor died.\nclass_name: RankActor\n\tpid: 7\n\tip: 10.0.0.2\nIts node was lost.\n"
    ray.outcomes = {0: ActorError(text), 1: ValueError("line\n" * 20 + "no such file")}
    assert launcher.cause_of(0, 0.0) == "pid: 7, ip: 10.0.0.2, Its node was lost."
    assert (launcher.cause_of(1, 0.0) or "").splitlines() == ["line"] * 11 + ["no such file"]
    ray.outcomes = {1: None}
    assert launcher.cause_of(1, 0.0) == "it has left"


@pytest.mark.slow
def test_drafts_of_actors_change_no_token(monkeypatch) -> None:
    """Tensor ranks and stages that draft, each in the process of an actor."""
    ray = RayOfProcesses()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = drafting("mtp", 2, 2, max_num_batched_tokens=64, max_num_seqs=6)
    plain, jobs = without_drafts_and_ranks(config), jobs_of(4, 4)
    jobs[0].request.prompt_token_ids[:] = [5, 9, 12] * 10
    wanted, _ = run_jobs(start_with(plain), plain, jobs)
    executor, causes = MultiprocExecutor(config, ray_ranks), list[str]()
    executor.watch(causes.append)
    try:
        answers, core = run_jobs(executor, config, jobs)
        check_equal(wanted, answers)
        assert core.observer.get_metrics()["num_draft_tokens"] > 0 and not causes
        ray.processes[1].kill()
        wait_until(lambda: causes)
        assert causes == ["rank 1 of 4 is gone: its exit code is -9"]
    finally:
        executor.shutdown()
    assert all(process.returncode is not None for process in ray.processes)


def test_a_cluster_without_room(launch) -> None:
    launcher = launch(FakeRay(has_room=False), startup_timeout_s=0.01)
    with pytest.raises(EngineStartError, match=r"no room for 2 ranks with 4 CPUs.*\[8, 4, 0\]"):
        launcher.start(ENDS)
    launcher.end(0.0)


@pytest.mark.parametrize(
    ("address", "problem"),
    [("ray://10.0.0.1:10001", "is not an address of a cluster's node"), (None, "refused")],
)
def test_there_is_no_cluster(launch, monkeypatch, address: str | None, problem: str) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))  # nothing listens there
        address = address or f"127.0.0.1:{one.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(InvalidParameterError, match=f"needs a Ray cluster.*{problem}"):
            launch(FakeRay())


def test_cpus_per_rank() -> None:
    assert cpus_per_rank([64, 64], 2) == 64
    assert cpus_per_rank([64, 32], 2) == 32 and cpus_per_rank([64], 2) == 32
    assert cpus_per_rank([64, 64, 8], 3) == 32 and cpus_per_rank([4, 4, 4, 4], 4) == 4
    assert cpus_per_rank([1], 4) == cpus_per_rank([], 2) == 1
