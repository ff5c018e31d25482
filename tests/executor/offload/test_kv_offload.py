"""Moving blocks between caches and a store, and what a store's blocks depend on."""

import pytest
import torch
from quire.executor.offload import kv_offload
from quire.executor.offload.block_memory import HostMemory
from quire.executor.offload.block_store import BlockStore
from quire.executor.offload.kv_offload import KVOffload, identity_of
from quire.executor.offload.names import piece_name
from quire.tests.fakes import make_config


def make_caches(dtype: torch.dtype, num_blocks: int = 5) -> list[torch.Tensor]:
    pages = torch.randn(2, 2, num_blocks, 4, 3, 8).to(dtype)
    return [cache for page in pages for cache in page]


def test_blocks_move_between_caches_of_all_types():
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        caches = make_caches(dtype)
        block_bytes = sum(cache[0].nbytes for cache in caches)
        offload = KVOffload(
            BlockStore(None, 2**20, block_bytes, bytes(32)), HostMemory(lambda: caches)
        )
        before = [cache.clone() for cache in caches]
        a, b = b"a" * 32, b"b" * 32
        offload.store([(1, a), (3, b)])
        assert offload.num_stored == 2 and a in offload.kept_blocks() and b in offload.kept_blocks()
        for cache in caches:
            cache.zero_()
        assert not offload.load([(4, a), (2, b), (1, b"c" * 32)])
        for cache, old in zip(caches, before):
            assert torch.equal(cache[4], old[1]) and torch.equal(cache[2], old[3])
            assert not cache[[0, 1, 3]].any()
        assert offload.load([(4, a)])
        offload.close()
        offload.store([(1, a)])
        assert offload.num_stored == 2 and a not in offload.kept_blocks()


@pytest.mark.parametrize("place_bytes", [100, 5000, 768])
def test_a_state_is_kept_in_pieces_of_the_size_of_a_block(place_bytes: int) -> None:
    caches = make_caches(torch.bfloat16)
    block_bytes = sum(cache[0].nbytes for cache in caches)
    states = torch.randint(256, (4, place_bytes), dtype=torch.uint8)
    store = BlockStore(None, 2**18, block_bytes, bytes(32), tracks_changes=True)
    offload, before = KVOffload(store, HostMemory(lambda: caches, lambda: states)), states.clone()
    assert offload.blocks_per_state == -(-place_bytes // block_bytes)
    a, b, c = (bytes([i]) * 32 for i in range(1, 4))
    offload.store_states([(1, b), (3, c)])
    offload.store([(0, a)])
    assert offload.num_states_stored == 2 and offload.num_stored == 1
    offload.store_states([(3, c)])
    assert offload.num_states_stored == 2  # it is there
    assert offload.count_to_state([a, b, c]) == 3 and offload.count_to_state([c, b, a]) == 2
    assert b not in offload.kept_blocks() and offload.count_to_state([a]) == 0
    assert offload.take_changes() == ([a], [])  # the names of blocks alone
    assert offload.load_state(0, c) and torch.equal(states[0], before[3])
    assert torch.equal(states[1:], before[1:]) and not offload.load_state(0, a)
    offload.remove([c, a])
    assert offload.count_to_state([a, b, c]) == 2 and offload.take_changes() == ([], [a])
    offload.clear()
    assert offload.count_to_state([a, b, c]) == 0
    offload.close()
    offload.store_states([(0, a)])
    assert offload.num_states_stored == 2


def test_a_state_that_has_lost_a_piece_is_not_there() -> None:
    caches, states = make_caches(torch.float32), torch.ones(2, 9000, dtype=torch.uint8)
    block_bytes = sum(cache[0].nbytes for cache in caches)
    store = BlockStore(None, 2**18, block_bytes, bytes(32))
    offload, name = KVOffload(store, HostMemory(lambda: caches, lambda: states)), b"a" * 32
    offload.store_states([(0, name)])
    store.remove([piece_name(name, offload.blocks_per_state - 1)])
    assert offload.count_to_state([name]) == 0 and not offload.load_state(1, name)
    small = BlockStore(None, 2**15, block_bytes, bytes(32))
    offload.use_store(small)
    assert small.num_places < offload.blocks_per_state
    offload.store_states([(0, name)])
    assert offload.num_states_stored == 1 and not len(small)  # it is larger than the store


def test_a_model_without_attention_has_all_its_blocks() -> None:
    states = torch.arange(100, dtype=torch.uint8).view(2, 50)
    offload = KVOffload(BlockStore(None, 2**16, 50, bytes(32)), HostMemory(list, lambda: states))
    names = [bytes([i]) * 32 for i in range(3)]
    offload.store([(0, names[0])])
    offload.store_states([(1, names[1])])
    assert not offload.num_stored and all(name in offload.kept_blocks() for name in names)
    assert offload.num_states_stored == 1 and offload.count_to_state(names) == 2
    assert offload.load([(0, names[0])]) and offload.load_state(0, names[1])
    assert torch.equal(states[0], states[1])


def test_an_identity_depends_on_all_that_changes_a_block(tmp_path, monkeypatch):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    shapes = [[2, 64, "torch.bfloat16"]]
    found = set()

    def note(directory=tmp_path, isa="avx2", shapes=shapes, version="1", **settings) -> None:
        identity = identity_of(make_config(**settings), directory, isa, shapes, version)
        assert identity == identity_of(make_config(**settings), directory, isa, shapes, version)
        assert len(identity) == 32 and identity not in found
        found.add(identity)

    note()
    note(None)
    note(None, seed=1)
    note(isa="amx")
    note(version="2")
    note(shapes=shapes * 2)
    note(dtype="bfloat16")
    note(quantization="int8")
    note(kv_cache_dtype="int8")
    note(block_size=32)
    note(kernels={"rms_norm": "reference"})
    note(vocab_size=98)
    with monkeypatch.context() as changed:
        changed.setattr(kv_offload, "code_digest", lambda: "another kernel")
        note()
    weights.write_bytes(b"others")
    note()
    same = identity_of(make_config(max_num_seqs=3, num_threads=2), tmp_path, "avx2", shapes, "1")
    assert same in found


def test_every_file_that_computes_blocks_is_in_the_digest(tmp_path, monkeypatch):
    for folder in (*kv_offload.CODE, "frontend"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("x = 1")
    (tmp_path / "executor/offload").mkdir()
    monkeypatch.setattr(kv_offload, "__file__", str(tmp_path / "executor/offload/kv_offload.py"))
    found = []
    for folder in ("", "frontend", *kv_offload.CODE):
        if folder:
            (tmp_path / folder / "a.py").write_text("x = 2")
        found.append(kv_offload.code_digest.__wrapped__())
    assert found[0] == found[1] and len(set(found)) == 1 + len(kv_offload.CODE)
