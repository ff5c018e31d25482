"""GGUF headers: files of the gguf package and of a test writer are read, and invalid ones are
refused with one sentence.
"""

from __future__ import annotations

import re
import time
import tracemalloc
from pathlib import Path
from struct import pack

import gguf
import numpy as np
import pytest
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.gguf import _TYPES, BLOCK_SIZES, MAX_ARRAY_ELEMENTS, read_gguf
from quire.tests.gguf_files import gguf_bytes, write_gguf
from quire.tests.mutations import mutated

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "big": 2**40,
    "eps": 0.5,
    "flag": True,
    "words": ["a", "", "é中"],
    "numbers": [1, -2, 3],
    "scores": [0.25, -1.0],
    "flags": [True, False],
    "none": [],
}
TENSORS = {
    "token_embd.weight": ((3, 64), "Q4_0", bytes(range(108))),
    "output_norm.weight": ((5,), "F32", bytes(20)),
    "blk.0.ffn_up.weight": ((2, 256), "Q6_K", bytes(420)),
}


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    computed_only = {"Q8_1", "Q8_K"}
    expected = {
        kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind])
        for kind in gguf.GGMLQuantizationType
        if kind.name not in computed_only
    }
    assert expected | {36: ("I2_S", 128, 32), 42: ("Q2_0", 64, 18)} == _TYPES  # it lacks these
    assert BLOCK_SIZES["Q4_K"] == (256, 144)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", METADATA, TENSORS)
    file = read_gguf(path)
    assert file.paths == [path] and file.metadata == METADATA
    content = path.read_bytes()
    assert file.tensors.keys() == TENSORS.keys()
    for name, (shape, type_name, expected) in TENSORS.items():
        tensor = file.tensors[name]
        assert tensor[:4] == (name, shape, type_name, path)
        assert tensor.offset % 32 == 0
        assert content[tensor.offset : tensor.offset + tensor.num_bytes] == expected


def test_a_file_of_the_gguf_package_is_read(tmp_path: Path) -> None:
    """Also its alignment, and the files that it splits a model into."""
    arrays = {
        f"blk.{i}.w": np.random.default_rng(i).standard_normal((4, 8 + i)).astype(np.float32)
        for i in range(5)
    }
    for split in (0, 2):
        path = tmp_path / f"model{split}.gguf"
        writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split)
        if not split:  # the package does not write it into the second part and those after it
            writer.add_custom_alignment(64)
        writer.add_uint64("big", 2**60)
        writer.add_array("words", ["x", "yy"])
        for name, array in arrays.items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths = sorted(tmp_path.glob(f"model{split}*.gguf"))
        assert len(paths) == (3 if split else 1)
        for given in paths:  # any part leads to all
            file = read_gguf(given)
            assert file.paths == paths
            assert (file.metadata["big"], file.metadata["words"]) == (2**60, ["x", "yy"])
            for name, array in arrays.items():
                place = file.tensors[name]
                stored = np.fromfile(place.path, np.float32, array.size, offset=place.offset)
                assert place.shape == array.shape and place.type == "F32"
                np.testing.assert_array_equal(stored.reshape(place.shape), array)


def _part(number: int, **changes: object) -> bytes:
    metadata = {"split.no": number, "split.count": 2, "split.tensors.count": 2} | changes
    return gguf_bytes(metadata, {f"t{number}": ((1,), "F32", bytes(4))})


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({1: _part(0)}, "the part m-00002-of-00002.gguf of the model is not there"),
        ({1: _part(0), 2: _part(1, **{"split.count": 3})}, "split.count is not 2"),
        ({1: _part(0), 2: _part(0)}, "tensor t0 is also in an earlier part"),
        ({1: _part(0, **{"split.tensors.count": 9}), 2: _part(1)}, "is 9, its parts have 2"),
        ({1: _part(0, **{"split.count": -1.5}), 2: _part(1)}, "is -1.5, which the file's name"),
    ],
)
def test_parts_that_do_not_belong_together(
    parts: dict[int, bytes], problem: str, tmp_path: Path
) -> None:
    for number, content in parts.items():
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match=problem):
        for number in parts:
            read_gguf(tmp_path / f"m-0000{number}-of-00002.gguf")


