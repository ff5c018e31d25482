"""Moving blocks between caches and a store, and what a store's blocks depend on."""

import torch
from quire.executor.offload.block_store import BlockStore
from quire.executor.offload.kv_offload import KVOffload, identity_of
from quire.tests.fakes import make_config


def make_caches(dtype: torch.dtype, num_blocks: int = 5) -> list[torch.Tensor]:
    pages = torch.randn(2, 2, num_blocks, 4, 3, 8).to(dtype)
    return [cache for page in pages for cache in page]


def test_blocks_move_between_caches_of_all_types():
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        caches = make_caches(dtype)
        block_bytes = sum(cache[0].nbytes for cache in caches)
        offload = KVOffload(BlockStore(None, 2**20, block_bytes, bytes(32)), lambda: caches)
        before = [cache.clone() for cache in caches]
        a, b = b"a" * 32, b"b" * 32
        assert offload.store([(1, a), (3, b)]) == 2 and offload.count_present([b, a]) == 2
        for cache in caches:
            cache.zero_()
        assert offload.load([(4, a), (2, b), (1, b"c" * 32)]) == 2
        for cache, old in zip(caches, before):
            assert torch.equal(cache[4], old[1]) and torch.equal(cache[2], old[3])
            assert not cache[[0, 1, 3]].any()
        offload.close()
        assert offload.store([(1, a)]) == 0 and offload.count_present([a]) == 0


def test_an_identity_depends_on_all_that_changes_a_block(tmp_path):
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
    weights.write_bytes(b"others")
    note()
    same = identity_of(make_config(max_num_seqs=3, num_threads=2), tmp_path, "avx2", shapes, "1")
    assert same in found
