"""Events of the KV cache: what a subscriber knows from them is what the block pool has."""

import random
from contextlib import closing, contextmanager

import pytest
from quire.core.engine_core import EngineCore
from quire.core.kv_cache.block_pool import BlockPool
from quire.core.kv_cache.events import KEY_BYTES, KVEvents
from quire.core.kv_cache.kv_cache_manager import KVCacheManager, WatchedBlockPool
from quire.ipc.block_offload import group_of
from quire.ipc.kv_events import (
    CPU,
    GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventsConfig,
    hash_for_routers,
)
from quire.ipc.models.kv_layout import KVLayout
from quire.tests.core.engine_loop import assert_nothing_left, step
from quire.tests.core.kv_cache.test_kv_cache_manager import admit, make_request
from quire.tests.core.test_random_workloads import (
    assert_as_expected,
    drive,
    make_tight_core,
    random_jobs,
)
from quire.tests.frontend.supervision.test_supervised_client import (
    Blocking,
    kill,
    some_requests,
)
from quire.tests.kv_subscriber import Subscriber


def make_manager(num_blocks: int, windows: tuple[int, ...] = (0,)) -> KVCacheManager:
    layout = KVLayout(16, windows, 16)
    return KVCacheManager(num_blocks, layout, events=KVEvents(layout))


def shorts(request, first: int, end: int) -> list[int]:
    return [hash_for_routers(digest) for digest in request.block_hashes[first:end]]


def test_blocks_are_stored_removed_and_cleared():
    manager = make_manager(6)
    take = manager.events.take
    assert take() == [AllBlocksCleared()]
    first = make_request("0", list(range(40)))
    admit(manager, first)
    assert take() == [BlockStored(shorts(first, 0, 2), None, list(range(32)), 16, None, GPU, None)]
    for token in range(40, 48):
        first.token_ids.append(token)
    manager.cache_blocks(first, 48)
    parent = shorts(first, 1, 2)[0]
    assert take() == [
        BlockStored(shorts(first, 2, 3), parent, [*range(32, 48)], 16, None, GPU, None)
    ]
    manager.free(first)
    second = make_request("1", list(range(16)) + [0] * 32, cache_salt=None)
    admit(manager, second)  # finds the first block, and takes two others
    assert manager.get_block_ids("1")[0] == 1
    assert take() == [
        BlockStored(shorts(second, 1, 3), shorts(second, 0, 1)[0], [0] * 32, 16, *REST)
    ]
    manager.free(second)
    third = make_request("2", [7] * 80, cache_salt="s")
    admit(manager, third)
    removed, stored = take()
    assert isinstance(removed, BlockRemoved) and removed.medium == GPU
    assert set(removed.block_hashes) == {*shorts(first, 0, 3), *shorts(second, 1, 3)}
    assert stored.extra_keys == [("s",), None, None, None, None]
    manager.discard(third)
    assert take() == [BlockRemoved(shorts(third, 0, 5), GPU)]
    assert manager.reset_prefix_cache() and take() == [AllBlocksCleared()] and take() == []


REST = (None, GPU, None)


def test_a_block_with_known_content_is_no_event():
    manager = make_manager(9)
    first, second = (make_request(name, [5] * 32) for name in "ab")
    admit(manager, first)
    manager.events.take()
    blocks = manager.no_blocks()
    manager.begin(second, 32, blocks, 0)
    manager.cache_blocks(second, 32)
    assert manager.events.take() == []
    manager.free(second)
    manager.begin(make_request("c", [1] * 96), 96, blocks, 0)
    assert manager.events.take() == []


def test_groups_of_layers_are_named():
    manager = make_manager(40, (0, 20))
    first = make_request("0", [3] * 33)
    admit(manager, first)
    _, full, sliding = manager.events.take()
    assert (full.group_idx, full.kv_cache_spec_kind) == (0, "full_attention")
    assert (sliding.group_idx, sliding.kv_cache_spec_kind) == (1, "sliding_window")
    assert full.kv_cache_spec_sliding_window is None and sliding.kv_cache_spec_sliding_window == 20
    assert full.block_hashes == sliding.block_hashes == shorts(first, 0, 2)
    manager.discard(first)
    removed = manager.events.take()
    assert {(event.group_idx, *event.block_hashes) for event in removed} == {
        (group, *shorts(first, 0, 2)) for group in (0, 1)
    }


def test_nothing_is_watched_without_events():
    assert type(KVCacheManager(5, KVLayout(16)).block_pool) is BlockPool
    assert type(make_manager(5).block_pool) is WatchedBlockPool


# ---------------------------------------------------------------- a subscriber and the pool


