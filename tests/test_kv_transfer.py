"""One engine computes prompts and another continues them with the blocks that it receives, end to
end: the same bits as without, and what a peer that is gone, slow or another one costs.
"""

from __future__ import annotations

import json
import os
import random
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import zmq
from quire import LLM, InvalidParameterError, LLMEngine, LoRARequest, SamplingParams
from quire.core import request
from quire.core.request import hash_block
from quire.executor import executor
from quire.executor.offload import peers
from quire.ipc.kv_transfer import KVShare, KVTransferConfig
from quire.kernels.cpu.native.library import library
from quire.tests.client_forms import closing, daemon, make_engine
from quire.tests.executor.engine_threads import SharingRanks
from quire.tests.executor.rank_threads import RankThreads
from quire.tests.executor.ranks.test_offload import HYBRID, WINDOWED, settings_of, threads
from quire.tests.fake_engine import wait_until
from quire.tests.lora_adapters import adapted_weights, random_pairs, write_peft
from quire.tests.test_kv_offload import SETTINGS, run
from quire.tests.tiny_models import save_tiny_model

SHARING = SETTINGS | {"num_gpu_blocks_override": 200, "kv_offloading_size": 0.02}
PROMPTS = [[300 + (7 * i + j * j) % 700 for j in range(150 - i)] for i in range(2)]
native = pytest.mark.skipif(library is None, reason="torch's kernels do not promise the same bits")


def sending(folder: Path, **fields) -> dict:
    return {"kv_role": "kv_producer", "endpoint": f"ipc://{folder}/kv", **fields}


def receiving(folder: Path, **fields) -> dict:
    return {"kv_role": "kv_consumer", "peers": [f"ipc://{folder}/kv"], **fields}


def engine_with(transfer: dict | None, **settings) -> LLMEngine:
    return make_engine(**SHARING | settings, kv_transfer_config=transfer)


def metrics(engine: LLMEngine, *names: str) -> list[int]:
    found = engine.get_metrics()
    return [found[name] for name in names]


@native
@pytest.mark.parametrize("kind", ["llama", "qwen3_next", "gemma3_text"])
def test_the_same_bits_as_a_prompt_that_is_computed(kind, tmp_path):
    model = save_tiny_model(tmp_path / kind, kind, dtype="bfloat16", vocab_size=1000)
    settings = dict(model=str(model), state_checkpoint_interval=64)
    key_file = tmp_path / "key"
    key_file.write_text("a secret of some length")
    key_file.chmod(0o600)
    key = dict(key_file=str(key_file)) if kind == "llama" else {}  # then with CURVE
    with closing(engine_with(None, **settings)) as alone:
        expected = run(alone, PROMPTS)
    with ExitStack() as stack:
        sender, receiver = (
            stack.enter_context(closing(engine_with(one, **settings)))
            for one in (sending(tmp_path, **key), receiving(tmp_path, **key))
        )
        assert run(sender, PROMPTS) == expected
        assert run(receiver, PROMPTS) == expected
        assert receiver.call_utility("check_integrity")
        pulled, failed, hits = metrics(
            receiver, "num_blocks_pulled", "num_pulls_failed", "external_prefix_cache_hits"
        )
        assert pulled > 30 / (1 + (kind != "llama")) and failed == 0 and hits >= 256
        assert metrics(sender, "num_blocks_sent") == [pulled]
        run(receiver, PROMPTS)  # it has them now
        assert metrics(receiver, "num_blocks_pulled") == [pulled]