def _entry(kind: int, rest: bytes) -> bytes:
    return pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", kind) + rest


def _one_tensor(dims: list[int], kind: int = 0, offset: int = 0, copies: int = 1) -> bytes:
    info = pack(f"<Q1sI{len(dims)}QIQ", 1, b"t", len(dims), *dims, kind, offset)
    head = pack("<4sIQQ", b"GGUF", 3, copies, 0) + info * copies
    return head + bytes(-len(head) % 32 + 64)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "it has 0 bytes, a header needs 24"),
        (b"PK" + bytes(30), "begins with b'PK\\x00\\x00', not with b'GGUF'"),
        (pack("<4sIQQ", b"GGUF", 1, 0, 0), "version 1 is not supported"),
        (pack(">4sIQQ", b"GGUF", 3, 0, 0), "the file is big-endian"),
        (pack("<4sIQQ", b"GGUF", 3, 2**63, 0), "the number of tensors is 9,223"),
        (pack("<4sIQQ", b"GGUF", 3, 100, 0), "number of tensors is 100, more than the file can"),
        (pack("<4sIQQ", b"GGUF", 3, 0, 7), "number of metadata entries is 7, more than the file"),
        (_entry(8, pack("<Q", 2**64 - 1)), "it ends within the value of k"),
        (_entry(8, pack("<Q1s", 1, b"\xff")), "the value of k is not UTF-8"),
        (_entry(13, bytes(8)), "the type of k is 13, which is not known"),
        (_entry(9, pack("<IQ", 9, 0)), "the type of k is 9, which is not known"),
        (_entry(9, pack("<IQ", 0, 2**62)), "the length of the array k is 4,611"),
        (_entry(9, pack("<IQQ", 8, 1, 9)), "it ends within the array k"),
        (_entry(9, pack("<IQQ1s", 8, 1, 1, b"\xff")), "the array k has a string that is not UTF-8"),
        (_entry(9, pack("<IQ", 0, 2**22 + 1) + bytes(2**22 + 1)), "arrays have too many elements"),
        (_entry(4, b"\0"), "it ends within the value of k"),
        (gguf_bytes({"general.alignment": 24}), "general.alignment is 24, not a power of two"),
        (gguf_bytes({"general.alignment": "x"}), "general.alignment is 'x', not a power of two"),
        (gguf_bytes({"a": 1, "b": 2}).replace(b"b", b"a"), "the metadata key a is there twice"),
        (_one_tensor([1]).replace(b"t", b"\n"), "tensor 0 has the name '\\n'"),
        (_one_tensor([]), "tensor t has 0 dimensions"),
        (_one_tensor([1] * 5), "tensor t has 5 dimensions"),
        (_one_tensor([0, 4]), "tensor t has a dimension of 0"),
        (_one_tensor([4], kind=4), "tensor t is of type 4, which is not known"),
        (_one_tensor([33], kind=2), "tensor t has rows of 33, Q4_0 needs a multiple of 32"),
        (_one_tensor([4], offset=8), "tensor t has the offset 8, not aligned"),
        (_one_tensor([17]), "tensor t ends 4 bytes after the file"),
        (_one_tensor([2**63, 2**63]), "tensor t ends [0-9,]* bytes after the file"),
        (_one_tensor([4], offset=2**63), "tensor t ends [0-9,]* bytes after the file"),
        (_one_tensor([4], copies=2), "tensor t is there twice"),
    ],
)
def test_an_invalid_file_is_refused_in_one_sentence(
    content: bytes, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=problem if "[" in problem else re.escape(problem)):
        read_gguf(path)


@pytest.mark.parametrize(
    ("num_after", "problem"),
    [(0, "ends 128 bytes after the file"), (128, "overlaps the one before it")],
)
def test_other_blocks_with_the_number_of_q2_0_are_refused(
    tmp_path: Path, num_after: int, problem: str
) -> None:
    """A block of 128 numbers takes less than two of 64."""
    path, num_bytes = tmp_path / "a.gguf", 64 * 34
    infos = b"".join(
        pack("<Q1sIQQIQ", 1, name, 2, 128, 64, 42, offset)
        for name, offset in ((b"t", 0), (b"u", num_bytes))
    )
    head = pack("<4sIQQ", b"GGUF", 3, 2, 0) + infos
    path.write_bytes(head + bytes(-len(head) % 32 + 2 * num_bytes + num_after))
    with pytest.raises(ModelLoadError, match=f"tensor u {problem}; blocks of 128 numbers"):
        read_gguf(path)


