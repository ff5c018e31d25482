"""Blocks and states that several ranks keep outside their caches: the same bits as in a large
cache, over restarts, and where a rank fails to keep or to load its share.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from quire import InvalidParameterError, LLMEngine
from quire.core.engine_core import EngineCore
from quire.executor.offload import block_store
from quire.executor.offload.names import piece_name
from quire.executor.ranks.messages import Kept, MoveBlocks, OffloadOpened
from quire.executor.ranks.offload import RanksOffload
from quire.frontend.clients.inproc_client import InprocClient
from quire.ipc.block_offload import Transfers
from quire.ipc.config import CacheConfig
from quire.ipc.kv_events import KVEventsConfig
from quire.ipc.kv_transfer import KVTransferConfig
from quire.kernels.cpu.native.library import library
from quire.tests.client_forms import closing as closing_engine
from quire.tests.client_forms import make_engine
from quire.tests.core.engine_loop import assert_nothing_left
from quire.tests.core.test_random_workloads import drive
from quire.tests.executor.rank_threads import RankThreads
from quire.tests.executor.ranks.test_steps_in_flight import check_equal, jobs_of, run_jobs
from quire.tests.test_kv_offload import LARGE, SETTINGS, conversations, damage, run

SIZES = [(2, 1), (1, 2), (2, 2)]
HYBRID, WINDOWED = "granitemoehybrid", "gemma3_text"


def settings_of(kind: str, **settings: Any) -> dict[str, Any]:
    """Room for few blocks, and for few checkpoints."""
    common = SETTINGS | dict(dtype="float32", num_threads=1, state_checkpoint_interval=16)
    if kind == HYBRID:
        common["state_cache_memory_bytes"] = 2**15
    if kind in (WINDOWED, "lfm3"):
        common["num_gpu_blocks_override"] = 60
    return common | settings


@contextmanager
def threads(model: Path, size: int, num_stages: int, **settings: Any) -> Iterator[LLMEngine]:
    """An engine whose ranks are threads of this process."""
    executor = RankThreads.of(model, size, num_stages, **settings)
    config = executor.config
    engine = LLMEngine(config, InprocClient(config, executor=executor))
    core_of(engine).scheduler.limits.least_samples = 1
    with closing_engine(engine):
        yield engine
        assert engine.call_utility("check_integrity")


def core_of(engine: LLMEngine) -> Any:
    return engine.client._engine.core


def counts(engine: LLMEngine, *names: str) -> list[int]:
    metrics = engine.get_metrics()
    return [metrics[name] for name in names]


@pytest.mark.sampled(step=4)
@pytest.mark.skipif(library is None, reason="torch's kernels do not promise the same bits")
@pytest.mark.parametrize(
    ("kind", "size", "num_stages"),
    [
        ("qwen2", 2, 1),
        ("qwen2", 1, 2),
        (HYBRID, 2, 1),
        (HYBRID, 1, 3),  # states, blocks, states
        (WINDOWED, 2, 1),
        pytest.param("qwen2", 2, 2, marks=pytest.mark.slow),
        pytest.param(HYBRID, 1, 2, marks=pytest.mark.slow),
        pytest.param(WINDOWED, 1, 2, marks=pytest.mark.slow),
        pytest.param("lfm3", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_the_same_bits_as_a_large_cache(tiny, kind, size, num_stages, tmp_path):
    layers = {"num_hidden_layers": 4} if kind == WINDOWED else {}
    model, prompts = tiny(kind, vocab_size=1000, **layers), conversations(11, 5)
    large = LARGE | dict(state_cache_memory_bytes=2**24)
    with threads(model, size, num_stages, **settings_of(kind, **large)) as engine:
        expected = run(engine, prompts)
    offload = dict(kv_offloading_size=0.02, kv_offloading_path=str(tmp_path))
    for is_second in (False, True):
        with threads(model, size, num_stages, **settings_of(kind, **offload)) as engine:
            assert run(engine, prompts) == expected
            metrics = engine.get_metrics()
            assert is_second or metrics["num_blocks_offloaded"] > 10
            assert metrics["num_blocks_reloaded"] > 5
            assert not metrics["num_blocks_corrupt"]
            assert kind != HYBRID or metrics["num_states_reloaded"] > 1
            if is_second:  # all that was computed before the restart
                assert metrics["num_prompt_tokens"] <= len(prompts) * 3 * 16
    files = sorted(file.name.partition("-")[2] for file in tmp_path.glob("*.kv"))
    count = size * num_stages
    assert files == [f"{rank}of{count}.kv" for rank in range(1, count + 1)]
    assert sum(file.stat().st_size for file in tmp_path.glob("*.kv")) <= 0.02 * 2**30


# ------------------------------------------------------------ ranks that fail


def share_of(engine: LLMEngine, rank: int) -> Any:
    return core_of(engine).executor.ranks[rank].offload


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kv"), key=lambda file: file.name[-8:])


def test_a_rank_whose_disk_is_full_keeps_nothing_and_costs_no_token(tiny, tmp_path, monkeypatch):
    model, prompts = tiny("qwen2", vocab_size=1000), conversations(12, 5)
    offload = dict(kv_offloading_size=0.02, kv_offloading_path=str(tmp_path))
    with threads(model, 1, 2, **settings_of("qwen2", **LARGE)) as engine:
        expected = run(engine, prompts)
    pwritev = os.pwritev
    with threads(model, 1, 2, **settings_of("qwen2", **offload)) as engine:
        assert run(engine, prompts) == expected
        stored, loaded = counts(engine, "num_blocks_offloaded", "num_blocks_reloaded")
        assert stored > 10 and loaded > 5
        full = share_of(engine, 1)._store._fd

        def write(fd: int, *args: Any) -> int:
            if fd == full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return pwritev(fd, *args)

        monkeypatch.setattr(block_store.os, "pwritev", write)
        new = conversations(18, 4, turns=1)
        run(engine, new)  # some of these are evicted
        assert not len(share_of(engine, 1)._store)
        assert counts(engine, "num_blocks_offloaded") == [stored]
        [loaded] = counts(engine, "num_blocks_reloaded")
        assert run(engine, prompts) == expected
        assert counts(engine, "num_blocks_offloaded", "num_blocks_reloaded") == [stored, loaded]
        assert len(share_of(engine, 0)._store) > 20  # what it has is of no use alone
        monkeypatch.undo()


@pytest.mark.parametrize("call", ["preadv", "fstat", "flock"])
def test_a_rank_whose_file_fails_is_an_answer(tiny, call, tmp_path):
    model, prompts = tiny("qwen2", vocab_size=1000), conversations(13, 4, turns=2)
    place = dict(kv_offloading_size=0.02, kv_offloading_path=str(tmp_path))
    with threads(model, 1, 2, **settings_of("qwen2", **place)) as engine:
        expected = run(engine, prompts)
    module = block_store.fcntl if call == "flock" else block_store.os
    function = getattr(module, call)
    with threads(model, 1, 2, **settings_of("qwen2", **place)) as engine:
        broken = share_of(engine, 0)._store._fd

        def fail(fd: int, *args: Any) -> Any:
            if fd == broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return function(fd, *args)

        with mock.patch.object(module, call, fail):
            assert run(engine, prompts) == expected
        assert counts(engine, "num_blocks_reloaded") == [0]


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("kind", ["cut", "zeros", "bits", "gone"])
def test_a_damaged_file_of_one_rank_costs_time_and_no_token(tiny, kind, tmp_path):
    model, prompts = tiny(HYBRID, vocab_size=1000), conversations(14, 5)
    settings = settings_of(HYBRID, kv_offloading_size=0.02, kv_offloading_path=str(tmp_path))
    with threads(model, 1, 2, **settings) as engine:
        expected = run(engine, prompts)
    if kind == "gone":
        files_of(tmp_path)[1].unlink()
    else:
        damage(files_of(tmp_path)[1], kind)
    with threads(model, 1, 2, **settings) as engine:
        assert run(engine, prompts[:1]) == expected[:1]
        loaded, corrupt = counts(engine, "num_blocks_reloaded", "num_blocks_corrupt")
        assert not loaded or kind == "bits"  # the first blocks may be good
        for _ in range(2):
            assert run(engine, prompts) == expected
        assert (counts(engine, "num_blocks_corrupt")[0] > 0) == (kind in ("zeros", "bits"))
        assert counts(engine, "num_blocks_reloaded")[0] > loaded  # what was stored since


def test_a_rank_that_gets_no_file_refuses_the_start(tiny, tmp_path):
    model, fallocate = tiny("qwen2", vocab_size=1000), os.posix_fallocate
    settings = settings_of("qwen2", kv_offloading_size=0.02, kv_offloading_path=str(tmp_path))

    def allocate(fd: int, *args: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("-2of2.kv"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fallocate(fd, *args)

    with mock.patch.object(block_store.os, "posix_fallocate", allocate):
        with pytest.raises(InvalidParameterError, match=r"kv_offloading_path: no file .*-2of2\.kv"):
            with threads(model, 2, 1, **settings):
                pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size", "num_stages", "num_seeds"),
    [
        ("qwen2", 1, 2, 2),
        (HYBRID, 1, 3, 2),
        pytest.param(WINDOWED, 2, 1, 20, marks=pytest.mark.slow),
        pytest.param(HYBRID, 2, 2, 20, marks=pytest.mark.slow),
    ],
)
def test_random_workloads_with_ranks_that_lose_blocks(tiny, kind, size, num_stages, num_seeds):
    """Requests that come and go; a rank does not store, or does not find, what the others do."""
    layers = {"num_hidden_layers": 4} if kind == WINDOWED else {}
    model = tiny(kind, **layers)
    options = settings_of(kind, max_model_len=256)
    options["num_gpu_blocks_override"] = 70 if kind == WINDOWED else 33
    large = RankThreads.of(model, size, num_stages, **options | LARGE)
    small = RankThreads.of(model, size, num_stages, **options | dict(kv_offloading_size=0.02))
    core = EngineCore(small.config, small, check_every_step=True)
    core.scheduler.limits.least_samples = 1
    with ExitStack() as stack:
        stack.callback(large.shutdown)
        stack.callback(core.shutdown)
        for i, rank in enumerate(small.ranks):  # each fails by itself: their order is not fixed
            for method in ("store", "store_states", "load", "load_state"):
                make_unreliable(stack, rank.offload, method, random.Random(f"b{i} {method}"))
        for seed in range(num_seeds):
            jobs = jobs_of(seed, 20)
            wanted, _ = run_jobs(large, large.config, jobs)
            for _ in range(2):
                check_equal(wanted, drive(core, jobs))
                assert_nothing_left(core)
        metrics = core.observer.get_metrics()
        assert metrics["num_blocks_reloaded"] > 10 and metrics["num_blocks_offloaded"] > 50


def make_unreliable(stack: ExitStack, offload: Any, method: str, rng: random.Random) -> None:
    """One of ten calls does nothing; where it should load something, it says so."""
    function = getattr(offload, method)
    call = mock.Mock(side_effect=lambda *args: False if rng.random() < 0.1 else function(*args))
    stack.enter_context(mock.patch.object(offload, method, call))


# ------------------------------------------------------------ engines and weights


def test_engines_share_the_files_of_their_ranks(tiny, tmp_path):
    model, prompts = tiny("qwen2", vocab_size=1000), conversations(15, 5)
    settings = settings_of("qwen2", kv_offloading_size=0.02, kv_offloading_path=str(tmp_path))
    with (
        threads(model, 1, 2, **settings) as one,
        threads(model, 1, 2, **settings | LARGE) as other,
    ):
        run(other, [[5] * 9])
        expected = run(one, prompts)
        run(other, [[5] * 9])  # with these steps it learns what the first one has stored
        assert run(other, prompts) == expected
        assert counts(other, "num_blocks_offloaded") == [0]
        assert counts(other, "num_blocks_reloaded")[0] > 20
        one.reset_prefix_cache()
        run(other, [[5] * 9])
        assert not core_of(other).executor.offload.kept_blocks()
    with threads(model, 2, 1, **settings) as engine:  # other ranks have other files
        run(engine, prompts[:5])
        assert counts(engine, "num_blocks_reloaded") == [0]
    assert len(files_of(tmp_path)) == 4


@pytest.mark.slow
def test_sleep_and_new_weights(tiny, tmp_path):
    model, other = (tiny("qwen2", vocab_size=1000, seed=seed) for seed in (0, 1))
    prompts = conversations(16, 4, turns=1)
    settings = settings_of("qwen2", kv_offloading_size=0.02)
    with threads(other, 1, 2, **settings_of("qwen2", **LARGE)) as engine:
        of_other = run(engine, prompts)
    with threads(model, 1, 2, **settings) as engine:
        expected = run(engine, prompts)
        engine.sleep(level=1)
        engine.wake_up()
        assert run(engine, prompts) == expected
        loaded = counts(engine, "num_blocks_reloaded")
        assert loaded[0] > 1
        engine.load_weights(str(other))
        assert run(engine, prompts, at_once=1) == of_other
        assert counts(engine, "num_blocks_reloaded") == loaded


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"pipeline_parallel_size": 2},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_are_processes(tiny, sizes, tmp_path):
    model, prompts = tiny("qwen2", vocab_size=1000), conversations(17, 4, turns=2)
    settings = settings_of("qwen2", model=str(model), **sizes)
    offload = dict(kv_offloading_size=0.02, kv_offloading_path=str(tmp_path))
    found = []
    for _ in range(2):
        with closing_engine(make_engine(**settings | offload)) as engine:
            found.append(run(engine, prompts))
            loaded = counts(engine, "num_blocks_reloaded")[0]
            assert engine.call_utility("check_integrity")
    assert found[0] == found[1] and loaded > 10
    with pytest.raises(InvalidParameterError, match="kv_offloading_path: no file"):
        make_engine(**settings | offload | dict(kv_offloading_path="/proc/x"))


# ------------------------------------------------------------ the book


class Calls:
    """Implements RankCalls: the replies are those that the test gives."""

    def __init__(self) -> None:
        self.replies: list[list[Kept]] = []
        self.commands: list[MoveBlocks] = []
        self.waiting: list[Any] = []

    def ask(self, command: MoveBlocks) -> list[Kept]:
        self.commands.append(command)
        return self.replies.pop(0)

    def submit(self, command: MoveBlocks, on_reply: Any) -> None:
        self.commands.append(command)
        self.waiting.append(on_reply)


A, B, C = (bytes([i]) * 32 for i in range(1, 4))
EVENTS = CacheConfig(kv_events_config=KVEventsConfig(enable_kv_cache_events=True))
OPENED = OffloadOpened(num_blocks=9, block_bytes=100, has_blocks=True)


def test_a_block_is_kept_while_all_ranks_have_it():
    calls = Calls()
    first = OffloadOpened(num_blocks=7, block_bytes=50, has_blocks=True, kept=Kept([A, B]))
    second = OffloadOpened(num_blocks=9, block_bytes=100, has_blocks=True, kept=Kept([B, C]))
    book = RanksOffload(calls, [first, second], EVENTS)
    assert (book.num_blocks, book.block_bytes, book.blocks_per_state) == (7, 150, 0)
    assert [name in book.kept_blocks() for name in (A, B, C)] == [False, True, False]
    assert book.take_changes() == ([B], []) and book.take_changes() == ([], [])
    book.store([(3, A), (4, B)])
    assert A not in book.kept_blocks() and not book.num_stored
    calls.waiting.pop()([Kept(), Kept([A], [B], 2)])
    assert [name in book.kept_blocks() for name in (A, B, C)] == [True, False, False]
    assert (book.num_stored, book.num_corrupt) == (1, 2)
    assert book.take_changes() == ([A], [B])
    for replies, is_loaded in (
        ([Kept(num_corrupt=1), Kept(num_corrupt=2)], True),
        ([Kept([], [A], 2, is_loaded=False), Kept(num_corrupt=2)], False),
    ):
        calls.replies.append(replies)
        assert book.load([(5, A)]) == is_loaded
    assert A not in book.kept_blocks() and book.num_corrupt == 4
    book.note([None, Kept([], [A])])
    calls.replies += [[Kept(), Kept()]] * 2
    book.remove([B])
    book.clear()
    methods = ["store", "load", "load", "remove", "clear"]
    assert [command.method for command in calls.commands] == methods


def test_a_producer_waits_for_its_ranks_at_the_end_of_a_request():
    calls, config = Calls(), KVTransferConfig(kv_role="kv_producer")
    for transfer in (None, config):
        book = RanksOffload(calls, [OPENED], CacheConfig(kv_transfer_config=transfer))
        calls.replies = [[Kept([A], transfers=Transfers(num_blocks_sent=3))]]
        book.touch([A])  # the next asks for it as soon as its client hears of the end
        assert (A in book.kept_blocks()) == (transfer is not None) == (not calls.replies)
    assert book.transfers.num_blocks_sent == 3


def test_a_state_is_kept_while_all_ranks_have_all_its_pieces():
    pieces = {name: [piece_name(name, index) for index in range(3)] for name in (A, B, C)}
    states = OffloadOpened(num_blocks=9, block_bytes=100, blocks_per_state=1)  # no attention
    both = OffloadOpened(num_blocks=9, block_bytes=10, blocks_per_state=3, has_blocks=True)
    calls = Calls()
    book = RanksOffload(calls, [states, both, OPENED, OffloadOpened()], EVENTS)
    assert book.blocks_per_state == 3 and book.count_to_state([A, B, C]) == 0
    one_rank = [pieces[name][0] for name in (A, B, C)]
    book.note([Kept(one_rank), Kept([*pieces[A], *pieces[B][1:]]), None, None])
    assert book.count_to_state([A, B, C]) == 1 and book.count_to_state([C, B]) == 0
    book.store_states([(7, B)])
    calls.waiting.pop()([Kept(), Kept(pieces[B][:1]), Kept(), Kept()])
    assert book.count_to_state([A, B, C]) == 2 and book.num_states_stored == 1
    assert book.take_changes() == ([], []) and A not in book.kept_blocks()
    calls.replies.append([Kept(), Kept(), Kept(), Kept(is_loaded=False)])
    assert not book.load_state(7, B)


def test_blocks_of_no_rank_are_always_there():
    states = OffloadOpened(num_blocks=9, block_bytes=100, blocks_per_state=1)
    calls = Calls()
    book = RanksOffload(calls, [states, states], CacheConfig())
    assert A in book.kept_blocks() and book.load([(1, A)])
    book.store([(1, A)])
    assert not calls.commands