def cached_in(core: EngineCore) -> set[tuple[str, int | None, int]]:
    manager = core.scheduler.kv_cache_manager
    has_groups = len(manager.layout.windows) > 1
    offload = getattr(core.executor, "offload", None)

    def group(name: bytes) -> int | None:
        return group_of(name) if has_groups else None

    return {
        (GPU, int.from_bytes(name[32:]) if has_groups else None, hash_for_routers(name))
        for name in manager.block_pool._cached
        if len(name) <= KEY_BYTES
    } | {(CPU, group(name), hash_for_routers(name)) for name in (offload.kept if offload else ())}


@contextmanager
def watched_core(tmp_path, loss: float, seed: int, **arguments):
    endpoints = [f"ipc://{tmp_path}/{name}-{seed}" for name in ("live", "replay")]
    config = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=endpoints[0], replay_endpoint=endpoints[1]
    )
    core = make_tight_core(kv_events_config=config, **arguments)
    with closing(Subscriber(*endpoints, loss, seed)) as subscriber:
        yield core, subscriber
    core.shutdown()
    assert not core.kv_events._thread.is_alive()


def random_settings(rng: random.Random) -> dict:
    is_offloading = rng.random() < 0.3
    return {
        "max_num_batched_tokens": rng.choice([16, 64, 2048]),
        "windows": rng.choice([(0,), (0,), (40,), (0, 40), (0, 1, 17, 17, 100)]),
        "spare_blocks": rng.choice([0, 7, 23, 983]),
        "max_num_seqs": rng.choice([1, 3, 8, 64]),
        "preemption_mode": rng.choice(["auto", "recompute", "swap"]),
        "async_scheduling": rng.random() < 0.3,
        "kv_offloading_size": rng.choice([5, 1000]) / 1024 if is_offloading else None,
        "num_scheduler_steps": rng.choice([0, 0, 2]),
        "pipeline_parallel_size": rng.choice([1, 2, 3]),
    }


def check_workload(tmp_path, seed: int) -> Subscriber:
    rng = random.Random(seed)
    settings, loss = random_settings(rng), rng.choice([0.0, 0.1, 0.5, 0.95])
    with watched_core(tmp_path, loss, seed, **settings) as (core, subscriber):

        def check() -> None:
            subscriber.read_until(core.kv_events._next_number - 1)
            assert subscriber.known == cached_in(core), settings

        for _ in range(2):
            jobs = random_jobs(rng.randrange(2**32), rng.randint(1, 12))
            answers = drive(core, jobs)
            assert_as_expected(core, jobs, answers)
            check()
            subscriber.read()  # or not, before the next ones
        if rng.random() < 0.3:
            assert core.call_utility("reset_prefix_cache", [])
            check()
            assert not subscriber.known
        assert_nothing_left(core)
    return subscriber


def test_a_subscriber_that_loses_messages_knows_what_the_pool_has(tmp_path):
    subscribers = [check_workload(tmp_path, seed) for seed in range(6)]
    assert sum(one.num_lost for one in subscribers) > 8
    assert sum(one.num_replayed for one in subscribers) > 8
    num_checked = sum(one.num_checked for one in subscribers)
    assert num_checked > 140 and num_checked > 50 * sum(one.num_orphans for one in subscribers)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_workloads(tmp_path):
    for seed in range(1000, 2000):
        check_workload(tmp_path, seed)


def test_the_next_engine_continues_the_numbers(tmp_path):
    with watched_core(tmp_path, 0.0, 1, spare_blocks=20, windows=(0,)) as (core, subscriber):
        drive(core, random_jobs(1, 5), aborts=False)
        step(core)
        subscriber.read_until(core.kv_events._next_number - 1)
        assert subscriber.known and subscriber.num_cleared == 1
        core.kv_events.close()
        second = EngineCore(core.config, core.executor, epoch=1)
        second.publish_kv_events()
        subscriber.read_until(2**40)
        assert subscriber.last == 2**40
        assert subscriber.num_cleared == 2 and not subscriber.known
        second.shutdown()


def test_an_engine_process_that_is_killed_is_followed_by_its_successor(tmp_path):
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("live", "replay")]
    config = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=endpoints[0], replay_endpoint=endpoints[1]
    )
    with (
        closing(Blocking(kv_events_config=config)) as engine,
        closing(Subscriber(*endpoints)) as subscriber,
    ):
        engine.generate(some_requests(3))
        subscriber.catch_up()
        assert subscriber.known and subscriber.num_cleared == 1 and subscriber.last < 2**40
        kill(engine.client)
        engine.generate(some_requests(3))
        subscriber.read_until(2**40)
        assert subscriber.known and subscriber.num_cleared == 2