def test_tensors_must_not_overlap(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    infos = pack("<Q1sIQIQ", 1, b"t", 1, 16, 0, 0) + pack("<Q1sIQIQ", 1, b"u", 1, 4, 0, 32)
    head = pack("<4sIQQ", b"GGUF", 3, 2, 0) + infos
    path.write_bytes(head + bytes(-len(head) % 32 + 64))
    with pytest.raises(ModelLoadError, match="tensor u overlaps the one before it"):
        read_gguf(path)


def _check_mutations(seeds: range, tmp_path: Path) -> None:
    content = gguf_bytes(METADATA, TENSORS)
    header_bytes = len(content) - sum(-(-len(t[2]) // 32) * 32 for t in TENSORS.values())
    path, refused = tmp_path / "m.gguf", 0
    tracemalloc.start()
    for seed in seeds:
        changed = mutated(content, header_bytes, seed)
        path.write_bytes(changed)
        started = time.thread_time()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            file = read_gguf(path)
        except ModelLoadError as error:
            refused += 1
            message = str(error)
            assert message.startswith(f"{tmp_path}") and "\n" not in message, seed
            assert len(message) < len(str(path)) + 400, seed
        else:
            for tensor in file.tensors.values():
                assert tensor.offset + tensor.num_bytes <= len(changed), seed
        # a header of 700 bytes costs objects of Python, never what its numbers claim
        assert tracemalloc.get_traced_memory()[1] - before < 2**20, seed
        assert time.thread_time() - started < 10, seed
    tracemalloc.stop()
    assert len(seeds) * 0.3 < refused < len(seeds)


def test_mutated_headers(tmp_path: Path) -> None:
    _check_mutations(range(400), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_5000_mutated_headers(tmp_path: Path) -> None:
    _check_mutations(range(1000, 6000), tmp_path)


def test_a_large_vocabulary_is_read_fast(tmp_path: Path) -> None:
    """Measured as work, not time: a quarter of a million strings cost at most a few times as much
    as decoding them.
    """
    words = [f"token{i}" for i in range(250_000)]
    path = write_gguf(tmp_path / "a.gguf", {"tokenizer.ggml.tokens": words})
    started = time.process_time()
    file = read_gguf(path)
    seconds = time.process_time() - started
    assert file.metadata["tokenizer.ggml.tokens"] == words
    assert len(words) < MAX_ARRAY_ELEMENTS
    assert seconds < 0.5


def test_long_arrays_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    """A header is read once; a long array that is unsound or gone is refused where it is used."""
    words = [f"token{i}" for i in range(5000)]
    path = write_gguf(tmp_path / "a.gguf", {"words": words, "flags": [True] * 3000, "b": 1})
    file = read_gguf(path)
    assert read_gguf(path).metadata is file.metadata
    tracemalloc.start()
    assert len(file.metadata) == 3 and file.metadata["b"] == 1
    assert tracemalloc.get_traced_memory()[1] < 10_000
    tracemalloc.stop()
    assert file.metadata["words"] == words and file.metadata["flags"] == [True] * 3000
    picked = file.metadata.strings_at("words", [0, 7, 4999, 5000])
    assert picked == {0: "token0", 7: "token7", 4999: "token4999"}
    assert file.metadata.strings_at("flags", [0]) == file.metadata.strings_at("no", [0]) == {}
    content = path.read_bytes()
    path.write_bytes(content.replace(b"token77", b"token\xff7"))
    with pytest.raises(ModelLoadError, match="the array words has a string that is not UTF-8"):
        read_gguf(path).metadata["words"]
    path.write_bytes(content[:2000])
    with pytest.raises(ModelLoadError, match="it ends within the array words"):
        file.metadata["words"]
    path.write_bytes(b"")
    with pytest.raises(ModelLoadError, match="not a readable GGUF file"):
        file.metadata["words"]
