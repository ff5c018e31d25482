"""Reads the headers of GGUF files: metadata, and where each tensor lies.

Must not know: tensors' values, torch, what any metadata means, which architectures there are.
The format is little-endian. A file has the magic, the version, the number of tensors and the number
of metadata entries; the entries (key, type, value); the tensors (name, dimensions innermost first,
type, offset); and the data, in which each tensor is aligned.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from struct import Struct, unpack_from
from typing import Any, NamedTuple

from ..errors import ModelLoadError
from ..json_files import check_regular_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
FIRST_HEADER = Struct("<4sIQQ")
ALIGNMENT_KEY, DEFAULT_ALIGNMENT = "general.alignment", 32
SPLIT_COUNT_KEY, SPLIT_TENSORS_KEY = "split.count", "split.tensors.count"
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_DIMENSIONS = 4
# for all arrays of a file together; the largest tokenizers have about a million tokens and merges
MAX_ARRAY_ELEMENTS = 2**22
ELEMENTS_READ_AT_ONCE = 1024  # a longer array is read when someone asks for it
MAX_ENTRIES, MAX_TENSORS = 2**16, 2**18
MAX_KEY_BYTES = 65_535
SMALLEST_ENTRY_BYTES, SMALLEST_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8

# Maps GGML's number of a type to its name, the elements of a block and the bytes of a block. It
# lacks the types that are never stored (Q8_1, Q8_K) and those that were withdrawn.
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    36: ("I2_S", 128, 32),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}
# What a size that does not agree with the file may mean: the number of Q2_0 was in use for other
# blocks before llama.cpp had the type.
_OTHER_BLOCKS = {
    "Q2_0": "; blocks of 128 numbers, as in the first files of Ternary Bonsai, are not supported"
}
# Of types of bitnet.cpp, whose one scale of a tensor follows its numbers: the bytes that the scale
# takes, and the blocks that the tensor becomes as it is read
TYPES_OF_TENSORS = {"I2_S": (32, "INT2_128")}
BLOCK_SIZES = {name: (elements, size) for name, elements, size in _TYPES.values()}
# kernels/reference/gguf_blocks.py dequantizes these types.
READABLE_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K"),
    *("Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "TQ1_0", "TQ2_0", "Q1_0", "Q2_0"),
    *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "NVFP4"),
)
VECTOR_TYPES = READABLE_TYPES[:3]  # of norms and biases
# Native kernels multiply these types. Blocks of a type without kernels are packed again at load, to
# the type in memory that MEMORY_TYPES gives (kernels/reference/gguf_repack.py). Numbers of 16 and
# 32 bits become numbers of the model's dtype. tests/ipc/models/test_gguf_weights.py compares the
# tables with the kernels.
_WITH_KERNELS = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4"),
    *("Q4_K", "Q5_K", "Q6_K"),
)
MEMORY_TYPES = {type: type for type in _WITH_KERNELS} | {
    "Q2_K": "Q8_0",
    "Q3_K": "Q6_K",
    "IQ4_XS": "Q8_0",
    "TQ1_0": "INT2_128",
    "TQ2_0": "INT2_128",
    "Q1_0": "INT2_128",
    "Q2_0": "INT2_64",
    "IQ2_XXS": "Q8_0",
    "IQ2_XS": "Q8_0",
    "IQ2_S": "Q8_0",
    "IQ3_XXS": "Q8_0",
    "IQ3_S": "Q6_K",
    "IQ1_S": "Q6_K",
    "IQ1_M": "Q6_K",
    "NVFP4": "Q8_0",
}

# maps the number of a metadata type to struct's letter
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = Struct("<Q")


class GGUFTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # outermost first, as torch has it; quantized along the last
    type: str  # key of BLOCK_SIZES
    path: Path
    offset: int  # from the beginning of the file
    num_bytes: int


class Metadata(Mapping[str, Any]):
    """Maps keys to an int, float, bool, str, or a list of these. A long list, such as one of a
    vocabulary, is read from the file at each access, so that code that needs only the rest costs no
    memory.
    """

    def __init__(self, values: dict[str, Any]):
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        return value.read() if isinstance(value, _LongArray) else value

    def strings_at(self, key: str, indices: list[int]) -> dict[int, str]:
        """The strings of a list at these ascending indices, without those that are not there."""
        value = self._values.get(key)
        if isinstance(value, _LongArray):
            return value.strings_at(indices)
        values = value if isinstance(value, list) else []
        return {i: values[i] for i in indices if i < len(values) and isinstance(values[i], str)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class GGUFFile(NamedTuple):
    paths: list[Path]  # more than one if the file is split
    metadata: Metadata
    tensors: dict[str, GGUFTensor]


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf"


def read_gguf(path: Path) -> GGUFFile:
    """Reads the header of a GGUF file and, if it is one of several parts, the headers of the
    others. Metadata is the first part's.

    Raises ModelLoadError, naming file and field, for whatever does not agree with the file's size.
    It checks a number before it allocates anything for it.
    """
    metadata, tensors = _read_part(path)
    count = metadata.get(SPLIT_COUNT_KEY, 1)
    if count in (0, 1):
        return GGUFFile([path], metadata, dict(tensors))
    paths = _parts(path, count)
    first, total = metadata, dict(tensors)
    for number, part in enumerate(paths):
        part_metadata, part_tensors = _read_part(part) if part != path else (metadata, tensors)
        if number == 0:
            first, total = part_metadata, dict(part_tensors)
            continue
        if part_metadata.get(SPLIT_COUNT_KEY) != count:
            raise _unsound(part, f"{SPLIT_COUNT_KEY} is not {count}, as in {path.name}")
        if twice := total.keys() & part_tensors.keys():
            raise _unsound(part, f"tensor {min(twice):.100} is also in an earlier part")
        total |= part_tensors
    wanted = first.get(SPLIT_TENSORS_KEY, len(total))
    if wanted != len(total):
        raise _unsound(paths[0], f"{SPLIT_TENSORS_KEY} is {wanted}, its parts have {len(total)}")
    return GGUFFile(paths, first, total)


def part_names(name: str) -> list[str]:
    """The file names of all parts, given the name of one. The result is only `name` if that is not
    a part's name.
    """
    match = SPLIT_NAME.fullmatch(name)
    if not match or not 1 <= int(match["number"]) <= int(match["count"]):
        return [name]
    stem, count = match["stem"], int(match["count"])
    return [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def _parts(path: Path, count: Any) -> list[Path]:
    match = SPLIT_NAME.fullmatch(path.name)
    if not match or int(match["count"]) != count or len(part_names(path.name)) != count:
        raise _unsound(
            path, f"{SPLIT_COUNT_KEY} is {count!r:.100}, which the file's name does not say"
        )
    paths = [path.with_name(name) for name in part_names(path.name)]
    if missing := next((part for part in paths if not part.exists()), None):
        raise ModelLoadError(f"{path.parent}: the part {missing.name} of the model is not there")
    return paths


def _read_part(path: Path) -> tuple[Metadata, dict[str, GGUFTensor]]:
    check_regular_file(path)
    try:
        status = path.stat()
        return _read_part_once(path, status.st_ino, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise _unsound(path, str(error)) from error


# at a start, the configuration, the tokenizer, the plan and the weights each need the header
@lru_cache(maxsize=64)
def _read_part_once(
    path: Path, inode: int, size: int, mtime_ns: int
) -> tuple[Metadata, dict[str, GGUFTensor]]:
    if size < FIRST_HEADER.size:
        raise _unsound(path, f"it has {size} bytes, a header needs {FIRST_HEADER.size}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Header(path, data).read()


class _LongArray(NamedTuple):
    path: Path
    field: str  # what an error names
    letter: str  # of struct; "" for strings
    length: int
    at: int  # first byte

    def read(self) -> list[Any]:
        return self._in_file(lambda header: header.elements(self.letter, self.length, self.field))

    def strings_at(self, indices: list[int]) -> dict[int, str]:
        wanted = [i for i in indices if i < self.length and not self.letter]
        return self._in_file(lambda header: header.strings_at(wanted, self.field))

    def _in_file(self, function: Callable[[_Header], Any]) -> Any:
        """Returns the result of `function`, called with the header at the first byte."""
        try:
            with (
                self.path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                header = _Header(self.path, data)
                header.at = self.at
                return function(header)
        except (OSError, ValueError) as error:  # ValueError: the file is empty now
            raise _unsound(self.path, str(error)) from error


class _Header:
    """A position in the mapped file. `field` is what an error names."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.size = path, data, len(data)
        self.at = 0
        self.elements_left = MAX_ARRAY_ELEMENTS

    def read(self) -> tuple[Metadata, dict[str, GGUFTensor]]:
        magic, version, num_tensors, num_entries = FIRST_HEADER.unpack_from(self.data)
        self.at = FIRST_HEADER.size
        if magic != MAGIC:
            raise self.unsound(f"it begins with {magic!r}, not with {MAGIC!r}")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            reason = ", the file is big-endian" if swapped in VERSIONS else ""
            raise self.unsound(f"version {version} is not supported{reason}")
        for what, count, most, smallest in (
            ("metadata entries", num_entries, MAX_ENTRIES, SMALLEST_ENTRY_BYTES),
            ("tensors", num_tensors, MAX_TENSORS, SMALLEST_TENSOR_BYTES),
        ):
            if count > most:
                raise self.unsound(f"the number of {what} is {count:,}, the most is {most:,}")
            self.check_count(f"the number of {what}", count, smallest)
        metadata: dict[str, Any] = {}
        for index in range(num_entries):
            key = self.string(f"the key of metadata entry {index}", MAX_KEY_BYTES)
            if key in metadata:
                raise self.unsound(f"the metadata key {key:.100} is there twice")
            metadata[key] = self.value(key)
        alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
        is_number = isinstance(alignment, int) and not isinstance(alignment, bool)
        if not is_number or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise self.unsound(f"{ALIGNMENT_KEY} is {alignment!r:.100}, not a power of two")
        infos = [self.tensor(index) for index in range(num_tensors)]
        start = -(-self.at // alignment) * alignment
        return Metadata(metadata), self.placed(infos, start, alignment)

    def placed(
        self, infos: list[tuple[str, tuple[int, ...], str, int]], start: int, alignment: int
    ) -> dict[str, GGUFTensor]:
        """Returns the tensors, after checks that they are in the file and do not overlap."""
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_name, offset in infos:
            elements, block_bytes = BLOCK_SIZES[type_name]
            if shape[-1] % elements:
                raise self.unsound(
                    f"tensor {name:.100} has rows of {shape[-1]}, {type_name} needs a multiple of "
                    f"{elements}"
                )
            scale_bytes, _ = TYPES_OF_TENSORS.get(type_name, (0, ""))
            num_bytes = prod(shape) // elements * block_bytes + scale_bytes
            if offset % alignment:
                raise self.unsound(f"tensor {name:.100} has the offset {offset}, not aligned")
            if start + offset + num_bytes > self.size:
                raise self.unsound(
                    f"tensor {name:.100} ends {start + offset + num_bytes - self.size:,} bytes "
                    f"after the file{_OTHER_BLOCKS.get(type_name, '')}"
                )
            if name in tensors:
                raise self.unsound(f"tensor {name:.100} is there twice")
            tensors[name] = GGUFTensor(name, shape, type_name, self.path, start + offset, num_bytes)
        end, last_type = 0, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise self.unsound(
                    f"tensor {tensor.name:.100} overlaps the one before it"
                    f"{_OTHER_BLOCKS.get(last_type, '')}"
                )
            end, last_type = tensor.offset + tensor.num_bytes, tensor.type
        return tensors

    def tensor(self, index: int) -> tuple[str, tuple[int, ...], str, int]:
        name = self.string(f"the name of tensor {index}", MAX_KEY_BYTES)
        if not name.isprintable():
            raise self.unsound(f"tensor {index} has the name {name!r:.100}")
        num_dimensions = self.number("I", f"the number of dimensions of tensor {name:.100}")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self.unsound(f"tensor {name:.100} has {num_dimensions} dimensions")
        shape = tuple(
            self.number("Q", f"a dimension of tensor {name:.100}") for _ in range(num_dimensions)
        )
        if 0 in shape:
            raise self.unsound(f"tensor {name:.100} has a dimension of 0")
        number = self.number("I", f"the type of tensor {name:.100}")
        if number not in _TYPES:
            raise self.unsound(f"tensor {name:.100} is of type {number}, which is not known")
        offset = self.number("Q", f"the offset of tensor {name:.100}")
        return name, shape[::-1], _TYPES[number][0], offset

    def value(self, key: str) -> Any:
        field = f"the value of {key:.100}"
        kind = self.number("I", f"the type of {key:.100}")
        if kind == _STRING:
            return self.string(field)
        if kind == _ARRAY:
            return self.array(key)
        return self.number(self.letter(kind, key), field)

    def array(self, key: str) -> list[Any] | _LongArray:
        field = f"the array {key:.100}"
        kind, length = self.number("I", field), self.number("Q", field)
        letter = "" if kind == _STRING else self.letter(kind, key)
        self.check_count(f"the length of {field}", length, Struct(f"<{letter or 'Q'}").size)
        if length > self.elements_left:
            raise self.unsound(f"{field} is the one with which arrays have too many elements")
        self.elements_left -= length
        if length <= ELEMENTS_READ_AT_ONCE:
            return self.elements(letter, length, field)
        array = _LongArray(self.path, field, letter, length, self.at)
        if letter:
            self.skip(length * Struct(f"<{letter}").size, field)
        else:
            self.skip_strings(length, field)
        return array

    def elements(self, letter: str, length: int, field: str) -> list[Any]:
        if letter == "?":
            return [byte != 0 for byte in self.take(length, field)]
        if letter:
            form = f"<{length}{letter}"
            return list(unpack_from(form, self.take(Struct(form).size, field)))
        return self.strings(length, field)

    def skip_strings(self, length: int, field: str) -> None:
        # the loop calls no methods, because there may be a million strings
        data, at, end, unpack = self.data, self.at, self.size - 8, _LENGTH.unpack_from
        for _ in range(length):
            if at > end:
                raise self.unsound(f"it ends within {field}")
            at += 8 + unpack(data, at)[0]
        self.skip(at - self.at, field)

    def strings(self, length: int, field: str) -> list[str]:
        # this loop calls no methods either
        data, at, end, values, unpack = self.data, self.at, self.size, [], _LENGTH.unpack_from
        try:
            for _ in range(length):
                if at + 8 > end or at + 8 + (num_bytes := unpack(data, at)[0]) > end:
                    raise self.unsound(f"it ends within {field}")
                at += 8 + num_bytes
                values.append(data[at - num_bytes : at].decode())
        except UnicodeDecodeError:
            raise self.unsound(f"{field} has a string that is not UTF-8") from None
        self.at = at
        return values

    def strings_at(self, indices: list[int], field: str) -> dict[int, str]:
        """Reads the strings at these ascending indices of an array that begins here."""
        found, passed = {}, 0
        for index in indices:
            self.skip_strings(index - passed, field)
            found[index], passed = self.string(field), index + 1
        return found

    def string(self, field: str, most: int | None = None) -> str:
        num_bytes = self.number("Q", field)
        if most is not None and num_bytes > most:
            raise self.unsound(f"{field} has {num_bytes:,} bytes")
        try:
            return self.take(num_bytes, field).decode()
        except UnicodeDecodeError:
            raise self.unsound(f"{field} is not UTF-8") from None

    def number(self, letter: str, field: str) -> Any:
        form = Struct(f"<{letter}")
        return form.unpack(self.take(form.size, field))[0]

    def letter(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise self.unsound(f"the type of {key:.100} is {kind}, which is not known")
        return _SCALARS[kind]

    def take(self, num_bytes: int, field: str) -> bytes:
        self.skip(num_bytes, field)
        return self.data[self.at - num_bytes : self.at]

    def skip(self, num_bytes: int, field: str) -> None:
        if num_bytes > self.size - self.at:
            raise self.unsound(f"it ends within {field}")
        self.at += num_bytes

    def check_count(self, field: str, count: int, smallest: int) -> None:
        if count * smallest > self.size - self.at:
            raise self.unsound(f"{field} is {count:,}, more than the file can hold")

    def unsound(self, problem: str) -> ModelLoadError:
        return _unsound(self.path, problem)


def _unsound(path: Path, problem: str) -> ModelLoadError:
    # names in a file may hold anything
    problem = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in problem)
    return ModelLoadError(f"{path}: not a readable GGUF file: {problem}")
