"""Blocks that go from one store to another over a socket: which ones, in which order they leave,
and when an engine is not asked any more. The engines around them are in tests/test_kv_transfer.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from quire.executor.offload import peers
from quire.executor.offload.block_store import BlockStore, Layout, checksum_of
from quire.executor.offload.peers import Answer, Ask, BlockPuller, BlockSender
from quire.ipc.block_offload import Beginning, Transfers
from quire.ipc.kv_transfer import KVShare, KVTransferConfig
from quire.ipc.models.kv_layout import KVLayout

BLOCK_BYTES = 5000
LAYOUT = KVLayout(16, (0,))


def name_of(number: int) -> bytes:
    return bytes([number + 1]) * 32


def content_of(number: int) -> bytearray:
    return bytearray([number]) * BLOCK_BYTES


def make_store(num_places: int, numbers: Sequence[int] = ()) -> BlockStore:
    store = BlockStore(
        None, Layout(BLOCK_BYTES, num_places).file_bytes + 4096, BLOCK_BYTES, bytes(32)
    )
    assert store.num_places == num_places
    write(store, numbers)
    return store


def write(store: BlockStore, numbers: Sequence[int]) -> None:
    store.write([(name_of(one), [memoryview(content_of(one))]) for one in numbers])


def present(store: BlockStore) -> list[int]:
    kept = store.names()
    return [one for one in range(100) if name_of(one) in kept]


def prompt(num_blocks: int, cached: Sequence[int] = ()) -> Beginning:
    digests = [name_of(one) for one in range(num_blocks)]
    return Beginning(LAYOUT, digests, {name_of(one) for one in cached})


def sender(address: str, store: BlockStore) -> BlockSender:
    config = KVTransferConfig(kv_role="kv_producer", endpoint=address)
    return BlockSender(config, lambda: store, Transfers())


class Puller:
    """A consumer with its store and its counters."""

    def __init__(self, store: BlockStore, *addresses: str, timeout_s: float = 60.0):
        self.store, self.transfers = store, Transfers()
        config = KVTransferConfig(kv_role="kv_consumer", peers=list(addresses), timeout_s=timeout_s)
        self.puller = BlockPuller(config, lambda: store, self.transfers, 0, has_blocks=True)

    def pull(self, beginning: Beginning) -> None:
        if (done := self.puller.fetch(beginning)) is not None:
            done.result(timeout=60)

    @property
    def num_failed(self) -> int:
        return self.transfers.num_pulls_failed

    @property
    def is_paused(self) -> bool:
        return self.puller._peers[0].paused_until > 0

    def close(self) -> None:
        self.puller.close()


@contextmanager
def scripted(address: str, answer: Callable[[Ask], Sequence[bytes | bytearray] | None]):
    """A producer that says it has all blocks, and answers a question for blocks as told."""
    is_closed = threading.Event()

    def run(router: zmq.Socket) -> None:
        while not is_closed.is_set():
            if not router.poll(20):
                continue
            peer, payload = router.recv_multipart()
            ask = msgspec.msgpack.decode(payload, type=Ask)
            frames = answer(ask) if ask.reads else ()
            if frames is not None:
                checksums = [checksum_of(*pair) for pair in zip(ask.names, [[f] for f in frames])]
                found = Answer(ask.number, has=bytes([1] * len(ask.names)), checksums=checksums)
                router.send_multipart([peer, msgspec.msgpack.encode(found), *frames])

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(address)
        thread = threading.Thread(target=run, args=(router,))
        thread.start()
        try:
            yield
        finally:
            is_closed.set()
            thread.join()


@pytest.fixture
def address(tmp_path) -> str:
    return f"ipc://{tmp_path}/kv"


def test_an_address_stays_with_the_producer_that_has_it(address, monkeypatch, caplog):
    monkeypatch.setattr(peers, "BIND_S", 0.02)
    with ExitStack() as stack:
        first = stack.enter_context(closing(sender(address, make_store(4, [0]))))
        wait_until(Path(address.removeprefix("ipc://")).exists)
        second = stack.enter_context(closing(sender(address, make_store(4, [0, 1]))))
        wait_until(lambda: "cannot listen" in caplog.text)
        consumer = stack.enter_context(closing(Puller(make_store(4), address)))
        consumer.pull(prompt(2))
        assert present(consumer.store) == [0] and consumer.num_failed == 0
        first.close()
        wait_until(lambda: second._transfers.num_blocks_sent or pulls_more(consumer))
        assert present(consumer.store) == [0, 1]


def pulls_more(consumer: Puller) -> bool:
    consumer.puller._peers[0].paused_until = 0.0
    consumer.pull(prompt(2))
    return False


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_with_another_share_is_refused(address, caplog):
    rank = KVShare(tensor_parallel_size=2, pipeline_parallel_size=1, rank=1)
    config = KVTransferConfig(kv_role="kv_consumer", peers=[address])
    here = make_store(4)
    puller = BlockPuller(config, lambda: here, Transfers(), 0, rank, has_blocks=True)
    with closing(sender(address, make_store(4, [0]))), closing(puller):
        puller.fetch(prompt(2)).result(timeout=60)
        assert not present(here)
    sentence = (
        "it is rank 0 with tensor_parallel_size=1 and pipeline_parallel_size=1, and this is rank 1 "
        "with tensor_parallel_size=2 and pipeline_parallel_size=1"
    )
    assert f"{address} for 10 s, prompts are computed: {sentence}" in caplog.text
    assert f"is sent no KV blocks: {sentence}" in caplog.text


def test_the_beginning_of_a_prompt_stays_longest(address, monkeypatch):
    monkeypatch.setattr(peers, "BATCH_BYTES", 2 * BLOCK_BYTES)
    there, here = make_store(9, range(6)), make_store(8, [2])
    with closing(sender(address, there)), closing(Puller(here, address)) as consumer:
        consumer.pull(prompt(6, cached=[0]))
        assert present(here) == [1, 2, 3, 4, 5] and consumer.num_failed == 0
        assert consumer.transfers.num_blocks_pulled == 4
        for store, new in ((here, range(50, 56)), (there, range(50, 57))):
            write(store, new)
        assert present(here)[:2] == [1, 2] and len(present(here)) == 8
        assert present(there)[:2] == [0, 1] and len(present(there)) == 9


def test_of_a_prompt_that_is_longer_than_the_store_the_beginning_comes(address, caplog):
    with (
        closing(sender(address, make_store(20, range(20)))),
        closing(Puller(make_store(8, [50, 3]), address)) as consumer,
    ):
        consumer.pull(prompt(20, cached=[1]))
        assert present(consumer.store) == [0, 2, 3, 4, 5, 6, 7, 8]
        assert "room for 8 blocks" in caplog.text and consumer.num_failed == 0


def test_one_of_several_producers_is_enough(address, monkeypatch):
    monkeypatch.setattr(peers, "CONNECT_S", 0.5)
    damaged = f"{address}2"
    with (
        closing(sender(address, make_store(4, [0, 1]))),
        scripted(damaged, lambda ask: [b"short"] * len(ask.names)),
        closing(Puller(make_store(8), address, f"{address}-gone", damaged)) as consumer,
    ):
        wait_until(Path(address.removeprefix("ipc://")).exists)
        consumer.pull(prompt(4))  # the damaged one has most
        assert present(consumer.store) == [0, 1] and consumer.num_failed == 0
        consumer.pull(prompt(4))  # there are no more, and who has not answered may have had them
        assert consumer.num_failed == 0
    with closing(Puller(make_store(8), f"{address}-gone")) as consumer:
        consumer.pull(prompt(2))
        assert consumer.num_failed == 1


@pytest.mark.parametrize("sends", [True, False])
def test_a_producer_that_sends_slowly_is_asked_again(address, monkeypatch, sends):
    monkeypatch.setattr(peers, "BATCH_BYTES", 2 * BLOCK_BYTES)

    def answer(ask: Ask) -> list[bytearray] | None:
        is_first = ask.names[0] == name_of(0)
        return [content_of(0), content_of(1)] if sends and is_first else None

    with (
        scripted(address, answer),
        closing(Puller(make_store(8), address, timeout_s=0.5)) as consumer,
    ):
        consumer.pull(prompt(6))
        assert present(consumer.store) == ([0, 1] if sends else [])
        assert consumer.num_failed == 1 and consumer.is_paused != sends


def test_nothing_is_brought_for_a_prompt_that_was_given_up(address, monkeypatch):
    monkeypatch.setattr(peers, "BATCH_BYTES", BLOCK_BYTES)
    asked: list[Ask] = []
    pulls: list[Future[None]] = []

    def answer(ask: Ask) -> list[bytearray]:
        asked.append(ask)
        if len(asked) == 2:
            pulls[0].cancel()
        return [content_of(0)]

    with (
        scripted(address, answer),
        closing(Puller(make_store(20), address)) as consumer,
    ):
        first, second = consumer.puller.fetch(prompt(20)), consumer.puller.fetch(prompt(19))
        assert first is not None and second is not None
        second.cancel()
        pulls.append(first)
        consumer.pull(prompt(1))
        assert len(asked) < 8 and consumer.num_failed == 0


def test_what_is_not_trusted_does_not_come_back(address):
    with (
        closing(sender(address, make_store(8, range(4)))),
        closing(Puller(make_store(8), address)) as consumer,
    ):
        consumer.pull(prompt(4))
        consumer.puller.remove([name_of(2), name_of(3)])
        consumer.pull(prompt(4))
        assert present(consumer.store) == [0, 1]
        write(consumer.store, [2])  # it has computed this one
        assert present(consumer.store) == [0, 1, 2]