@native
@pytest.mark.parametrize(
    ("kind", "size", "num_stages"),
    [
        ("qwen2", 2, 1),
        (HYBRID, 1, 3),  # states, blocks, states
        pytest.param("qwen2", 2, 2, marks=pytest.mark.slow),
        pytest.param(WINDOWED, 1, 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_pull_their_shares(kind, size, num_stages, tmp_path):
    layers = {"num_hidden_layers": 4} if kind == WINDOWED else {}
    model = save_tiny_model(tmp_path / kind, kind, vocab_size=1000, **layers)
    settings = settings_of(kind, num_gpu_blocks_override=200) | {"kv_offloading_size": 0.02}
    with ExitStack() as stack:
        sender, receiver = (
            stack.enter_context(
                threads(model, size, num_stages, **settings, kv_transfer_config=one)
            )
            for one in (sending(tmp_path), receiving(tmp_path))
        )
        expected = run(sender, PROMPTS)
        assert run(receiver, PROMPTS) == expected
        hits, failed = metrics(receiver, "external_prefix_cache_hits", "num_pulls_failed")
        assert hits >= 2 * 128 and failed == 0
        pulled = metrics(receiver, "num_blocks_pulled", "num_bytes_pulled")
        run(sender, [[5] * 9])  # a step brings its counters up to date
        assert metrics(sender, "num_blocks_sent", "num_bytes_sent") == pulled


@native
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_engines_that_share_experts_send_and_pull(num_ranks, tmp_path, monkeypatch):
    """Each engine of a group has its own blocks, with the bits of one that has all experts. The
    ranks are threads, and a second engine of the producer's group and of the consumer's takes part.
    """
    model = str(save_tiny_model(tmp_path / "model", "qwen3_moe", vocab_size=1000))
    own = dict(model=model, dtype="float32", num_threads=1, tensor_parallel_size=num_ranks)
    make = SharingRanks if num_ranks == 1 else RankThreads
    monkeypatch.setattr(executor, "make_executor", make)
    with closing(engine_with(None, **own)) as alone:
        expected = run(alone, PROMPTS)
    monkeypatch.setattr(executor, "make_executor", SharingRanks)
    with ExitStack() as stack:
        sender, receiver = (
            stack.enter_context(closing(engine_with(one, **own)))
            for one in (sending(tmp_path), receiving(tmp_path, timeout_s=60.0))
        )
        assert run(sender, PROMPTS) == expected
        assert run(receiver, PROMPTS) == expected
        pulled, failed = metrics(receiver, "num_blocks_pulled", "num_pulls_failed")
        assert pulled == 36 * num_ranks and failed == 0
        assert receiver.call_utility("check_integrity")


@native
@pytest.mark.slow
def test_engines_of_a_group_pull_from_those_of_another(tmp_path):
    """As processes: two engines that share experts, and two others."""
    model = str(save_tiny_model(tmp_path / "model", "qwen3_moe", vocab_size=1000))
    group = dict(model=model, data_parallel_size=2, enable_expert_parallel=True)
    both = [f"ipc://{tmp_path}/kv", f"ipc://{tmp_path}/kv.1"]
    with closing(engine_with(None, model=model)) as alone:
        expected = run(alone, PROMPTS)
    with ExitStack() as stack:
        senders, receivers = (
            stack.enter_context(closing(engine_with(one, engine="process", **group)))
            for one in (sending(tmp_path), receiving(tmp_path, peers=both, timeout_s=60.0))
        )
        assert run(senders, PROMPTS) == expected
        assert run(receivers, PROMPTS) == expected
        pulled, failed = metrics(receivers, "num_blocks_pulled", "num_pulls_failed")
        assert pulled == 36 and failed == 0


@native
@pytest.mark.slow
def test_ranks_of_several_engines_pull_over_tcp(tmp_path):
    """Each rank of each engine listens at a port of its own, with the secret of all."""
    model = str(save_tiny_model(tmp_path / "model", "qwen2", vocab_size=1000))
    key_file = tmp_path / "key"
    key_file.write_text("a secret of some length")
    key_file.chmod(0o600)
    first = free_ports(4)
    endpoints = [f"tcp://127.0.0.1:{first}", f"tcp://127.0.0.1:{first + 2}"]
    ranks = dict(model=model, tensor_parallel_size=2, dtype="float32", num_threads=1)
    key: dict[str, Any] = dict(key_file=str(key_file), timeout_s=60.0)
    with ExitStack() as stack:
        producer = sending(tmp_path, **key | {"endpoint": endpoints[0]})
        consumer = receiving(tmp_path, **key | {"peers": endpoints})
        senders = stack.enter_context(
            closing(engine_with(producer, engine="process", data_parallel_size=2, **ranks))
        )
        receiver = stack.enter_context(closing(engine_with(consumer, engine="process", **ranks)))
        expected = run(senders, PROMPTS)
        assert run(receiver, PROMPTS) == expected
        run(receiver, [[5] * 9])  # a step brings its counters up to date
        pulled, failed = metrics(receiver, "num_blocks_pulled", "num_pulls_failed")
        assert pulled == 2 * 36 and failed == 0


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody uses."""
    while True:
        with ExitStack() as stack:
            probe = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            first = probe.getsockname()[1]
            try:
                for port in range(first + 1, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except (OSError, OverflowError):
                continue
            return first


def test_a_peer_that_is_gone_or_another_one_costs_a_bounded_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "CONNECT_S", 0.05)
    with closing(engine_with(None)) as alone:
        expected = run(alone, PROMPTS)
    with closing(engine_with(receiving(tmp_path))) as receiver:  # nothing listens
        assert run(receiver, PROMPTS) == expected
        assert metrics(receiver, "num_blocks_pulled", "num_pulls_failed") == [0, 2]
    monkeypatch.setattr(peers, "CONNECT_S", 1.0)
    with (
        closing(engine_with(sending(tmp_path), block_size=16)) as sender,
        closing(engine_with(receiving(tmp_path))) as receiver,
    ):
        run(sender, PROMPTS)
        assert run(receiver, PROMPTS) == expected
        assert metrics(receiver, "num_blocks_pulled", "num_pulls_failed") == [0, 2]


@pytest.mark.slow
@native
@pytest.mark.parametrize("num_kills", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_a_producer_that_is_killed_while_it_sends_is_used_again(num_kills, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "CONNECT_S", 0.05)
    monkeypatch.setattr(peers, "PAUSE_S", 0.05)
    monkeypatch.setattr(peers, "BATCH_BYTES", 1)  # one block at once
    rng, ask, victims = random.Random(num_kills), peers.Peer.ask, []

    def ask_or_kill(peer: peers.Peer, *args: Any, reads: bool) -> int:
        if reads and victims and rng.random() < 0.1:
            os.kill(victims.pop(), SIGKILL)
        return ask(peer, *args, reads=reads)

    monkeypatch.setattr(peers.Peer, "ask", ask_or_kill)
    with closing(engine_with(None)) as alone:
        expected = run(alone, PROMPTS)
    with ExitStack() as stack:
        sender, receiver = (
            stack.enter_context(closing(engine_with(one, engine=form, engine_restarts=100)))
            for one, form in (
                (sending(tmp_path), "process"),
                (receiving(tmp_path, timeout_s=60.0), "inproc"),
            )
        )

        def pulls_all() -> bool:
            assert receiver.reset_prefix_cache()
            before = metrics(receiver, "num_blocks_pulled", "num_pulls_failed")
            assert run(receiver, PROMPTS) == expected
            now = metrics(receiver, "num_blocks_pulled", "num_pulls_failed")
            return now == [before[0] + 18 + 18, before[1]]

        for _ in range(num_kills):
            assert run(sender, PROMPTS) == expected  # one that was started again has nothing
            wait_until(pulls_all)
            victims.append(sender.client.engine_pid)
            wait_until(lambda: not pulls_all())
            assert not victims and receiver.call_utility("check_integrity")
        run(sender, PROMPTS)
        wait_until(pulls_all)


class FaultyPeer:
    """Says that it has everything, and answers a question for blocks with `blocks`, never, or it
    leaves then.
    """

    def __init__(self, folder: Path, blocks: bytes | None, *, leaves: bool):
        self._leaves = leaves
        self._context, self._blocks = zmq.Context(), blocks
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(f"ipc://{folder}/kv")
        self.num_reads = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            sender, payload = self._router.recv_multipart()
            if payload == b"end":
                return
            ask = peers.msgspec.msgpack.decode(payload, type=peers.Ask)
            answer = peers.Answer(ask.number, has=bytes([1] * len(ask.names)))
            blocks: list[bytes] = []
            if ask.reads:
                self.num_reads += 1
                if self._leaves:
                    self._router.close(0)
                    return
                if self._blocks is None:
                    continue
                blocks = [self._blocks] * len(ask.names)
                answer = peers.Answer(ask.number, checksums=[0] * len(blocks))
            self._router.send_multipart([sender, peers.msgspec.msgpack.encode(answer), *blocks])

    def close(self, folder: Path) -> None:
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(f"ipc://{folder}/kv")
            if not self._leaves:
                dealer.send(b"end")
            self._thread.join()
        self._router.close(0)
        self._context.term()


@pytest.mark.parametrize("fault", ["hangs", "leaves", "short", "damaged"])
def test_nothing_of_a_faulty_peer_is_used(fault, tmp_path):
    with closing(engine_with(None)) as alone:
        expected, block_bytes = run(alone, PROMPTS[:1]), _block_bytes(alone)
    blocks = {"hangs": None, "leaves": None, "short": b"x", "damaged": bytes(block_bytes)}[fault]
    peer = FaultyPeer(tmp_path, blocks, leaves=fault == "leaves")
    try:
        config = receiving(tmp_path, timeout_s=0.2 if fault == "hangs" else 60.0)
        with closing(engine_with(config)) as receiver:
            assert run(receiver, PROMPTS[:1]) == expected
            assert peer.num_reads
            assert metrics(receiver, "num_blocks_pulled", "num_pulls_failed") == [0, 1]
    finally:
        peer.close(tmp_path)


def _block_bytes(engine: LLMEngine) -> int:
    return engine.client._engine.core.executor.offload.block_bytes


@pytest.mark.slow
@native
def test_ranks_that_are_processes_pull_and_give_up(tmp_path):
    model = str(save_tiny_model(tmp_path / "model", "qwen2", vocab_size=1000))
    settings = settings_of("qwen2", num_gpu_blocks_override=200, kv_offloading_size=0.02)
    one, two = sending(tmp_path), receiving(tmp_path, timeout_s=60.0)
    with ExitStack() as stack:
        engine = make_engine(
            **settings, model=model, pipeline_parallel_size=2, kv_transfer_config=two
        )
        receiver = stack.enter_context(closing(engine))
        with threads(Path(model), 1, 2, **settings, kv_transfer_config=one) as sender:
            expected = run(sender, PROMPTS)
            assert run(receiver, PROMPTS) == expected
        assert metrics(receiver, "num_pulls_failed") == [0]
        assert metrics(receiver, "external_prefix_cache_hits")[0] >= 2 * 128
        hanging = FaultyPeer(tmp_path, None, leaves=False)
        stack.callback(hanging.close, tmp_path)
        for number in range(1, 3):  # the second one is asked for since the first was given up
            receiver.add_request("r", {"prompt_token_ids": [number] * 99}, SamplingParams())
            wait_until(lambda number=number: hanging.num_reads == number)
            receiver.abort_request(["r"])
            while receiver.has_unfinished_requests():
                receiver.step()
        assert run(receiver, PROMPTS) == expected


def test_the_blocks_of_a_prompt_are_hashed_once(tmp_path, monkeypatch):
    hashed = []
    monkeypatch.setattr(
        request, "hash_block", lambda *args: hashed.append(args) or hash_block(*args)
    )
    with closing(engine_with(receiving(tmp_path))) as receiver:
        params = SamplingParams(n=2, max_tokens=1)
        receiver.add_request("r", {"prompt_token_ids": PROMPTS[0]}, params)
        while receiver.has_unfinished_requests():
            receiver.step()
    assert len(hashed) == 150 // 8


def test_requests_with_adapters_pull_nothing(tmp_path):
    """Hashes of adapters' blocks have a meaning in one engine. The same prompt without an adapter
    gets its blocks, also when one with an adapter was computed before.
    """
    model, adapter = save_tiny_model(tmp_path / "model", "llama", vocab_size=1000), tmp_path / "a"
    write_peft(adapter, random_pairs(adapted_weights(model)))
    settings = dict(model=str(model), enable_lora=True)
    lora = LoRARequest("a", 1, str(adapter))
    with ExitStack() as stack:
        sender, receiver = (
            stack.enter_context(closing(engine_with(one, **settings)))
            for one in (sending(tmp_path), receiving(tmp_path))
        )
        expected = run(sender, PROMPTS)
        stored = metrics(sender, "num_blocks_offloaded")
        adapted = run(sender, PROMPTS, lora_request=lora)
        assert expected != adapted and metrics(sender, "num_blocks_offloaded") == stored
        assert run(receiver, PROMPTS, lora_request=lora) == adapted
        assert metrics(receiver, "num_blocks_pulled", "num_pulls_failed") == [0, 0]
        assert run(receiver, PROMPTS) == expected
        assert metrics(receiver, "num_blocks_pulled", "num_pulls_failed") == [36, 0]


def test_requests_that_pool_do_not_wait(tmp_path):
    """A peer that never answers costs them nothing."""
    settings = dict(runner="pooling", kv_transfer_config=receiving(tmp_path, timeout_s=60.0))
    prompts = [{"prompt_token_ids": one} for one in PROMPTS]
    peer = FaultyPeer(tmp_path, None, leaves=False)
    try:
        vectors = []
        for own in (settings, {"runner": "pooling"}):
            with LLM(engine="inproc", **SHARING | own) as llm:
                vectors.append([one.outputs.embedding for one in llm.embed(prompts)])
                assert llm.get_metrics()["num_pulls_failed"] == 0
        assert vectors[0] == vectors[1] and not peer.num_reads
    finally:
        peer.close(tmp_path)


def test_addresses_of_engines_and_ranks():
    config = KVTransferConfig(
        kv_role="kv_both", endpoint="tcp://a:5", peers=["tcp://b:9", "ipc:///b", "tcp://a:9"]
    )
    own = config.of_rank(1, KVShare(2, 2, 3))
    assert own.endpoint == "tcp://a:12" and own.peers == ["tcp://b:12", "ipc:///b-rank3"]
    of_file = KVTransferConfig(kv_role="kv_producer", endpoint="ipc:///a")
    assert of_file.of_rank(2, KVShare()).endpoint == "ipc:///a.2"
    assert of_file.of_rank(2, KVShare(2, 1, 1)).endpoint == "ipc:///a.2-rank1"


@native
@pytest.mark.parametrize("form", ["process", pytest.param("daemon", marks=pytest.mark.slow)])
def test_a_consumer_pulls_from_each_of_several_engines(form, tmp_path):
    settings = SHARING | {"data_parallel_size": 2}
    with ExitStack() as stack:
        if form == "daemon":
            config = json.dumps(sending(tmp_path))
            form = stack.enter_context(daemon(tmp_path, **settings, kv_transfer_config=config))
        else:
            settings["kv_transfer_config"] = sending(tmp_path)
        senders = stack.enter_context(closing(make_engine(form, **settings)))
        expected = run(senders, PROMPTS)
        both = [f"ipc://{tmp_path}/kv", f"ipc://{tmp_path}/kv.1"]
        receiver = stack.enter_context(closing(engine_with(receiving(tmp_path, peers=both))))
        assert run(receiver, PROMPTS) == expected
        hits, failed = metrics(receiver, "external_prefix_cache_hits", "num_pulls_failed")
        assert hits >= 2 * 128 and failed == 0
        puller = receiver.client._engine.core.executor.offload._puller
        assert all(peer.heard_at for peer in puller._peers)
        assert metrics(senders, "num_blocks_sent") == metrics(receiver, "num_blocks_pulled")


@pytest.mark.parametrize(
    ("transfer", "settings", "message"),
    [
        ({"kv_role": "kv_consumer"}, {}, "need peers"),
        (sending(Path("/x"), endpoint="tcp://*:14579"), {}, "needs key_file"),
        (sending(Path("/x"), endpoint="udp://x:1"), {}, "must be tcp://"),
        (sending(Path("/x")), {"kv_offloading_size": 0}, "must be above 0"),
        (sending(Path("/x")), {"distributed_executor_backend": "ray"}, "=ray"),
        (sending(Path("/x"), endpoint="tcp://x:65535"), {"data_parallel_size": 2}, "1 to 65534"),
        (sending(Path("/x"), endpoint=f"ipc://{__file__}"), {}, "is no socket"),
        (receiving(Path("/" + "x" * 200)), {}, "cannot connect to ipc://"),
    ],
)
def test_settings_that_cannot_be_used(transfer, settings, message):
    with pytest.raises(InvalidParameterError, match=message):
        engine_with(transfer, **settings)
