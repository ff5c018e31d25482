"""Safetensors headers: the files of a checkpoint, invalid headers, and unexpected tensors."""

from __future__ import annotations

import json
import os
import random
import re
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.checkpoint import (
    check_checkpoint,
    find_weight_files,
    missing_weight_files,
    read_header,
)
from quire.tests.mutations import mutated
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

SHAPES = {"a": [4, 3], "b": [5], "c": [1]}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {"c": torch.zeros(1), "b": torch.zeros(5).half(), "a": torch.zeros(4, 3)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_a_valid_file(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    header = read_header(path)
    with safe_open(path, framework="pt") as file:
        assert list(header) == list(file.keys())
    assert {name: (t.dtype, t.shape) for name, t in header.items()} == {
        "a": ("F32", [4, 3]),
        "b": ("F16", [5]),
        "c": ("F32", [1]),
    }
    assert set(check_checkpoint(checkpoint, SHAPES, {})) == set(SHAPES)


def with_header(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(start: int, end: int, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    shape = [(end - start) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


UNSOUND: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it has 0 bytes, a header needs 8"),
    "short": (b"1234567", "it has 7 bytes"),
    "garbage": (b"\x07" * 1000, "its header has 506,381,209,866,536,711 bytes"),
    "long": (b"\xff" * 8 + b"{}", "its header has 18,446,744,073,709,551,615 bytes"),
    "ends in header": (with_header({"a": entry(0, 4)}, b"1234")[:-20], "it ends within its header"),
    "truncated": (with_header({"a": entry(0, 8)}, b"1234"), "truncated: 4 bytes are missing"),
    "only a header": (with_header({"a": entry(0, 8)}), "truncated: 8 bytes are missing"),
    "more": (with_header({"a": entry(0, 4)}, b"12345678"), "4 bytes belong to no tensor"),
    "hole": (
        with_header({"a": entry(0, 4), "b": entry(8, 12)}, b"1" * 12),
        "tensor b does not begin where the one before it ends",
    ),
    "overlap": (
        with_header({"a": entry(0, 8), "b": entry(4, 12)}, b"1" * 12),
        "tensor b does not begin",
    ),
    "backwards": (with_header({"a": entry(0, -4)}, b""), "its header is malformed"),
    "wrong size": (with_header({"a": entry(0, 8, [1])}, b"1" * 8), "has 8 bytes, not its shape's"),
    "large shape": (
        with_header({"a": entry(0, 8, [2**62, 2**62])}, b"1" * 8),
        "has 8 bytes, not its shape's",
    ),
    "shape too large": (
        with_header({"a": entry(0, 8, [2**80])}, b"1" * 8),
        "malformed|has 8 bytes",
    ),
    "no object": (with_header([]), "its header is malformed"),
    "no JSON": (with_header(b"{nothing}"), "its header is malformed"),
    "no UTF-8": (with_header(b'{"\xff": 1}'), "its header is malformed"),
    "no entry": (with_header({"a": 7}), "its header is malformed"),
    "no shape": (with_header({"a": {"dtype": "F32"}}), "its header is malformed"),
    "text for a shape": (with_header({"a": entry(0, 4, "4")}, b"1234"), "its header is malformed"),
    "negative": (with_header({"a": entry(0, 4, [-1])}, b"1234"), "its header is malformed"),
    "nested": (with_header(b'{"a": ' + b"[" * 100_000), "its header is"),
    "nested metadata": (
        with_header(b'{"__metadata__": ' + b"[" * 9_999 + b"]" * 9_999 + b"}"),
        "its header is",
    ),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_an_invalid_file_is_refused(name: str, tmp_path: Path) -> None:
    """safetensors, which reads the tensors, refuses the same files."""
    content, problem = UNSOUND[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        read_header(path)
    message = str(caught.value)
    assert re.search(f"model.safetensors: not a readable safetensors file: .*({problem})", message)
    assert "\n" not in message and len(message) < 400
    with pytest.raises(SafetensorError):
        safe_open(path, framework="pt").__enter__()


def test_a_path_that_is_not_a_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    for read in (missing_weight_files, find_weight_files, lambda d: check_checkpoint(d, {}, {})):
        with pytest.raises(ModelLoadError, match=r"model\.safetensors is not a regular file"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        ({"a": [4, 3], "b": [5]}, "the model has no place for tensor c"),
        ({**SHAPES, "d": [1]}, "no file has the tensor d; read: model.safetensors"),
        ({**SHAPES, "d": [1], "e": [1]}, "no file has the tensor d and 1 more"),
        ({**SHAPES, "a": [3, 4]}, r"tensor a has shape \[4, 3\], the model needs \[3, 4\]"),
    ],
)
def test_unexpected_tensors_are_named(
    shapes: dict[str, list[int]], problem: str, checkpoint: Path
) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        check_checkpoint(checkpoint, shapes, {})


def test_tied_copies_may_be_present_with_the_shape_of_the_original(checkpoint: Path) -> None:
    shapes = {"a": [4, 3], "b": [5]}
    with pytest.raises(ModelLoadError, match=r"tensor c has shape \[1\], the model needs \[5\]"):
        check_checkpoint(checkpoint, shapes, {"c": "b"})
    save_file({"a": torch.zeros(4, 3), "b": torch.zeros(5)}, checkpoint / "model.safetensors")
    assert list(check_checkpoint(checkpoint, shapes, {"c": "b"})) == ["a", "b"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_integer_tensors_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="tensor a is of type .*; supported: F64, F32, F16"):
        check_checkpoint(tmp_path, {"a": [4]}, {})


def shards(*names: Any) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        weight_map = {f"t{i}": name for i, name in enumerate(names)}
        index = {"weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    return write


def test_shards(tmp_path: Path) -> None:
    shards("x-2.safetensors", "x-1.safetensors", "x-2.safetensors")(tmp_path)
    assert missing_weight_files(tmp_path) == ["x-1.safetensors", "x-2.safetensors"]
    save_file({"t1": torch.zeros(2)}, tmp_path / "x-1.safetensors")
    assert missing_weight_files(tmp_path) == ["x-2.safetensors"]
    with pytest.raises(ModelLoadError, match=r"index\.json: the shard x-2\.safetensors is not"):
        find_weight_files(tmp_path)
    save_file({"t0": torch.zeros(2), "t2": torch.zeros(2)}, tmp_path / "x-2.safetensors")
    assert [path.name for path in find_weight_files(tmp_path)] == [
        "x-1.safetensors",
        "x-2.safetensors",
    ]
    origin = check_checkpoint(tmp_path, {f"t{i}": [2] for i in range(3)}, {})
    assert {name: path.name[:3] for name, path in origin.items()} == {
        "t1": "x-1",
        "t0": "x-2",
        "t2": "x-2",
    }
    save_file({"t0": torch.zeros(2), "t1": torch.zeros(2)}, tmp_path / "x-2.safetensors")
    with pytest.raises(
        ModelLoadError, match=r"x-2\.safetensors: tensor t1 is also in x-1\.safetensors"
    ):
        check_checkpoint(tmp_path, {f"t{i}": [2] for i in range(3)}, {})


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ("not json", "cannot be read"),
        ("[]", "must hold a JSON object"),
        ('{"metadata": {}}', "has no weight_map of names"),
        ('{"weight_map": {}}', "names no shards"),
        ('{"weight_map": {"a": "../m.safetensors"}}', "'../m.safetensors' is not the name of a"),
        ('{"weight_map": {"a": "config.json"}}', "'config.json' is not the name of a file"),
        ('{"weight_map": {"a": 3}}', "'3' is not the name of a file beside it"),
        ('{"weight_map": {"a": 3, "b": "c"}}', "is not the name of a file beside it"),
    ],
)
def test_a_bad_index_is_refused(index: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json.*" + problem):
        find_weight_files(tmp_path)


@pytest.mark.parametrize(("name", "dtype"), [("a\nb", "F32"), ("a", "F32\0")])
def test_texts_of_two_lines_are_refused(name: str, dtype: str, checkpoint: Path) -> None:
    """The safetensors library takes such names; a message would have two lines."""
    path = checkpoint / "model.safetensors"
    path.write_bytes(with_header({name: entry(0, 4, dtype=dtype)}, b"1234"))
    with pytest.raises(ModelLoadError) as caught:
        read_header(path)
    assert str(caught.value).endswith(f"tensor {name!r} is of type {dtype!r}")


def _json_changed(header: bytes, rng: random.Random) -> bytes:
    """The header with one of its values, names or brackets replaced."""
    places = list(re.finditer(rb'-?\d+|"[^"]*"|[\[\]{},:]', header))
    place = rng.choice(places)
    numbers = (b"0", b"-1", b"1.5", b"1e400", b"9" * 30, str(2**63).encode(), str(2**64).encode())
    names = (b'"a"', b'"dtype"', b'"shape"', b'"F8_E4M3"', b'"\\n\\u0000"', b'"\\ud800"', b'""')
    others = (b"null", b"true", b"[" * 5000, b"{}", b"", b",", b"[[1]]", b'{"a":' * 100)
    return header[: place.start()] + rng.choice(numbers + names + others) + header[place.end() :]


def _check_mutations(seeds: range, checkpoint: Path) -> None:
    path, refused = checkpoint / "model.safetensors", 0
    content = path.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + header_bytes], content[8 + header_bytes :]
    tracemalloc.start()
    for seed in seeds:
        rng = random.Random(seed)
        if seed % 2:
            changed = mutated(content, 8 + header_bytes, seed)
        else:
            changed = header
            for _ in range(rng.randint(1, 3)):
                changed = _json_changed(changed, rng)
            changed = len(changed).to_bytes(8, "little") + changed + data
        path.write_bytes(changed)
        started, before = time.thread_time(), tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        try:
            check_checkpoint(checkpoint, SHAPES, {})
        except ModelLoadError as error:
            refused += 1
            message = str(error)
            assert message.startswith(f"{checkpoint}") and message.isprintable(), (seed, message)
            assert len(message) < len(str(path)) + 400, seed
        else:
            # then the library reads the same, or refuses it: a key that is there twice
            with suppress(SafetensorError), safe_open(path, framework="pt") as file:
                assert {n: list(file.get_tensor(n).shape) for n in SHAPES} == SHAPES, seed
        assert tracemalloc.get_traced_memory()[1] - before < 2**21, seed
        assert time.thread_time() - started < 10, seed
    tracemalloc.stop()
    assert refused > len(seeds) * 0.7


def test_mutated_headers(checkpoint: Path) -> None:
    _check_mutations(range(400), checkpoint)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_5000_mutated_headers(checkpoint: Path) -> None:
    _check_mutations(range(1000, 6000), checkpoint)
